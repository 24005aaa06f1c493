"""GGUF of llama.cpp, architecture `dflash`: DSpark where `markov_w1` is stored, DFlash where it is not.

Layer ids count inputs, one above ours; `d2t` holds absolute ids; sizes of the heads are the tensors' shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dspark.rope_rules import is_number

from .checkpoint import Checkpoint
from .names import GGUF_DFLASH, map_names
from .parts import (
    NO_HEADS,
    NO_SCALE,
    REST,
    full_attention,
    set_draft_vocab,
    set_layers,
    tables,
    target_width,
    whole_numbers,
)
from .reading import Reader
from .record import Record
from .stored import StoredTensor

NAME = "gguf-dflash"
SIZES = {
    "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length", "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length", "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
}  # fmt: skip


def recognises(checkpoint: Checkpoint) -> bool:
    """Whether it is a GGUF file of that architecture."""
    return checkpoint.is_gguf and checkpoint.config.get("general.architecture") == "dflash"


def read(checkpoint: Checkpoint, choices: Mapping[str, Any]) -> Record:
    """Record of such a file.

    Raises:
        ValueError: A key is missing that readers do not agree on a default for, or the vocabulary is damaged.
    """
    reader = Reader(NAME, checkpoint, choices)
    stored = checkpoint.tensors or {}
    reader.tensors = map_names(reader.source, stored, GGUF_DFLASH, reader.ignored)
    gguf_sizes(reader, "dflash.")
    _frequency_factors(reader, stored.get("rope_freqs.weight"))
    reader.take("block_size", "dflash.block_size")
    reader.layer_ids("dflash.target_layers", -1, "minus 1: layers are counted by their inputs")
    reader.take("mask_token_id", "tokenizer.ggml.mask_token_id")
    _anchor(reader)
    _attention(reader)
    gguf_heads(reader)
    gguf_vocabulary(reader)
    _draft_vocabulary(reader, stored)
    tables(reader)
    target_width(reader)
    for name, key in (("embed_scale", "embedding_scale"), ("logit_scale", "logit_scale")):
        reader.take(name, f"dflash.{key}", rule=(1.0, "no scale unless the file has one"))
    reader.take("final_logit_softcapping", "dflash.final_logit_softcapping", rule=(None, "no cap in the file"))
    reader.fill({**NO_SCALE, **REST})
    return reader.record()


def gguf_sizes(reader: Reader, prefix: str) -> None:
    """Sizes, rotary parameters and fixed properties of the backbone.

    Raises:
        ValueError: A key is missing, or heads rotate in part.
    """
    for name, key in SIZES.items():
        rule = (40960, "not in the file; limits nothing") if name == "max_position_embeddings" else None
        reader.take(name, prefix + key, rule=rule)
    eps = reader.fields["rms_norm_eps"]
    reader.fields["rms_norm_eps"] = eps._replace(value=shortest(eps.value))
    turned, width = reader.get(prefix + "rope.dimension_count"), reader.fields["head_dim"].value
    if turned not in (None, width):
        raise ValueError(
            f"{reader.source}: heads of {width} rotate {turned} of their numbers; draft layers rotate all."
        )
    if reader.get(prefix + "rope.dimension_sections") is not None:
        reader.ignored[prefix + "rope.dimension_sections"] = "tells image positions apart; text has one"
    reader.require([prefix + "rope.freq_base"])
    rope = {"rope_type": "default", "rope_theta": shortest(reader.get(prefix + "rope.freq_base"))}
    kind = reader.get(prefix + "rope.scaling.type")
    if kind not in (None, "none"):
        rope |= _scaling(reader, prefix, kind)
    reader.set("rope_parameters", rope, f"GGUF: {prefix}rope.*")
    bias = "layers.0.self_attn.q_proj.bias" in (reader.tensors or {})
    reader.set("attention_bias", bias, f"blk.0.attn_q.bias is {'' if bias else 'not '}stored")
    reader.set("hidden_act", "silu", "rule of the format: Qwen3's activation")
    reader.set("initializer_range", 0.02, "rule of the format: read in training only")


def shortest(value: Any) -> Any:
    """The decimal a float32 of the file was written from: the shortest that rounds to it; no number stays as it is."""
    if not is_number(value):
        return value
    single = float(torch.tensor(value, dtype=torch.float32))
    digits = (float(f"{single:.{n}g}") for n in range(1, 10))
    return next((d for d in digits if float(torch.tensor(d, dtype=torch.float32)) == single), single)


def _scaling(reader: Reader, prefix: str, kind: str) -> dict[str, Any]:
    if kind not in ("yarn", "linear"):
        raise ValueError(f"{reader.source}: rope scaling {kind!r} is not one of none, linear, yarn.")
    reader.require([prefix + "rope.scaling.factor"])
    scaling = {"rope_type": kind, "factor": shortest(reader.get(prefix + "rope.scaling.factor"))}
    if (length := reader.get(prefix + "rope.scaling.original_context_length")) is not None:
        scaling["original_max_position_embeddings"] = length
    return scaling


def _frequency_factors(reader: Reader, factors: StoredTensor | None) -> None:
    if factors is None:
        return
    rope = reader.fields["rope_parameters"].value
    if rope["rope_type"] != "default":
        raise ValueError(
            f"{reader.source} scales positions twice: rope_freqs.weight, and rope.scaling.type {rope['rope_type']!r} "
            "of its metadata. Convert it again from the checkpoint it was made of."
        )
    rope = longrope(rope, factors[...].tolist(), reader.fields["max_position_embeddings"].value)
    reader.set("rope_parameters", rope, "GGUF: dflash.rope.*, rope_freqs.weight for lengths short and long")


def longrope(rope: Mapping[str, Any], factors: list[float], length: int) -> dict[str, Any]:
    """Rotary parameters whose frequencies are divided by these factors at any length."""
    return {
        **rope, "rope_type": "longrope", "factor": 1.0, "attention_factor": 1.0, "short_factor": factors,
        "long_factor": factors, "original_max_position_embeddings": length,
    }  # fmt: skip


def _anchor(reader: Reader) -> None:
    if reader.get("dflash.sample_from_anchor") is None and "sample_from_anchor" not in reader.choices:
        raise ValueError(
            f"{reader.source} has no key dflash.sample_from_anchor, and readers of the format do not agree on what "
            "that means. Pass `sample_from_anchor=True` (DSpark: the anchor slot drafts) or False (DFlash)."
        )
    reader.take("sample_from_anchor", "dflash.sample_from_anchor")


def _attention(reader: Reader) -> None:
    is_causal = reader.flag("dflash.attention.causal")
    layers: int = reader.fields["num_hidden_layers"].value
    if is_causal is None and "causal_in_block" not in reader.choices:
        raise ValueError(
            f"{reader.source} has no key dflash.attention.causal, which decides whether a block is read both ways. "
            f"Pass `causal_in_block={[False] * layers}` (DSpark), or True for causal layers."
        )
    key = "dflash.attention.sliding_window"
    window = reader.count(key) if reader.get(key) != 0 else None
    slides = _pattern(reader, f"{key}_pattern", layers)
    if window is None:
        full_attention(reader, "GGUF: no dflash.attention.sliding_window")
        windows: list[int | None] = [None] * layers
    else:
        windows = [window if one else None for one in slides]
        is_narrow = window < (reader.count("dflash.block_size") or 0)
        if is_narrow and not is_causal and "attention_windows" not in reader.choices:
            raise ValueError(
                f"{reader.source}: a window of {window} below the block size, in a block read both ways: whether it "
                "also cuts what lies ahead is not settled among readers. Pass `window_rule` and `attention_windows`."
            )
    source = "GGUF: dflash.attention.causal, sliding_window, sliding_window_pattern"
    set_layers(reader, windows, rule="per_slot_all", causal=[bool(is_causal)] * layers, source=source)


def _pattern(reader: Reader, key: str, layers: int) -> list[bool]:
    """Which layers slide; all where the file does not say."""
    pattern = reader.get(key)
    if pattern is None:
        return [True] * layers
    if not isinstance(pattern, list) or len(pattern) != layers or not all(isinstance(one, bool) for one in pattern):
        raise ValueError(
            f"{reader.source}: `{key}` must be true or false for each of {layers} layers, got {pattern!r}."
        )
    return pattern


def gguf_heads(reader: Reader, *, has_confidence: bool | None = None) -> None:
    """Heads by the tensors' shapes; the sequential head is vanilla, the confidence head sees its embedding."""
    held = reader.tensors or {}
    w1, proj = held.get("markov_head.markov_w1.weight"), held.get("confidence_head.proj.weight")
    if w1 is None and proj is None:
        reader.fill(NO_HEADS)
        return
    rank = 0 if w1 is None else w1.shape[-1]
    reader.set("markov_rank", rank, "columns of markov_w1")
    reader.set("markov_head_type", "vanilla" if rank else "none", "rule of the format: vanilla heads only")
    reader.set("enable_confidence_head", proj is not None, f"conf_proj is {'not ' if proj is None else ''}stored")
    declared = reader.flag("dflash.has_confidence_head") if has_confidence is None else has_confidence
    if declared is not None and declared != (proj is not None):
        found = "stored" if proj is not None else "not stored"
        raise ValueError(f"{reader.source}: has_confidence_head is {declared}, and the confidence head is {found}.")
    sees = proj is not None and proj.shape[-1] == reader.fields["hidden_size"].value + rank and rank > 0
    reader.set("confidence_head_with_markov", sees, "columns of the confidence projection")
    bias = "confidence_head.proj.bias" in held
    reader.set("confidence_head_bias", bias, f"its bias is {'' if bias else 'not '}stored")


