"""Ways to decode the same text, ours and others', paired on the same prompts in one run.

A way is a function of a prompt; the first is plain `generate`. Each way's text is compared with the plain one before
anything is timed, and one whose text differs, or that fails, gets no speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from ..plain_decoding import plain_decoding
from .batches import PLAIN, in_turns
from .compare import first_difference, timed

MADE_FOR_DFLASH = "speculation_type"  # the option of `generate` that came with transformers' own DFlash


@dataclass(frozen=True)
class Way:
    """How to decode.

    Attributes:
        name: Of the way.
        decode: Prompt int64 `[1, P]` to the whole text, prompt included: ids `[1, n]` or `[n]`, a list of them, or an
            output of `generate`.
        is_ours: What it raises is an error of this run; what others raise is their result.
    """

    name: str
    decode: Callable[[torch.Tensor], Any]
    is_ours: bool = False


@dataclass
class PeerCell:
    """One way on one prompt set.

    Attributes:
        prompt_set, way: Names.
        num_prompts: Prompts of the set.
        new_tokens: Of all texts.
        differing: Prompts whose text is not the plain one, as (index, first differing new token).
        failure: What the way raised instead; None: nothing.
        passes: Passes through the target's decoder for all texts, prompts' own included; 0 where the way goes round
            it.
        seconds: Wall time of each repeat, all prompts together; empty for a way that differs or fails.
    """

    prompt_set: str
    way: str
    num_prompts: int
    new_tokens: int = 0
    differing: list[tuple[int, int]] = field(default_factory=list)
    failure: str | None = None
    passes: int = 0
    seconds: list[float] = field(default_factory=list)

    @property
    def is_equal(self) -> bool:
        """Whether all texts are the plain ones."""
        return self.failure is None and not self.differing

    @property
    def tokens_per_second(self) -> float | None:
        """Of the median repeat; None where outputs differ."""
        return self.new_tokens / median(self.seconds) if self.is_equal else None

    @property
    def tokens_per_pass(self) -> float | None:
        """New tokens over the target's passes; None where outputs differ or passes cannot be counted."""
        return self.new_tokens / self.passes if self.is_equal and self.passes else None

    def ratios(self, plain: PeerCell) -> list[float]:
        """Plain over own seconds, repeat by repeat; none where outputs differ."""
        if not (self.is_equal and plain.is_equal):
            return []
        return [theirs / own for theirs, own in zip(plain.seconds, self.seconds, strict=True)]


def generate_way(
    target: PreTrainedModel, name: str, max_new_tokens: int, *, is_ours: bool = False, **more: Any
) -> Way:
    """Greedy `target.generate` with `more` arguments."""
    call = {"max_new_tokens": max_new_tokens, **plain_decoding(target, 0.0), **more}
    generate: Any = target.generate
    return Way(name, lambda ids: generate(ids, attention_mask=torch.ones_like(ids), **call), is_ours)


def require_native_dflash() -> None:
    """Check that this transformers has a DFlash generator of its own.

    Raises:
        ImportError: It has none.
    """
    if not hasattr(GenerationConfig(), MADE_FOR_DFLASH):
        raise ImportError(
            "The installed transformers has no DFlash generator (`generate(speculation_type='dflash')`); it came with "
            "5.15. Leave --dflash out, or install a newer one."
        )


def measure_peers(
    target: PreTrainedModel,
    prompts: Mapping[str, Sequence[torch.Tensor]],
    ways: Sequence[Way],
    *,
    repeats: int = 3,
    progress: Callable[[str], None] = lambda _: None,
) -> list[PeerCell]:
    """Decode every prompt in every way, in turns.

    Args:
        target: What all ways decode with, in the state to be measured (packed or not).
        prompts: Set to prompts, int64 `[1, P]` each.
        ways: The first is plain decoding.
        repeats: Timed runs of each prompt, of each way.
        progress: Told what runs next.

    Returns:
        Cells by prompt set, in the order of `ways`.
    """
    known = {way.name: way for way in ways}
    cells: list[PeerCell] = []
    for name, inputs in prompts.items():
        ids = [prompt.to(target.device) for prompt in inputs]
        wanted: list[list[int]] = []
        row = {}
        for way in ways:
            progress(f"{name}, {way.name}: comparing texts")
            row[way.name] = _compared(target, PeerCell(name, way.name, len(ids)), way, ids, wanted)
        timed_cells = {way: cell for way, cell in row.items() if cell.is_equal}
        for cell in timed_cells.values():
            cell.seconds = [0.0] * repeats
        for repeat, index, way_name in in_turns(list(timed_cells), len(ids), repeats):
            progress(f"{name}, {way_name}: repeat {repeat + 1}, prompt {index + 1}")
            _time(timed_cells[way_name], repeat, known[way_name], index, ids[index], wanted[index])
        cells += row.values()
    return cells


def _compared(
    target: PreTrainedModel, cell: PeerCell, way: Way, prompts: Sequence[torch.Tensor], wanted: list[list[int]]
) -> PeerCell:
    """The cell of a way after its first texts, which also warm it up; `wanted` is filled by the first way."""
    is_first = not wanted
    for index, ids in enumerate(prompts):
        with _counted(target, cell):
            new_ids = _new_ids(cell, way, ids)
        if new_ids is None:
            break
        if is_first:
            wanted.append(new_ids)
        _judge(cell, index, new_ids, wanted[index])
        cell.new_tokens += len(new_ids)
    return cell


def _time(cell: PeerCell, repeat: int, way: Way, index: int, ids: torch.Tensor, wanted: list[int]) -> None:
    """Add one timed run, unless an earlier one has shown that the way's text changes from run to run."""
    if not cell.is_equal:
        return
    new_ids, seconds = timed(lambda: _new_ids(cell, way, ids))
    cell.seconds[repeat] += seconds
    if new_ids is not None:
        _judge(cell, index, new_ids, wanted)


def _judge(cell: PeerCell, index: int, new_ids: list[int], wanted: list[int]) -> None:
    place = first_difference(new_ids, wanted)
    if place is not None:
        cell.differing.append((index, place))


def _new_ids(cell: PeerCell, way: Way, prompt: torch.Tensor) -> list[int] | None:
    """New ids of a text; None, and the cell's failure, where a way of others raises."""
    try:
        ids = way.decode(prompt)
        return _behind(prompt, ids)
    except Exception as error:
        if way.is_ours:
            raise
        cell.failure = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return None


def _behind(prompt: torch.Tensor, result: Any) -> list[int]:
    ids = torch.as_tensor(getattr(result, "sequences", result)).reshape(-1).tolist()
    before = prompt[0].tolist()
    if ids[: len(before)] != before:
        raise ValueError(
            f"expected the ids of the whole text, which begins with the prompt's {len(before)} ids, got {len(ids)} "
            f"ids that begin with {ids[:4]}."
        )
    return ids[len(before) :]


@contextmanager
def _counted(target: PreTrainedModel, cell: PeerCell) -> Iterator[None]:
    """Count passes through the target's decoder."""

    def count(*_: Any) -> None:
        cell.passes += 1

    handle = target.get_decoder().register_forward_hook(count)
    try:
        yield
    finally:
        handle.remove()


__all__ = ["PLAIN", "PeerCell", "Way", "generate_way", "measure_peers", "require_native_dflash"]
