"""Right-padded batches of sequences, with or without stored features, and a data order that survives interruption."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Sampler

_WINDOW = 32  # optimizer steps sorted by length together: large enough to save padding, small enough to stay random


class BlockCollator:
    """Pads the items of `AnswerDataset` or `FeatureDataset` on the right.

    Padding is 0 everywhere: an id every embedding has, unsupervised, and behind all real tokens, which causal targets
    and anchored blocks never look at. Dtypes stay as they are.

    Args:
        max_length: Longer sequences lose their end; None: nothing is cut.
    """

    def __init__(self, max_length: int | None = None) -> None:
        self.max_length = max_length

    def __call__(self, items: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Batch `[B, S, ...]` of items `[S_b, ...]`; keys are those of the first item."""
        batch = {}
        for key in items[0]:
            values = [item[key][: self.max_length] for item in items]
            batch[key] = torch.nn.utils.rnn.pad_sequence(values, batch_first=True)
        return batch


class EpochSampler(Sampler[int]):
    """A fresh order each epoch that depends on the seed and the epoch only, so a resumed run sees the same data.

    Args:
        lengths: Tokens of each sequence.
        step_size: Sequences of one optimizer step, over all devices and accumulation.
        seed: Source of the order.
        epoch: Called at the start of each pass; the number of finished epochs.
        group_by_length: Put sequences of like length into the same step (less padding).
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        step_size: int,
        seed: int,
        epoch: Callable[[], int],
        group_by_length: bool = True,
    ) -> None:
        self.lengths = lengths
        self.step_size = step_size
        self.seed = seed
        self.epoch = epoch
        self.group_by_length = group_by_length

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(mix(self.seed, self.epoch()))
        order = torch.randperm(len(self.lengths), generator=generator).tolist()
        return iter(self._grouped(order, generator) if self.group_by_length else order)

    def _grouped(self, order: list[int], generator: torch.Generator) -> list[int]:
        span = _WINDOW * self.step_size
        steps: list[list[int]] = []
        for start in range(0, len(order), span):
            window = sorted(order[start : start + span], key=lambda i: self.lengths[i])
            steps += [window[i : i + self.step_size] for i in range(0, len(window), self.step_size)]
        # A short last step must stay last, or every step after it would straddle two groups.
        last = [steps.pop()] if steps and len(steps[-1]) < self.step_size else []
        shuffled = [steps[i] for i in torch.randperm(len(steps), generator=generator).tolist()] + last
        return [index for step in shuffled for index in step]


def mix(*numbers: int) -> int:
    """One 63-bit seed from several integers, so that neighbouring seeds share no draws (SplitMix64 rounds)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1


def padding_share(lengths: Sequence[int], order: Sequence[int], batch_size: int) -> float:
    """Share of a pass's positions that are padding, sequences taken in `order`, `batch_size` at a time."""
    batches = [[lengths[i] for i in order[start : start + batch_size]] for start in range(0, len(order), batch_size)]
    positions = sum(max(batch) * len(batch) for batch in batches)
    return 1 - sum(map(sum, batches)) / max(positions, 1)


def sequence_lengths(dataset: Any) -> list[int]:
    """Tokens of each sequence of a data set: its `lengths`, or measured item by item."""
    lengths = getattr(dataset, "lengths", None)
    return [len(item["input_ids"]) for item in dataset] if lengths is None else list(lengths)


__all__ = ["BlockCollator", "EpochSampler", "mix", "padding_share", "sequence_lengths"]
