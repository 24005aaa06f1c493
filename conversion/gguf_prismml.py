"""GGUF of the PrismML fork, architecture `dspark` with doubled keys; layer ids are ours, without a shift."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .checkpoint import Checkpoint
from .gguf_dflash import gguf_heads, gguf_sizes, gguf_vocabulary
from .names import GGUF_PRISMML, map_names
from .parts import NO_SCALE, REST, full_attention, tables, target_width
from .reading import Reader
from .record import Record

NAME = "gguf-prismml"
_KEYS = "dspark.dspark."


def recognises(checkpoint: Checkpoint) -> bool:
    """Whether it is a GGUF file of that architecture with the fork's doubled keys."""
    config = checkpoint.config
    return (
        checkpoint.is_gguf
        and config.get("general.architecture") == "dspark"
        and any(key.startswith(_KEYS) for key in config)
    )


def read(checkpoint: Checkpoint, choices: Mapping[str, Any]) -> Record:
    """Record of such a file.

    Raises:
        ValueError: A key is missing.
    """
    reader = Reader(NAME, checkpoint, choices)
    reader.tensors = map_names(reader.source, checkpoint.tensors or {}, GGUF_PRISMML, reader.ignored)
    gguf_sizes(reader, "dspark.")
    reader.take("block_size", _KEYS + "block_size")
    reader.layer_ids(_KEYS + "target_layers", 0, "")
    reader.take("mask_token_id", _KEYS + "mask_token_id")
    reader.set("sample_from_anchor", True, "rule of the format: the anchor slot drafts")
    full_attention(reader, "rule of the format: whole context, bidirectional blocks")
    gguf_heads(reader, has_confidence=reader.flag(_KEYS + "confidence_head"))
    _agree(reader, "markov_rank", "markov_rank")
    _agree(reader, "confidence_head_with_markov", "confidence_head_with_markov")
    gguf_vocabulary(reader)
    reader.set("draft_vocab", None, "rule of the format: the whole vocabulary")
    tables(reader)
    target_width(reader)
    reader.fill({**NO_SCALE, **REST})
    return reader.record()


def _agree(reader: Reader, name: str, key: str) -> None:
    declared, found = reader.get(_KEYS + key), reader.fields[name].value
    if declared is not None and declared != found:
        raise ValueError(f"{reader.source}: {_KEYS}{key} is {declared}, by the tensors it is {found}.")


__all__ = ["NAME", "read", "recognises"]
