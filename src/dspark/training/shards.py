"""Hidden-state shards: the target's features of a data set on disk, so that training runs without the target's layers.

A folder holds `shard-00000.safetensors`, ... and `index.json`. A shard's tensors, sequences joined along the tokens:
`input_ids` int32 `[T]`, `loss_mask` bool `[T]`, `offsets` int64 `[n+1]`, `target_hidden_states [T, m*D_t]`,
`target_last_hidden_states [T, D_t]`, and optionally `target_logsumexp` float32 `[T]`. `offline.py` reads them.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from ..cpu import packed
from ..files import write_atomically
from ..target import text_config, unwrap
from .feature_index import FeaturesError, finished_shards, index_header, shard_entry, write_index
from .features import capture_features, target_logsumexp
from .progress import WorkProgress

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class StoredSequence(NamedTuple):
    """One sequence's part of a shard: `input_ids` and `loss_mask [S]`, `hidden [S, m*D_t]` and `last [S, D_t]` on the
    CPU in the stored dtype, `logsumexp` float32 `[S]`.
    """

    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    hidden: torch.Tensor
    last: torch.Tensor
    logsumexp: torch.Tensor


class ShardPlan(NamedTuple):
    """Which sequences go into which shard, and what the folder will weigh."""

    shards: list[range]
    bytes_per_token: int
    tokens: int


def write_features(  # noqa: PLR0913 - how, in keywords
    target: PreTrainedModel,
    records: Any,
    folder: str | os.PathLike[str],
    target_layer_ids: Sequence[int],
    *,
    batch_size: int = 8,
    dtype: str = "bfloat16",
    shard_bytes: int = 2**28,
    pack_target: bool = False,
) -> dict[str, Any]:
    """Run the target over `records` once and store what training needs; finished shards are skipped.

    Args:
        target: The frozen target; features are computed in its dtype, on its device.
        records: Items `{"input_ids" [S], "loss_mask" [S]}` and a list `lengths`, as `AnswerDataset`.
        folder: Where to write; made if missing.
        target_layer_ids: Tapped layers, as in the drafter's config.
        batch_size: Sequences per forward pass.
        dtype: How hidden states are stored: `"bfloat16"`, `"float16"` or `"float32"`.
        shard_bytes: Size of a shard, about.
        pack_target: On a CPU, pack the target's linear layers while it runs (after its weights are noted).

    Returns:
        The index.

    Raises:
        FeaturesError: The folder holds features of other data, another target or other settings, or the disk is too
            small. Nothing is written then.
    """
    folder = Path(folder)
    plan = plan_shards(target, records, target_layer_ids, dtype=dtype, shard_bytes=shard_bytes)
    index = {**index_header(target, target_layer_ids, dtype), **records_note(records)}
    index["planned_shards"] = len(plan.shards)
    index["shards"] = finished_shards(folder, index)
    done = sum(shard["tokens"] for shard in index["shards"])
    with (
        packed(target, wanted=pack_target and len(index["shards"]) < len(plan.shards)),
        WorkProgress("Writing features", plan.tokens, unit="tokens", done=done) as work,
    ):
        _announce(work, folder, plan, done)
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(len(index["shards"]), len(plan.shards)):
            items = [records[i] for i in plan.shards[number]]
            tensors = _shard(target, items, target_layer_ids, batch_size, DTYPES[dtype], work)
            path = folder / f"shard-{number:05d}.safetensors"
            write_atomically(path, lambda temporary, tensors=tensors: save_file(tensors, temporary))
            index["shards"].append(shard_entry(path, tensors["offsets"]))
            index["complete"] = number + 1 == len(plan.shards)
            write_index(folder, index)
    return index


def plan_shards(
    target: PreTrainedModel, records: Any, layer_ids: Sequence[int], *, dtype: str, shard_bytes: int
) -> ShardPlan:
    """Cut the sequences, in their order, into shards of about `shard_bytes`.

    Raises:
        FeaturesError: There are no records, or the dtype is unknown.
    """
    if dtype not in DTYPES:
        raise FeaturesError(f"Features are stored as one of {', '.join(DTYPES)}, got {dtype!r}.")
    if not len(records):
        raise FeaturesError("There are no records to write features of.")
    per_token = token_bytes(target, layer_ids, dtype)
    shards, start, size = [], 0, 0
    for position, length in enumerate(records.lengths):
        if size and size + length * per_token > shard_bytes:
            shards.append(range(start, position))
            start, size = position, 0
        size += length * per_token
    shards.append(range(start, len(records)))
    return ShardPlan(shards, per_token, sum(records.lengths))


def token_bytes(target: PreTrainedModel, layer_ids: Sequence[int], dtype: str) -> int:
    """Bytes a stored token takes: its hidden states, id, normaliser and mask."""
    width = text_config(unwrap(target)).hidden_size * (len(layer_ids) + 1)
    return width * DTYPES[dtype].itemsize + 4 + 4 + 1


def records_note(records: Any) -> dict[str, Any]:
    """What an index says of the records its features are of."""
    digest, supervised = hashlib.sha256(), 0
    for i in range(len(records)):
        item = records[i]
        digest.update(item["input_ids"].numpy().tobytes())
        digest.update(item["loss_mask"].numpy().tobytes())
        supervised += int(item["loss_mask"].sum())
    return {
        "sequences": len(records),
        "tokens": sum(records.lengths),
        "supervised_tokens": supervised,
        "records_sha256": digest.hexdigest(),
    }


def _announce(work: WorkProgress, folder: Path, plan: ShardPlan, done: int) -> None:
    """Say what the folder will weigh, before anything is computed, and refuse what cannot fit."""
    needed = (plan.tokens - done) * plan.bytes_per_token / 2**30
    whole = plan.tokens * plan.bytes_per_token / 2**30
    place = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(place).free / 2**30
    work.say(
        f"{folder}: {len(plan.shards)} shards, {plan.tokens:,} tokens of {plan.bytes_per_token:,} bytes, "
        f"{whole:.2f} GiB on disk ({needed:.2f} GiB to write, {free:.1f} GiB free)"
    )
    if needed > free:
        raise FeaturesError(
            f"The features need {needed:.2f} GiB more in {folder}, and {free:.2f} GiB are free. Use fewer or shorter "
            "records, or train without stored features (the target then runs beside)."
        )


def _shard(
    target: PreTrainedModel,
    items: list[dict[str, torch.Tensor]],
    layer_ids: Sequence[int],
    batch_size: int,
    dtype: torch.dtype,
    work: WorkProgress,
) -> dict[str, torch.Tensor]:
    return join_sequences(sequence_features(target, items, layer_ids, batch_size, dtype, work))


def sequence_features(
    target: PreTrainedModel,
    items: Sequence[dict[str, torch.Tensor]],
    layer_ids: Sequence[int],
    batch_size: int,
    dtype: torch.dtype,
    work: WorkProgress,
) -> list[StoredSequence]:
    """Run the target over `items`. Sequences of like length run together and are put back in order."""
    lengths = [len(item["input_ids"]) for item in items]
    by_length = sorted(range(len(items)), key=lambda i: lengths[i])
    parts: dict[int, StoredSequence] = {}
    for start in range(0, len(items), batch_size):
        places = by_length[start : start + batch_size]
        ids = torch.nn.utils.rnn.pad_sequence([items[i]["input_ids"] for i in places], batch_first=True)
        states = capture_features(target, ids.to(unwrap(target).device), layer_ids)
        real = torch.arange(ids.shape[1]) < torch.tensor([lengths[i] for i in places])[:, None]
        totals = target_logsumexp(target, states.last, real.to(states.last.device)).cpu()
        for row, place in enumerate(places):
            n = lengths[place]
            hidden, last = (tensor[row, :n].to("cpu", dtype) for tensor in states)
            parts[place] = StoredSequence(**items[place], hidden=hidden, last=last, logsumexp=totals[row, :n])
        work.advance(sum(lengths[i] for i in places))
    return [parts[i] for i in range(len(items))]


def join_sequences(sequences: Sequence[StoredSequence]) -> dict[str, torch.Tensor]:
    """Tensors of a shard that holds these sequences."""
    columns = StoredSequence(*(torch.cat(column) for column in zip(*sequences, strict=True)))
    return {
        "input_ids": columns.input_ids.int(),
        "loss_mask": columns.loss_mask,
        "offsets": torch.tensor([0, *(len(sequence.input_ids) for sequence in sequences)]).cumsum(0),
        "target_hidden_states": columns.hidden,
        "target_last_hidden_states": columns.last,
        "target_logsumexp": columns.logsumexp,
    }


__all__ = [
    "DTYPES",
    "ShardPlan",
    "StoredSequence",
    "join_sequences",
    "plan_shards",
    "records_note",
    "sequence_features",
    "token_bytes",
    "write_features",
]
