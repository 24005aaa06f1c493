"""SpecForge's layout (DSpark and DFlash), as exported, as a training state, and as normalised for SGLang.

Head settings are in `dflash_config` (hoisted copies must agree); embedding and LM head are the target's; legacy saves
have the heads below `logit_head.`, some in both places.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dspark.rope_rules import is_number

from .checkpoint import Checkpoint
from .names import SPECFORGE, map_names
from .parts import BACKBONE, NO_HEADS, NO_SCALE, REST, backbone, heads, layer_kinds, set_layers, tables, target_width
from .reading import Reader
from .record import Record

NAME = "specforge"
_DFLASH = "dflash_config."
_KINDS = {"DSparkDraftModel": "dspark", "DFlashDraftModel": "dflash", "Qwen3DSparkModel": "dspark"}
# Keys its configs have and z-lab's, with the same architecture, do not.
_OWN_KEYS = ("projector_type", "attention_mode", "confidence_head_alpha", "markov_rank")


def recognises(checkpoint: Checkpoint) -> bool:
    """Whether it has a `dflash_config` with SpecForge's keys, or its always written `draft_vocab_size`."""
    config, inner = checkpoint.config, checkpoint.config.get("dflash_config")
    if checkpoint.is_gguf or not isinstance(inner, dict) or "speculators_model_type" in config:
        return False
    names = config.get("architectures") or []
    if not any(name in _KINDS for name in names):
        return False
    if any(inner.get(key) is not None for key in _OWN_KEYS):
        return True
    return "Qwen3DSparkModel" not in names and (
        config.get("draft_vocab_size") is not None or "DSparkDraftModel" in names
    )


def read(checkpoint: Checkpoint, choices: Mapping[str, Any]) -> Record:
    """Record of a SpecForge folder.

    Raises:
        ValueError: A field is missing, or architecture, projector and heads contradict each other.
    """
    reader = Reader(NAME, checkpoint, choices)
    stored = checkpoint.tensors
    reader.tensors = None if stored is None else map_names(reader.source, stored, SPECFORGE, reader.ignored)
    kind = _kind(reader)
    both = [(_DFLASH + name, name) for name in ("mask_token_id", "target_layer_ids", "block_size")]
    reader.require([*both, "num_target_layers", *BACKBONE])
    for name in ("mask_token_id", "target_layer_ids", "block_size"):
        reader.take(name, _DFLASH + name, name)
    for name in ("num_target_layers", "vocab_size"):
        reader.take(name)
    _backbone(reader)
    reader.rope(checkpoint.config)
    windows = layer_kinds(reader)
    causal = [window is not None for window in windows]
    source = "config.json: layer_types, sliding_window; rule of the format: sliding layers are causal in the block"
    set_layers(reader, windows, rule="per_slot_ctx", causal=causal, source=source)
    rule = (kind == "dspark", f"its {kind} {'drafts' if kind == 'dspark' else 'does not draft'} from the anchor slot")
    reader.take("sample_from_anchor", rule=rule)
    if kind == "dspark":
        _heads(reader)
    else:
        reader.fill(NO_HEADS)
    tables(reader)
    target_width(reader)
    _whole_vocabulary(reader)
    reader.fill({**NO_SCALE, **REST})
    return reader.record()


def _kind(reader: Reader) -> str:
    """`dspark` or `dflash`; everything that hints at it must agree, as it also decides the anchor's rule."""
    names = [name for name in reader.config["architectures"] if name in _KINDS]
    projector = reader.get(_DFLASH + "projector_type")
    by_name = _KINDS[names[0]]
    by_projector = by_name if projector is None else projector
    if by_name != by_projector:
        raise ValueError(
            f"{reader.source}: architectures {names} and dflash_config.projector_type {projector!r} disagree. They "
            "decide the heads and whether the anchor slot drafts: correct the one that is wrong."
        )
    if by_name == "dflash" and any(name.startswith("markov_head.") for name in reader.tensors or ()):
        raise ValueError(f"{reader.source}: architectures {names} is DFlash, and markov_head tensors are stored.")
    return by_name


def _backbone(reader: Reader) -> None:
    backbone(reader)
    if reader.get(_DFLASH + "attention_mode") == "mha":
        reader.set(
            "num_key_value_heads",
            reader.fields["num_attention_heads"].value,
            "config.json: dflash_config.attention_mode",
        )


def _heads(reader: Reader) -> None:
    alpha = reader.get(_DFLASH + "confidence_head_alpha")
    if alpha is not None and not is_number(alpha):
        raise ValueError(f"{reader.source}: `{_DFLASH}confidence_head_alpha` must be a number, got {alpha!r}.")
    rules = {
        "markov_rank": (0, "no head where the config is silent"),
        "markov_head_type": ("vanilla", "vanilla where the config is silent"),
        "enable_confidence_head": (bool(alpha), f"enabled by confidence_head_alpha {alpha}"),
        "confidence_head_with_markov": (False, "without the Markov embedding where the config is silent"),
    }
    heads(reader, under=(_DFLASH, ""), rules=rules)


def _whole_vocabulary(reader: Reader) -> None:
    size, vocab = reader.count("draft_vocab_size"), reader.fields["vocab_size"].value
    if size not in (None, vocab):
        raise ValueError(
            f"{reader.source}: `draft_vocab_size` {size} differs from `vocab_size` {vocab}, and SpecForge stores no "
            "map of a reduced vocabulary."
        )
    reader.set("draft_vocab", None, "rule of the format: the whole vocabulary")


__all__ = ["NAME", "read", "recognises"]