def gguf_vocabulary(reader: Reader) -> None:
    """`vocab_size` from tables with a row per target token; None where there is none."""
    held = reader.tensors or {}
    for name in ("embed_tokens.weight", "markov_head.markov_w1.weight"):
        if name in held:
            reader.set("vocab_size", held[name].shape[0], f"rows of {held[name].key}")
            return
    tokens = reader.get("tokenizer.ggml.tokens")
    if tokens is not None and not isinstance(tokens, list):
        raise ValueError(f"{reader.source}: `tokenizer.ggml.tokens` must be a list of tokens, got {tokens!r}.")
    if tokens is not None:
        reader.set("vocab_size", len(tokens), "GGUF: length of tokenizer.ggml.tokens")
    elif "lm_head.weight" in held and "d2t" not in (reader.checkpoint.tensors or {}):
        reader.set("vocab_size", held["lm_head.weight"].shape[0], "rows of output.weight")
    else:
        reader.set(
            "vocab_size", None, "rule of the format: no table over the vocabulary is stored, the target's counts"
        )


def _draft_vocabulary(reader: Reader, stored: Mapping[str, Any]) -> None:
    d2t = stored.get("d2t")
    if d2t is None:
        reader.set("draft_vocab", None, "no d2t is stored")
        return
    if not d2t.shape or not d2t.shape[0]:
        raise ValueError(f"{reader.source}: d2t must hold the target ids of the draft vocabulary, and is empty.")
    ids, vocab = whole_numbers(reader, d2t, d2t.shape[0]), reader.fields["vocab_size"].value
    if (
        bool((ids < 0).any())
        or (vocab is not None and bool((ids >= vocab).any()))
        or bool((ids[1:] <= ids[:-1]).any())
    ):
        raise ValueError(
            f"{reader.source}: d2t must hold absolute target ids, strictly increasing and in 0..{vocab}, got "
            f"{ids[:6].tolist()} ... {int(ids[-1])}. Offsets are another format's."
        )
    set_draft_vocab(reader, d2t, ids, "", "tensor d2t (absolute ids)")


__all__ = [
    "NAME",
    "SIZES",
    "gguf_heads",
    "gguf_sizes",
    "gguf_vocabulary",
    "longrope",
    "read",
    "recognises",
    "shortest",
]
