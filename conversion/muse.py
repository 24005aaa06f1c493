"""transformers' own DFlash drafter, `muse_glimmer_assistant`: sliding layers that see both ways, windows inclusive."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .checkpoint import Checkpoint
from .names import MUSE, map_names
from .parts import BACKBONE, NO_HEADS, NO_SCALE, REST, backbone, layer_kinds, set_layers, tables, target_width
from .reading import Reader
from .record import Record

NAME = "muse"
MODEL_TYPE = "muse_glimmer_assistant"


def recognises(checkpoint: Checkpoint) -> bool:
    """Whether it has the model type, which is this format's alone."""
    return not checkpoint.is_gguf and checkpoint.config.get("model_type") == MODEL_TYPE


def read(checkpoint: Checkpoint, choices: Mapping[str, Any]) -> Record:
    """Record of a Muse Glimmer assistant.

    Raises:
        ValueError: A field is missing.
    """
    reader = Reader(NAME, checkpoint, choices)
    sizes = [name for name in BACKBONE if name != "vocab_size"]
    reader.require(["block_size", "mask_token_id", "target_layer_ids", "layer_types", *sizes])
    stored = checkpoint.tensors
    reader.tensors = None if stored is None else map_names(reader.source, stored, MUSE, reader.ignored)
    for name in ("block_size", "mask_token_id", "target_layer_ids"):
        reader.take(name)
    reader.take("vocab_size", rule=(None, "no table over the vocabulary is stored, the target's counts"))
    backbone(reader)
    reader.rope(checkpoint.config)
    windows = layer_kinds(reader)
    source = "config.json: layer_types, sliding_window; rule of the format: no layer is causal in the block"
    set_layers(reader, windows, rule="abs_all", causal=[False] * len(windows), source=source)
    reader.set("sample_from_anchor", False, "rule of the format: slot k drafts its own position, slot 0 nothing")
    reader.fill(NO_HEADS)
    tables(reader)
    target_width(reader)
    reader.set("draft_vocab", None, "rule of the format: the whole vocabulary")
    reader.fill({**NO_SCALE, **REST})
    return reader.record()


__all__ = ["NAME", "read", "recognises"]
