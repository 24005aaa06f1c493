"""Tokens per second by batch size and policy, side by side in one run: what a batch of prompts really takes.

Every way of decoding runs the same batches, in an order that turns by one from round to round of the measurement; the
figure is the median over these rounds, so that a machine that is slow for a while is slow for all of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
        seconds: Wall time of each repeat.
        new_tokens: Tokens of all rows, the same in every repeat.
        is_equal: Whether all rows' ids equal the plain ones.
        stats: Of all repeats; None for plain.
    """

    way: str
    batch_size: int
    seconds: list[float] = field(default_factory=list)
    new_tokens: int = 0
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
        prompts: int64 `[1, P]` each, of mixed lengths; a batch takes the first ones, left-padded.
        ways: Name to settings.
        batch_sizes: Rows, each at most the number of prompts.
        max_new_tokens: Per row; rows also end at the target's end-of-sequence tokens.
        repeats: Runs of each cell.
        progress: Called after every run.

    Returns:
        Cells by batch size, plain first.

    Raises:
        ValueError: A batch is larger than the number of prompts.
    """
    if max(batch_sizes) > len(prompts):
        raise ValueError(f"A batch of {max(batch_sizes)} rows needs as many prompts, got {len(prompts)}.")
    arguments = {"max_new_tokens": max_new_tokens, "return_dict_in_generate": True, **plain_decoding(target, 0.0)}
    cells: list[BatchCell] = []
    for size in batch_sizes:
        inputs = left_padded(prompts[:size], int(arguments.get("pad_token_id") or 0))
        row = {way: BatchCell(way, size) for way in (PLAIN, *ways)}
        names = list(row)
        wanted: torch.Tensor | None = None
        for repeat in range(repeats + 1):  # the first warms up: kernels, buffers, learned costs
            for name in [*names[repeat % len(names) :], *names[: repeat % len(names)]]:
                cell = row[name]
                call = dict(arguments) if name == PLAIN else {
                    **arguments, "assistant_model": drafter, "speculation": ways[name]
                }  # fmt: skip
                output, seconds = timed(lambda call=call, inputs=inputs: _generate(target, inputs, call))
                if name == PLAIN and wanted is None:
                    wanted = output.sequences
                if repeat == 0:
                    continue
                cell.seconds.append(seconds)
                if name != PLAIN:
                    cell.stats = (cell.stats or SpeculationStats()).merge(output.speculation)
                assert wanted is not None
                cell.new_tokens = _new_tokens(wanted, inputs["input_ids"].shape[1], arguments)
                cell.is_equal &= torch.equal(output.sequences, wanted)
                if progress is not None:
                    progress(cell)
        cells += row.values()
    return cells


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


__all__ = ["PLAIN", "BatchCell", "left_padded", "measure_batches"]
