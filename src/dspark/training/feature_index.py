"""`index.json` of a feature folder: what the shards are, and that they are whole.

Files appear whole (written under another name, then renamed) and the index lists finished ones only, so an interrupted
run goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from ..files import write_json
from ..target import text_config, unwrap
from ..target_note import fingerprint
from .features import vocabulary_rows

INDEX_NAME = "index.json"
FORMAT, VERSION = "dspark-features", 1
WEIGHT_HASHES = ("embedding_hash", "lm_head_hash", "layer_hashes", "adapter_hash")
REQUIRED_TENSORS = ("input_ids", "loss_mask", "offsets", "target_hidden_states", "target_last_hidden_states")


class FeaturesError(ValueError):
    """A feature folder that cannot be written or used; the message names the file, what was found, and the way out."""


def index_header(target: PreTrainedModel, layer_ids: Sequence[int], dtype: str) -> dict[str, Any]:
    """The part of an index that says what the features are; counts and shards are still empty."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "target": fingerprint(target),
        "target_layer_ids": list(layer_ids),
        "target_hidden_size": text_config(unwrap(target)).hidden_size,
        "vocab_size": vocabulary_rows(target),
        "dtype": dtype,
        "sequences": 0,
        "tokens": 0,
        "supervised_tokens": 0,
        "complete": False,
        "shards": [],
    }


def shard_entry(path: Path, offsets: torch.Tensor) -> dict[str, Any]:
    """Index entry of a finished shard file."""
    return {
        "file": path.name,
        "sequences": len(offsets) - 1,
        "tokens": int(offsets[-1]),
        "bytes": path.stat().st_size,
        "sha256": sha256_of(path),
    }


def sha256_of(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_index(folder: Path, index: dict[str, Any]) -> None:
    """Write `index.json`, whole or not at all."""
    write_json(folder / INDEX_NAME, index)


def read_index(folder: Path) -> dict[str, Any]:
    """Read `index.json`.

    Raises:
        FeaturesError: It is missing, unreadable, or of another format or version.
    """
    path = folder / INDEX_NAME
    if not path.is_file():
        found = len(list(folder.glob("*.safetensors")))
        raise FeaturesError(
            f"{folder} has no {INDEX_NAME} ({found} safetensors files found), so nothing says which target and layers "
            "its features come from. Write features with `dspark train --data ... --features DIR`, or index finished "
            "shards with `dspark.training.index_features`."
        )
    try:
        index = json.loads(path.read_text())
        kind, version = index["format"], index["version"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise FeaturesError(f"{path} is not an index of features ({error!r}): restore it or write anew.") from error
    if (kind, version) != (FORMAT, VERSION):
        raise FeaturesError(f"{path} says format {kind!r} version {version!r}; {FORMAT!r} version {VERSION} is read.")
    return index


def finished_shards(folder: Path, index: dict[str, Any]) -> list[dict[str, Any]]:
    """Shards that an earlier run with the same settings finished, in order.

    Raises:
        FeaturesError: The folder holds features of something else.
    """
    if not (folder / INDEX_NAME).exists() and not any(folder.glob("*.safetensors")):
        return []
    before = read_index(folder)
    same = {key for key in index if key not in ("shards", "complete")}
    differing = sorted(key for key in same if not _agree(before, index, key))
    if differing:
        shown = "; ".join(f"{key} is {before.get(key)!r:.60}, now {index[key]!r:.60}" for key in differing)
        raise FeaturesError(
            f"{folder} holds features of something else ({shown}). Use another folder, or delete this one."
        )
    return list(takewhile(lambda shard: _has_size(folder, shard), before["shards"]))


def _agree(before: dict[str, Any], now: dict[str, Any], key: str) -> bool:
    if key != "target":
        return before.get(key) == now[key]
    # A target's name is a matter of where it was loaded from; its weights are what counts, where they can be read.
    pairs = [(before["target"].get(name), now["target"].get(name)) for name in ("model_type", *WEIGHT_HASHES)]
    return all(a == b or a is None or b is None for a, b in pairs)


def _has_size(folder: Path, shard: dict[str, Any]) -> bool:
    path = folder / shard["file"]
    return path.exists() and path.stat().st_size == shard["bytes"]


def index_features(
    folder: str | os.PathLike[str], target: PreTrainedModel, target_layer_ids: Sequence[int]
) -> dict[str, Any]:
    """Make the index of a folder of finished shards that has none.

    Args:
        folder: Holds `*.safetensors` with the tensors that `shards.py` describes.
        target: The target they were computed with (beyond the widths this cannot be checked).
        target_layer_ids: The layers they were computed with, in order.

    Raises:
        FeaturesError: There is no shard, one is not safetensors, or one lacks a tensor.
    """
    folder = Path(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FeaturesError(f"{folder} holds no *.safetensors files to index.")
    index = index_header(target, target_layer_ids, "")
    for path in files:
        try:
            with safe_open(path, "pt") as tensors:
                entry = shard_entry(path, tensors.get_tensor("offsets"))
                index["supervised_tokens"] += int(tensors.get_tensor("loss_mask").sum())
                index["dtype"] = str(tensors.get_slice("target_hidden_states")[:0].dtype).removeprefix("torch.")
        except SafetensorError as error:
            raise FeaturesError(f"{path} cannot be indexed: {error}. Delete it or write it anew.") from error
        index["shards"].append(entry)
        index["sequences"] += entry["sequences"]
        index["tokens"] += entry["tokens"]
    index["complete"] = True
    write_index(folder, index)
    return index


__all__ = ["INDEX_NAME", "FeaturesError", "index_features", "read_index", "write_index"]
