"""`FeatureDataset`: training sequences with their stored features, read from shards as they are needed.

Shards are memory-mapped: a sequence costs one read of its own rows, and the system's file cache does the rest.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from ..target import describe
from ..target_note import fingerprint
from .data import DataCounts
from .feature_index import REQUIRED_TENSORS, WEIGHT_HASHES, FeaturesError, read_index, sha256_of


class FeatureDataset(Dataset[dict[str, torch.Tensor]]):
    """Items hold `input_ids` int64 `[S]`, `loss_mask` bool `[S]`, `target_hidden_states [S, m*D_t]`,
    `target_last_hidden_states [S, D_t]` in the stored dtype, and `target_logsumexp` float32 `[S]` where stored.

    Attributes:
        target_layer_ids: Tapped layers of the items, in order.
        lengths: Tokens of each sequence.
        counts, index: What the folder holds.

    Args:
        folder: Written by `write_features`, or indexed by `index_features`.
        target_layer_ids: Layers to read, a subset of the stored ones; None: all.
        verify: Compare every shard's SHA-256 with the index first (reads each file once).

    Raises:
        FeaturesError: The index is missing, of another version or unfinished, a shard is missing, corrupt or of
            another shape than the index says, or a layer was not stored.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        target_layer_ids: Sequence[int] | None = None,
        verify: bool = True,
    ) -> None:
        self.folder = Path(folder)
        self.index = read_index(self.folder)
        self._check_complete()
        self.read_layers(target_layer_ids)
        self._paths = [self.folder / shard["file"] for shard in self.index["shards"]]
        self._handles: dict[int, Any] = {}
        self.lengths: list[int] = []
        self._offsets: list[list[int]] = []
        for number, shard in enumerate(self.index["shards"]):
            self._open(number, shard, verify)
        self._firsts = list(accumulate((shard["sequences"] for shard in self.index["shards"]), initial=0))
        self.counts = DataCounts(
            records=len(self),
            used=len(self),
            tokens=self.index["tokens"],
            supervised_tokens=self.index["supervised_tokens"],
        )

    def read_layers(self, layer_ids: Sequence[int] | None) -> None:
        """Give the features of these layers from now on, in this order; None: of all that are stored.

        Raises:
            FeaturesError: One was not stored.
        """
        stored, width = self.index["target_layer_ids"], self.index["target_hidden_size"]
        self.target_layer_ids: list[int] = stored if layer_ids is None else list(layer_ids)
        if missing := [layer for layer in self.target_layer_ids if layer not in stored]:
            raise FeaturesError(
                f"{self.folder} stores layers {stored}, the drafter also reads {missing}. Write features of its "
                "layers, or build a drafter that taps stored ones."
            )
        starts = [stored.index(layer) * width for layer in self.target_layer_ids]
        is_whole = self.target_layer_ids == stored
        self._columns = None if is_whole else [slice(start, start + width) for start in starts]

    def __len__(self) -> int:
        return self._firsts[-1]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tensors, start, end = self._place(index)
        item = {name: tensors.get_slice(name)[start:end] for name in tensors.keys() if name != "offsets"}  # noqa: SIM118
        item["input_ids"] = item["input_ids"].long()
        if self._columns is not None:
            item["target_hidden_states"] = torch.cat([item["target_hidden_states"][:, c] for c in self._columns], -1)
        return item

    def _place(self, index: int) -> tuple[Any, int, int]:
        """The shard of a sequence, and its first and last row there."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"Sequence {index} of {len(self)}.")
        index %= len(self)
        number = bisect_right(self._firsts, index) - 1
        place = index - self._firsts[number]
        start, end = self._offsets[number][place : place + 2]
        return self._handle(number), start, end

    def __getstate__(self) -> dict[str, Any]:
        # Worker processes map the files themselves.
        return {**self.__dict__, "_handles": {}}

    def answer_token_counts(self, vocab_size: int) -> torch.Tensor:
        """How often each token is written by the target: int64 `[vocab_size]`."""
        counts = torch.zeros(vocab_size, dtype=torch.long)
        for number in range(len(self._paths)):
            tensors = self._handle(number)
            ids = tensors.get_tensor("input_ids").long()[tensors.get_tensor("loss_mask")]
            counts += torch.bincount(ids, minlength=vocab_size)
        return counts

    def ids_and_mask(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and loss mask of one sequence; its features are not read."""
        tensors, start, end = self._place(index)
        ids, mask = (tensors.get_slice(name)[start:end] for name in ("input_ids", "loss_mask"))
        return ids.long(), mask

    def check_fits(self, target: PreTrainedModel, width: int) -> None:
        """Refuse features that are not of this target, or not of the drafter's `width` (`m*D_t`).

        Raises:
            FeaturesError: As said; names both.
        """
        self.check_target(target)
        stored = len(self.target_layer_ids) * self.index["target_hidden_size"]
        if stored != width:
            raise FeaturesError(
                f"{self.folder} gives features {stored} wide (layers {self.target_layer_ids} of width "
                f"{self.index['target_hidden_size']}), the drafter takes {width}. Use a drafter that taps the same "
                "layers of the same target."
            )

    def check_target(self, target: PreTrainedModel) -> None:
        """Refuse features of another target.

        Raises:
            FeaturesError: As said; names both.
        """
        known, found = self.index["target"], fingerprint(target)
        for name in WEIGHT_HASHES:
            # Packed or quantised weights cannot be read: None.
            if known.get(name) and found[name] and known[name] != found[name]:
                raise FeaturesError(
                    f"{self.folder} holds features of {known.get('name') or known.get('architecture')} with {name}="
                    f"{known[name]}, but {describe(target)} has {found[name]}. Train with the target the features "
                    "were written with."
                )

    # --- opening --------------------------------------------------------------------------------------------------

    def _check_complete(self) -> None:
        if not self.index["complete"]:
            planned = self.index.get("planned_shards", "?")
            raise FeaturesError(
                f"{self.folder} is unfinished: {len(self.index['shards'])} of {planned} shards are written. Run the "
                "command that wrote them again; it goes on where it stopped."
            )

    def _open(self, number: int, shard: dict[str, Any], verify: bool) -> None:
        path = self._paths[number]
        if not path.is_file():
            raise FeaturesError(f"{path} is missing, but the index lists it. Restore it or write the folder anew.")
        if path.stat().st_size != shard["bytes"] or (verify and sha256_of(path) != shard["sha256"]):
            raise FeaturesError(
                f"{path} is not the file the index was made for (size or SHA-256 differs): it was cut, damaged or "
                "replaced. Delete it together with the index and write the folder anew."
            )
        try:
            tensors = self._handle(number)
            names = set(tensors.keys())
            if missing := [name for name in REQUIRED_TENSORS if name not in names]:
                raise FeaturesError(f"{path} lacks the tensors {', '.join(missing)}: it is not a feature shard.")
            offsets = tensors.get_tensor("offsets")
        except SafetensorError as error:
            raise FeaturesError(f"{path} is not a readable safetensors file: {error}.") from error
        self._check_shapes(path, tensors, shard, int(offsets[-1]))
        self._offsets.append(offsets.tolist())
        self.lengths += offsets.diff().tolist()

    def _check_shapes(self, path: Path, tensors: Any, shard: dict[str, Any], tokens: int) -> None:
        width = self.index["target_hidden_size"]
        expected = {
            "input_ids": [tokens],
            "loss_mask": [tokens],
            "target_hidden_states": [tokens, len(self.index["target_layer_ids"]) * width],
            "target_last_hidden_states": [tokens, width],
        }
        for name, shape in expected.items():
            found = tensors.get_slice(name).get_shape()
            if found != shape or tokens != shard["tokens"]:
                raise FeaturesError(
                    f"{path}: `{name}` has shape {found}, the index says {shape} for {shard['tokens']} tokens of "
                    f"layers {self.index['target_layer_ids']}. The index belongs to other shards."
                )

    def _handle(self, number: int) -> Any:
        if number not in self._handles:
            self._handles[number] = safe_open(self._paths[number], "pt")
        return self._handles[number]


__all__ = ["FeatureDataset"]
