"""A record in llama.cpp's terms: the same drafter, with the fields that its GGUF file is read back with.

The engine has one window and one direction for all layers. A sliding layer sees a key k from slot q when q - k < W, in
context and block alike; nothing cuts what lies ahead. Rules of other formats say the same as long as a block is no
longer than W. Numbers are float32.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 - the usual name

from dspark.families import DraftRotaryEmbedding

from .gguf_dflash import longrope, shortest
from .record import LayerSight, Record
from .resolving import changed
from .unnormed import as_normed

# Rotary types, with the keys the file has for them; llama3 becomes one factor per frequency.
_ROPE: dict[str, tuple[str, ...]] = {
    "default": (), "linear": ("factor",), "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("factor", "short_factor", "long_factor", "attention_factor", "original_max_position_embeddings"),
}  # fmt: skip
_DEFAULTS = {"beta_fast": 32, "beta_slow": 1, "truncate": True, "partial_rotary_factor": 1}


def window(record: Record) -> int | None:
    """W of the sliding layers; None: there are none."""
    found = {(layer.window, layer.window_rule) for layer in record["layers_attention"] if layer.window is not None}
    if not found:
        return None
    width, rule = max(found)
    return width + 1 if rule == "abs_all" else width  # abs_all: |q - k| <= W


def causal_in_block(record: Record) -> bool:
    """Whether a slot sees only the slots up to itself."""
    return any(layer.causal_in_block for layer in record["layers_attention"])


def refuses_attention(record: Record) -> str | None:
    """Why the attention of a record cannot be written, with the field; None: it can."""
    layers, block = record["layers_attention"], record["block_size"]
    directions = [layer.causal_in_block for layer in layers]
    if len(set(directions)) > 1:
        return f"`causal_in_block` is {directions}, and llama.cpp has one direction for all layers"
    widths = [layer.window for layer in layers]
    if len(set(widths) - {None}) > 1:
        return f"`attention_windows` is {widths}, and llama.cpp has one window for all sliding layers"
    rules = {layer.window_rule for layer in layers} - {None}
    if "ctx_from_anchor" in rules:
        return "`window_rule` is 'ctx_from_anchor', and llama.cpp counts a window from each slot"
    cut = window(record)
    # Causal blocks under a rule that cuts the block too are what llama.cpp does at any width.
    if cut is not None and cut < block and not (causal_in_block(record) and rules <= {"per_slot_all", "abs_all"}):
        return (
            f"`attention_windows` {cut} is below `block_size` {block}, and llama.cpp would cut only what lies behind"
        )
    return None


def refuses_rope(record: Record) -> str | None:
    """Why the rotary parameters of a record cannot be written, with the field; None: they can."""
    rope = record["rope_parameters"]
    kind = rope.get("rope_type", "default")
    if kind not in _ROPE:
        return f"`rope_parameters['rope_type']` is {kind!r}, and the file holds {', '.join(_ROPE)}"
    if kind == "longrope" and (rope["short_factor"] != rope["long_factor"] or rope.get("attention_factor") != 1):
        return "`rope_parameters` of type 'longrope' change with length or scale attention, and the file's do not"
    for key, value in rope.items():
        if value is None or key in (*_ROPE[kind], "rope_type", "rope_theta") or _DEFAULTS.get(key, ...) == value:
            continue
        return f"`rope_parameters[{key!r}]` is {value!r}, which the file has no key for with type {kind!r}"
    return None


def in_terms(record: Record) -> Record:
    """A record that llama.cpp can run, as its file is read back.

    Args:
        record: One whose embedding is its own, or borrowed raw.
    """
    found = as_normed(record) if record["family"] == "llama" else record
    rounded = {
        name: _float32(found[name])
        for name in ("embed_scale", "logit_scale", "final_logit_softcapping")
        if found[name] is not None
    }
    rounded["rms_norm_eps"] = shortest(found["rms_norm_eps"])
    cut, causal = window(record), causal_in_block(record)
    layers = [
        LayerSight(None if layer.window is None else cut, None if layer.window is None else "per_slot_all", causal)
        for layer in record["layers_attention"]
    ]
    found = changed(
        found, "as a GGUF file holds it", layers_attention=layers, rope_parameters=_rope(record),
        confidence_head_bias=record["enable_confidence_head"] and record["confidence_head_bias"],
        target_hidden_size=record["target_hidden_size"] or record["hidden_size"], **rounded,
    )  # fmt: skip
    if record["enable_confidence_head"] and not record["confidence_head_with_markov"]:
        found = _with_markov(found)
    return found


def _float32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))


def _with_markov(record: Record) -> Record:
    """The engine's confidence head always sees the Markov embedding: with zeros for it, to no effect."""
    found = changed(record, "zeros for the Markov embedding", confidence_head_with_markov=True)
    assert found.tensors is not None
    name, rank = "confidence_head.proj.weight", record["markov_rank"]
    stored = found.tensors[name]
    found.tensors[name] = replace(
        stored, shape=(1, stored.shape[1] + rank), read=lambda: F.pad(stored[...], (0, rank)), transform="zeros added"
    )
    return found


def _rope(record: Record) -> dict[str, Any]:
    rope = record["rope_parameters"]
    kind = rope.get("rope_type", "default")
    plain = {"rope_type": "default", "rope_theta": shortest(float(rope["rope_theta"]))}
    if kind in ("llama3", "longrope"):
        return longrope(plain, _factors(record), record["max_position_embeddings"])
    if kind in ("linear", "yarn"):
        plain |= {"rope_type": kind, "factor": shortest(float(rope["factor"]))}
    if kind == "yarn":
        length = rope.get("original_max_position_embeddings") or record["max_position_embeddings"]
        plain["original_max_position_embeddings"] = length
    return plain


def _factors(record: Record) -> list[float]:
    """What each frequency `[head_dim / 2]` is divided by."""
    rope = record["rope_parameters"]
    if rope["rope_type"] == "longrope":
        return [_float32(factor) for factor in rope["long_factor"]]
    exact = DraftRotaryEmbedding(record.to_config()).inv_freq
    powers = torch.arange(0, record["head_dim"], 2, dtype=torch.float64) / record["head_dim"]
    factors: list[float] = (rope["rope_theta"] ** -powers / exact.double()).float().tolist()
    return factors


__all__ = ["causal_in_block", "in_terms", "refuses_attention", "refuses_rope", "window"]
