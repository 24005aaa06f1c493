"""Parts and unions of data sets, with what training asks of them: held-out sequences, several feature folders."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any, NamedTuple

import torch
from torch.utils.data import ConcatDataset, Dataset
from transformers import PreTrainedModel

from .collator import mix, sequence_lengths
from .data import DataCounts, DataError
from .feature_index import FeaturesError
from .offline import FeatureDataset

_HELD_OUT = 1 << 42  # keeps this draw apart from those of order and anchors


class Part(Dataset[dict[str, torch.Tensor]]):
    """Some sequences of a data set.

    Args:
        whole: The data set.
        indices: Which, in this order.
    """

    def __init__(self, whole: Any, indices: Sequence[int]) -> None:
        self.whole = whole
        self.indices = list(indices)
        lengths = sequence_lengths(whole)
        self.lengths = [lengths[i] for i in self.indices]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.whole[self.indices[index]]

    def ids_and_mask(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and loss mask of one sequence; its features are not read."""
        return self.whole.ids_and_mask(self.indices[index])

    def check_fits(self, target: PreTrainedModel, width: int) -> None:
        """As the whole's, where it stores features."""
        if hasattr(self.whole, "check_fits"):
            self.whole.check_fits(target, width)


class Split(NamedTuple):
    """What is trained on, and what is held out of it."""

    train: Part
    held_out: Part


def hold_out(data: Any, count: int, seed: int) -> Split:
    """Draw `count` sequences that training does not see; the same ones for the same data and seed.

    Raises:
        DataError: Nothing would be left to train on.
    """
    if count >= len(data):
        raise DataError(
            f"{count} sequences cannot be held out of {len(data)}: none would be left to train on. Hold out fewer "
            "(--held-out), or give more data."
        )
    generator = torch.Generator().manual_seed(mix(seed, _HELD_OUT))
    chosen = set(torch.randperm(len(data), generator=generator)[:count].tolist())
    lengths = sequence_lengths(data)
    rest = [i for i in range(len(data)) if i not in chosen]
    # Sequences of like length are evaluated together: less padding.
    return Split(Part(data, rest), Part(data, sorted(chosen, key=lambda i: (lengths[i], i))))


class JoinedFeatures(ConcatDataset[dict[str, torch.Tensor]]):
    """Several feature folders as one data set; items as [`FeatureDataset`]'s, without what a folder lacks.

    Attributes:
        target_layer_ids: Tapped layers of the items, in order.
        lengths: Tokens of each sequence.
        counts: Of all folders.

    Args:
        parts: The folders.

    Raises:
        FeaturesError: They store different dtypes, or share no layer.
    """

    def __init__(self, parts: Sequence[FeatureDataset]) -> None:
        super().__init__(parts)
        self.parts = list(parts)
        self.lengths = [length for part in self.parts for length in part.lengths]
        self._check_dtypes()
        shared = [
            layer
            for layer in self.parts[0].index["target_layer_ids"]
            if all(layer in part.index["target_layer_ids"] for part in self.parts)
        ]
        if not shared:
            stored = "; ".join(f"{part.folder}: {part.index['target_layer_ids']}" for part in self.parts)
            raise FeaturesError(
                f"The feature folders share no layer ({stored}). Train from folders of the same layers."
            )
        self.read_layers(shared)
        # What every item has: batches need the same tensors of each.
        self._names = set.intersection(*(set(part[0]) for part in self.parts))
        self.counts = DataCounts(*map(sum, zip(*(astuple(part.counts) for part in self.parts), strict=True)))

    def _check_dtypes(self) -> None:
        dtypes = {str(part.folder): part.index["dtype"] for part in self.parts}
        if len(set(dtypes.values())) > 1:
            stored = ", ".join(f"{folder} ({dtype})" for folder, dtype in dtypes.items())
            raise FeaturesError(f"The feature folders store different dtypes: {stored}. Write them with the same one.")

    def read_layers(self, layer_ids: Sequence[int] | None) -> None:
        """As [`FeatureDataset.read_layers`], for every folder."""
        for part in self.parts:
            part.read_layers(layer_ids)
        self.target_layer_ids = self.parts[0].target_layer_ids

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in super().__getitem__(index).items() if name in self._names}

    def answer_token_counts(self, vocab_size: int) -> torch.Tensor:
        """How often each token is written by the target: int64 `[vocab_size]`."""
        return torch.stack([part.answer_token_counts(vocab_size) for part in self.parts]).sum(0)

    def ids_and_mask(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and loss mask of one sequence; its features are not read."""
        number = bisect_right(self.cumulative_sizes, index)
        before = self.cumulative_sizes[number - 1] if number else 0
        return self.parts[number].ids_and_mask(index - before)

    def check_fits(self, target: PreTrainedModel, width: int) -> None:
        """As [`FeatureDataset.check_fits`], for every folder."""
        for part in self.parts:
            part.check_fits(target, width)

    def check_target(self, target: PreTrainedModel) -> None:
        """As [`FeatureDataset.check_target`], for every folder."""
        for part in self.parts:
            part.check_target(target)


__all__ = ["JoinedFeatures", "Part", "Split", "hold_out"]
