"""Keys of Hugging Face configs that several layouts share: sizes, rotary positions in both spellings, layer types."""

from __future__ import annotations

from typing import Any

from .record import LayerSight, Record

_AS_THEY_ARE = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "hidden_act", "rms_norm_eps", "attention_bias", "attention_dropout", "max_position_embeddings",
    "initializer_range",
)  # fmt: skip


def qwen3_keys(record: Record) -> dict[str, Any]:
    """Config of Qwen3 layers, as transformers 4 and 5 and the engines read it."""
    return {
        "model_type": "qwen3",
        **{name: record[name] for name in _AS_THEY_ARE},
        "vocab_size": record["vocab_size"],
        **rope_keys(record["rope_parameters"]),
        **layer_keys(record["layers_attention"]),
        "tie_word_embeddings": False,
    }


def rope_keys(rope: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters in both spellings: a reader that knows one only must not fall back to a base of its own."""
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    is_plain = scaling.get("rope_type", "default") == "default"
    return {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if is_plain else scaling,
        "rope_parameters": dict(rope),
    }


def layer_keys(layers: list[LayerSight]) -> dict[str, Any]:
    """Layer types and the one window of the sliding layers."""
    window = next((layer.window for layer in layers if layer.window is not None), None)
    kinds = ["full_attention" if layer.window is None else "sliding_attention" for layer in layers]
    return {
        "layer_types": kinds, "sliding_window": window, "use_sliding_window": window is not None,
        "max_window_layers": len(layers),
    }  # fmt: skip


def head_keys(record: Record) -> dict[str, Any]:
    """Settings of the sequential and the confidence head, all of them said."""
    kind = record["markov_head_type"]
    return {
        "markov_rank": record["markov_rank"], "markov_head_type": "vanilla" if kind == "none" else kind,
        "enable_confidence_head": record["enable_confidence_head"],
        "confidence_head_with_markov": record["confidence_head_with_markov"],
    }  # fmt: skip


def has_heads(record: Record) -> bool:
    """Whether it has a sequential or a confidence head."""
    return bool(record["markov_rank"] or record["enable_confidence_head"])


def is_dflash(record: Record) -> bool:
    """Whether it is what others call DFlash: no heads, and an anchor slot that drafts nothing."""
    return not has_heads(record) and not record["sample_from_anchor"]


__all__ = ["has_heads", "head_keys", "is_dflash", "layer_keys", "qwen3_keys", "rope_keys"]
