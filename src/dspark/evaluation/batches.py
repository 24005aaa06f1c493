"""Tokens per second by batch size and policy, side by side in one run: what batches of prompts really take.

All batch sizes decode the same prompts: on a single batch, which policy is best is chance. Every way of decoding runs
the same batches, in an order that turns by one from batch to batch, so that a machine that is slow for a while is slow
for all of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from transformers import PreTrainedModel

from ..modeling_dspark import DSparkDrafter
from ..plain_decoding import plain_decoding
from ..speculation import SpeculationConfig
from ..stats import SpeculationStats
from .compare import timed

PLAIN = "plain"


@dataclass
class BatchCell:
    """One way of decoding at one batch size.

    Attributes:
        way: `"plain"` or a name of a way.
        batch_size: Rows.
        seconds: Wall time of each repeat, all batches together.
        new_tokens: Tokens of all rows of all batches, the same in every repeat.
        is_equal: Whether all rows' ids equal the plain ones.
        stats: Of all repeats; None for plain.
    """

    way: str
    batch_size: int
    seconds: list[float]
    new_tokens: int
    is_equal: bool = True
    stats: SpeculationStats | None = None

    @property
    def tokens_per_second(self) -> float:
        """Of the median repeat."""
        return self.new_tokens / statistics.median(self.seconds)


def measure_batches(  # noqa: PLR0913 - what is measured, and how
    target: PreTrainedModel,
    drafter: DSparkDrafter,
    prompts: Sequence[torch.Tensor],
    ways: Mapping[str, SpeculationConfig],
    batch_sizes: Sequence[int],
    *,
    max_new_tokens: int,
    repeats: int = 3,
    progress: Callable[[BatchCell], None] | None = None,
) -> list[BatchCell]:
    """Decode batches of prompts greedily, plain and in each way.

    Args:
        target: In the state to be measured (packed or not).
        drafter: Fits it.
        prompts: int64 `[1, P]` each, of mixed lengths, left-padded in batches as they come; what does not fill a batch
            is left out.
        ways: Name to settings.
        batch_sizes: Rows, each at most the number of prompts.
        max_new_tokens: Per row; rows also end at the target's end-of-sequence tokens.
        repeats: Runs of each cell.
        progress: Called after every batch.

    Returns:
        Cells by batch size, plain first.

    Raises:
        ValueError: A batch is larger than the number of prompts.
    """
    if max(batch_sizes) > len(prompts):
        raise ValueError(f"A batch of {max(batch_sizes)} rows needs as many prompts, got {len(prompts)}.")
    arguments = {"max_new_tokens": max_new_tokens, "return_dict_in_generate": True, **plain_decoding(target, 0.0)}
    calls = {name: {**arguments, "assistant_model": drafter, "speculation": way} for name, way in ways.items()}
    cells: list[BatchCell] = []
    for size in batch_sizes:
        batches = [
            left_padded(prompts[first : first + size], int(arguments.get("pad_token_id") or 0))
            for first in range(0, len(prompts) - size + 1, size)
        ]
        wanted = [_generate(target, inputs, arguments).sequences for inputs in batches]  # which also warms up
        for call in calls.values():
            _generate(target, batches[0], call)  # kernels, buffers, learned costs
        new = sum(_new_tokens(ids, i["input_ids"].shape[1], arguments) for ids, i in zip(wanted, batches, strict=True))
        row = {way: BatchCell(way, size, [0.0] * repeats, new) for way in (PLAIN, *ways)}
        for repeat, batch, name in in_turns(list(row), len(batches), repeats):
            _run(row[name], repeat, target, batches[batch], calls.get(name, arguments), wanted[batch])
            if progress is not None:
                progress(row[name])
        cells += row.values()
    return cells


def _run(
    cell: BatchCell, repeat: int, target: PreTrainedModel, inputs: Mapping[str, torch.Tensor], call: dict[str, Any],
    wanted: torch.Tensor,
) -> None:  # fmt: skip
    """Decode one batch and add it to this repeat of the cell."""
    output, seconds = timed(lambda: _generate(target, inputs, call))
    cell.seconds[repeat] += seconds
    cell.is_equal &= torch.equal(output.sequences, wanted)
    if cell.way != PLAIN:
        cell.stats = (cell.stats or SpeculationStats()).merge(output.speculation)


def in_turns(ways: Sequence[str], num_batches: int, repeats: int) -> Iterator[tuple[int, int, str]]:
    """Repeat, batch and way of each run: every way on each batch, in an order that turns by one each time."""
    for turn, (repeat, batch) in enumerate(product(range(repeats), range(num_batches))):
        first = turn % len(ways)
        for way in (*ways[first:], *ways[:first]):
            yield repeat, batch, way


def left_padded(prompts: Sequence[torch.Tensor], pad_token_id: int) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` int64 `[B, P]` of prompts `[1, P_b]`."""
    width = max(prompt.shape[1] for prompt in prompts)
    ids = [torch.nn.functional.pad(p, (width - p.shape[1], 0), value=pad_token_id) for p in prompts]
    masks = [torch.nn.functional.pad(torch.ones_like(p), (width - p.shape[1], 0)) for p in prompts]
    return {"input_ids": torch.cat(ids), "attention_mask": torch.cat(masks)}


def _generate(target: Any, inputs: Mapping[str, torch.Tensor], call: dict[str, Any]) -> Any:
    return target.generate(**{name: tensor.to(target.device) for name, tensor in inputs.items()}, **call)


def _new_tokens(sequences: torch.Tensor, prompt: int, arguments: Mapping[str, Any]) -> int:
    """Tokens up to and with each row's first end-of-sequence token."""
    ends = arguments.get("eos_token_id")
    ends = set(ends if isinstance(ends, list) else [ends])
    total = 0
    for row in sequences[:, prompt:].tolist():
        total += next((n + 1 for n, token in enumerate(row) if token in ends), len(row))
    return total


__all__ = ["PLAIN", "BatchCell", "in_turns", "left_padded", "measure_batches"]
