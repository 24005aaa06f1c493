"""z-lab's DFlash: one layout, two readings. Version 0.1.0 has windows and scales, the older code ignores windows.

So an old layout with sliding layers is two functions, and is refused until the caller says which one was trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import specforge
from .checkpoint import Checkpoint
from .names import SPECFORGE, map_names
from .parts import (
    BACKBONE,
    NO_HEADS,
    NO_SCALE,
    REST,
    backbone,
    full_attention,
    layer_kinds,
    set_layers,
    tables,
    target_width,
)
from .reading import Reader
from .record import Record

NAME = "zlab-dflash"
_DFLASH = "dflash_config."
_UNREAD = ("use_swa", "swa_window_size", "causal")


def recognises(checkpoint: Checkpoint) -> bool:
    """Whether it is a `DFlashDraftModel` with a `dflash_config`, and not SpecForge's."""
    config = checkpoint.config
    is_dflash = "DFlashDraftModel" in (config.get("architectures") or [])
    has_inner = isinstance(config.get("dflash_config"), dict) and "speculators_model_type" not in config
    return not checkpoint.is_gguf and is_dflash and has_inner and not specforge.recognises(checkpoint)


def read(checkpoint: Checkpoint, choices: Mapping[str, Any]) -> Record:
    """Record of a z-lab folder.

    Raises:
        ValueError: A field is missing, or sliding layers in a layout whose two readers differ on them.
    """
    reader = Reader(NAME, checkpoint, choices)
    stored = checkpoint.tensors
    reader.tensors = None if stored is None else map_names(reader.source, stored, SPECFORGE, reader.ignored)
    both = ("block_size", "mask_token_id", "target_layer_ids", "num_target_layers")
    reader.require([*((_DFLASH + name, name) for name in both), *BACKBONE])
    for name in both:
        reader.take(name, _DFLASH + name, name)
    reader.take("vocab_size")
    backbone(reader)
    reader.rope(checkpoint.config)
    reader.set("sample_from_anchor", False, "rule of the format: slot k drafts its own position, slot 0 nothing")
    _attention(reader)
    reader.take("embed_scale", *_both("input_embedding_scale"), rule=(1.0, "no scale unless the config has one"))
    reader.take("logit_scale", *_both("output_multiplier"), rule=(1.0, "no scale unless the config has one"))
    reader.take(
        "final_logit_softcapping", *_both("final_logit_softcapping"), rule=(None, "no cap unless the config has one")
    )
    reader.fill(NO_HEADS)
    tables(reader)
    target_width(reader)
    reader.set("draft_vocab", None, "rule of the format: the whole vocabulary")
    _unread(reader)
    reader.fill({**NO_SCALE, **REST})
    return reader.record()


def _both(name: str) -> tuple[str, str]:
    return (_DFLASH + name, name)


def _attention(reader: Reader) -> None:
    windows, is_causal = layer_kinds(reader), reader.flag("is_causal")
    causal = [window is not None if is_causal is None else is_causal for window in windows]
    is_old = reader.get(_DFLASH + "block_size") is None
    if is_old and (any(windows) or any(causal)):
        _require_choice(reader, windows)
        if reader.choices.get("attention_windows", ...) is None:
            full_attention(reader, "the caller: as the code before 0.1.0 reads it")
            return
    source = "config.json: layer_types, sliding_window; is_causal (absent: sliding layers are causal)"
    set_layers(reader, windows, rule="per_slot_all", causal=causal, source=source)


def _require_choice(reader: Reader, windows: list[int | None]) -> None:
    if "attention_windows" in reader.choices:
        return
    raise ValueError(
        f"{reader.source} has `block_size` at the top level, as DFlash wrote it before 0.1.0, and layers with windows "
        f"{windows} or causal blocks: the older code ignores those, 0.1.0 follows them, so the drafter was trained "
        f"one way or the other. Pass `attention_windows=None` for the older code, `attention_windows={windows}` for "
        "0.1.0."
    )


def _unread(reader: Reader) -> None:
    for key in _UNREAD:
        if reader.get(_DFLASH + key) is not None:
            reader.ignored[_DFLASH + key] = "read by no version of the format's own code"
    if "mask_embedding.pt" in reader.checkpoint.files:
        reader.ignored["mask_embedding.pt"] = "a pickle; the format's own code does not read it"
        reader.warnings.append(
            "mask_embedding.pt replaces the mask token's embedding in some engines; it is not read, as the format's "
            "own code does not."
        )


__all__ = ["NAME", "read", "recognises"]
