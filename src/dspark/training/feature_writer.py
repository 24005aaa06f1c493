"""`FeatureWriter`: a feature folder that grows sequence by sequence, beside the file of answers it is of.

The result is the folder `write_features` makes of the finished file: same shards, same index. Sequences are added in
the file's order; what was not stored before an interruption is computed from the file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from ..files import write_atomically
from ..target import describe, text_config, unwrap
from .continuations import GenerationTap
from .data import SHORTEST_ANSWER, AnswerDataset
from .feature_index import FeaturesError, finished_shards, index_header, shard_entry, write_index
from .features import target_logsumexp
from .progress import WorkProgress
from .shards import DTYPES, StoredSequence, join_sequences, records_note, sequence_features, token_bytes

_COUNTS = ("sequences", "tokens", "supervised_tokens")


class FeatureWriter:
    """Writes features of answers as they come.

    Args:
        target: Unpacked, so that its weights can be noted.
        folder: Where to write; made when the first shard is.
        target_layer_ids: Tapped layers.
        dtype: How hidden states are stored: `"bfloat16"`, `"float16"` or `"float32"`.
        shard_bytes: Size of a shard, about.

    Raises:
        FeaturesError: The dtype or a layer is unknown, or the folder holds features of another target or other
            settings.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        folder: str | os.PathLike[str],
        target_layer_ids: Sequence[int],
        *,
        dtype: str = "bfloat16",
        shard_bytes: int = 2**28,
    ) -> None:
        if dtype not in DTYPES:
            raise FeaturesError(f"Features are stored as one of {', '.join(DTYPES)}, got {dtype!r}.")
        last = text_config(unwrap(target)).num_hidden_layers - 2
        if not target_layer_ids or min(target_layer_ids) < -1 or max(target_layer_ids) > last:
            raise FeaturesError(
                f"Layers to store must lie in -1..{last} of {describe(target)} (-1: the embedding's output; the last "
                f"layer's is stored anyway), got {list(target_layer_ids)}."
            )
        self.folder = Path(folder)
        self.target_layer_ids = list(target_layer_ids)
        self.dtype = DTYPES[dtype]
        self._target = target
        self._shard_bytes = shard_bytes
        self._token_bytes = token_bytes(target, target_layer_ids, dtype)
        self._index = index_header(target, target_layer_ids, dtype)
        settings = {name: value for name, value in self._index.items() if name not in _COUNTS}
        self._index["shards"] = finished_shards(self.folder, settings)
        self._pending: list[StoredSequence] = []
        self._pending_bytes = 0

    def catch_up(self, records: AnswerDataset, batch_size: int) -> None:
        """Compute what is missing of answers that are in the file already.

        Args:
            records: All of the file.
            batch_size: Sequences per forward pass.

        Raises:
            FeaturesError: The folder holds features of other text.
        """
        done, step = self._stored(records), 8 * batch_size  # a few batches of like length at a time
        total = sum(records.lengths)
        with WorkProgress("Writing features", total, unit="tokens", done=sum(records.lengths[:done])) as work:
            for start in range(done, len(records), step):
                items = [records[i] for i in range(start, min(start + step, len(records)))]
                how = (self.target_layer_ids, batch_size, self.dtype, work)
                for sequence in sequence_features(self._target, items, *how):
                    self.add(sequence)

    def add(self, sequence: StoredSequence) -> None:
        """Store one more sequence; a shard is written when the next would make it too large."""
        size = len(sequence.input_ids) * self._token_bytes
        if self._pending and self._pending_bytes + size > self._shard_bytes:
            self._flush()
        self._pending.append(sequence)
        self._pending_bytes += size

    def tap(self) -> GenerationTap:
        """What `continue_prompts` needs to keep the features of a batch of answers."""
        return GenerationTap(self._target, self.target_layer_ids, self.dtype)

    def add_answers(self, tap: GenerationTap, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> None:
        """Store the answers of one batch, as `tap` saw them; those without room for an anchor are left out."""
        width, longest = tap.states.last.shape[1], max(map(len, prompts))
        starts = torch.tensor([longest - len(prompt) for prompt in prompts])[:, None]
        ends = torch.tensor([longest + len(answer) for answer in answers])[:, None]
        places = torch.arange(width)
        real = (places >= starts) & (places < ends)
        totals = target_logsumexp(self._target, tap.states.last, real.to(tap.states.last.device)).cpu()
        last = tap.states.last.to("cpu", self.dtype)
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            if len(answer) < SHORTEST_ANSWER:
                continue
            ids = torch.tensor(prompt + answer)
            is_answer = torch.arange(len(ids)) >= len(prompt)
            kept = real[row]
            self.add(StoredSequence(ids, is_answer, tap.states.hidden[row, kept], last[row, kept], totals[row, kept]))

    def finish(self, records: AnswerDataset) -> dict[str, Any]:
        """Write the last shard and mark the folder complete.

        Args:
            records: All of the finished file.

        Returns:
            The index.
        """
        if self._pending:
            self._flush()
        self._index.update(**records_note(records), planned_shards=len(self._index["shards"]), complete=True)
        write_index(self.folder, self._index)
        return self._index

    def _flush(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        tensors = join_sequences(self._pending)
        path = self.folder / f"shard-{len(self._index['shards']):05d}.safetensors"
        write_atomically(path, lambda temporary: save_file(tensors, temporary))
        self._index["shards"].append(shard_entry(path, tensors["offsets"]))
        self._index["complete"] = False
        write_index(self.folder, self._index)
        self._pending, self._pending_bytes = [], 0

    def _stored(self, records: AnswerDataset) -> int:
        """How many of the first records are in finished shards."""
        done = 0
        for shard in self._index["shards"]:
            with safe_open(self.folder / shard["file"], "pt") as tensors:
                stored = tensors.get_tensor("input_ids").long()
            part = [records[i] for i in range(done, min(done + shard["sequences"], len(records)))]
            ids = torch.cat([item["input_ids"] for item in part]) if part else stored[:0]
            if not torch.equal(ids, stored):
                raise FeaturesError(
                    f"{self.folder / shard['file']} holds features of other text than the answers written so far. Use "
                    "another folder, or delete this one: features of the answers there are will be computed."
                )
            done += shard["sequences"]
        return done


__all__ = ["FeatureWriter"]
