"""What several formats share: sizes, per-layer attention, heads, stored tables, reduced vocabularies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .reading import Reader
from .record import LayerSight
from .stored import FLOATS, StoredTensor

_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_MASKS = ("bool", "uint8", "int8", "int32", "int64")
BACKBONE = (*_SIZES, "rms_norm_eps", "vocab_size")  # without these a config says nothing
NO_SCALE = {
    "embed_scale": (1.0, "embeddings enter the block as they are stored"),
    "logit_scale": (1.0, "logits are not scaled"),
    "final_logit_softcapping": (None, "logits are not capped"),
}
NO_HEADS = {
    "markov_rank": (0, "DFlash has no sequential head"),
    "markov_head_type": ("none", "DFlash has no sequential head"),
    "enable_confidence_head": (False, "DFlash has no confidence head"),
    "confidence_head_with_markov": (False, "DFlash has no confidence head"),
    "confidence_head_bias": (False, "DFlash has no confidence head"),
}
REST = {
    "family": ("qwen3", "draft layers are Qwen3's"),
    "attention_k_eq_v": (False, "draft layers are Qwen3's"),
    "confidence_temperatures": (None, "the format stores no temperatures"),
    "num_target_layers": (None, "the format does not say; known with the target"),
    "target": (None, "the format does not say"),
    "attention_dropout": (0.0, "used in training only"),
}


def backbone(reader: Reader, under: str = "", *, eps: tuple[float, str] | None = None) -> None:
    """Sizes of Qwen3 layers and what a target's config carries along.

    Args:
        reader: Gets the fields.
        under: Where the keys are, `""` or a path that ends in a dot.
        eps: Rule for `rms_norm_eps` where the config leaves it out; None: it must not.
    """
    for name in _SIZES:
        reader.take(name, under + name)
    reader.take("rms_norm_eps", under + "rms_norm_eps", rule=eps)
    heads, width = reader.fields["num_attention_heads"].value, reader.fields["hidden_size"].value
    norm = _tensor(reader, "layers.0.self_attn.q_norm.weight")
    if reader.get(under + "head_dim") is None and norm is not None:
        reader.set("head_dim", norm.shape[0], "shape of layers.0.self_attn.q_norm.weight")
    else:
        reader.take("head_dim", under + "head_dim", rule=(_divided(width, heads), "hidden_size / num_attention_heads"))
    reader.take("attention_bias", under + "attention_bias", rule=(False, "no bias unless the config says so"))
    reader.take("hidden_act", under + "hidden_act", rule=("silu", "Qwen3's activation"))
    reader.take("max_position_embeddings", under + "max_position_embeddings", rule=(40960, "Qwen3's length"))
    reader.take("initializer_range", under + "initializer_range", rule=(0.02, "read in training only"))


def _divided(width: Any, heads: Any) -> int | None:
    return width // heads if isinstance(width, int) and isinstance(heads, int) and heads > 0 else None


def layer_kinds(reader: Reader, under: str = "") -> list[int | None]:
    """Window per layer (None: full attention) of a Hugging Face config with `layer_types` and `sliding_window`.

    Raises:
        ValueError: The types are not one per layer, or a sliding layer has no window.
    """
    layers = reader.fields["num_hidden_layers"].value
    types, may_slide = reader.get(under + "layer_types"), reader.flag(under + "use_sliding_window")
    window = None if may_slide is False else reader.count(under + "sliding_window")
    if types is None:
        if may_slide is not True or window is None:
            return [None] * layers
        first = reader.get(under + "max_window_layers")
        if not isinstance(first, int) or isinstance(first, bool) or first < 0:
            raise ValueError(
                f"{reader.source}: `sliding_window` {window} without `layer_types`, and `max_window_layers` is "
                f"{first!r}: which layers slide? Name the type of each in `layer_types`."
            )
        return [window if i >= first else None for i in range(layers)]
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != layers or any(kind not in known for kind in types):
        raise ValueError(
            f"{reader.source}: `layer_types` must name 'full_attention' or 'sliding_attention' for each of {layers} "
            f"layers, got {types!r}."
        )
    slides = "sliding_attention" in types
    if slides and window is None:
        raise ValueError(
            f"{reader.source}: `layer_types` has sliding layers, and `sliding_window` is "
            f"{reader.get(under + 'sliding_window')!r} with `use_sliding_window` {may_slide!r}. Name the window, or "
            "full layers."
        )
    return [window if kind == "sliding_attention" else None for kind in types]


def set_layers(
    reader: Reader, windows: Sequence[int | None], *, rule: str, causal: Sequence[bool], source: str
) -> None:
    """`layers_attention` from windows, the format's window rule and which layers are causal in the block."""
    layers = [
        LayerSight(window, None if window is None else rule, is_causal)
        for window, is_causal in zip(windows, causal, strict=True)
    ]
    reader.set("layers_attention", layers, source)


def full_attention(reader: Reader, source: str) -> None:
    """`layers_attention` of layers that see everything."""
    reader.set("layers_attention", [LayerSight()] * reader.fields["num_hidden_layers"].value, source)


def _tensor(reader: Reader, name: str) -> StoredTensor | None:
    return None if reader.tensors is None else reader.tensors.get(name)


def tables(reader: Reader, *, without: tuple[bool, bool] = (False, False)) -> None:
    """`has_embed`, `has_lm_head`, `fc_bias`, `dtype`: from the tensors, or without them by the format's rule.

    Args:
        reader: Its `tensors` are set.
        without: What the format stores (embedding, LM head) where only the config is known.
    """
    pairs = (("has_embed", "embed_tokens.weight", without[0]), ("has_lm_head", "lm_head.weight", without[1]))
    for name, tensor, rule in pairs:
        if reader.tensors is None:
            reader.set(name, rule, "rule of the format: the weights were not looked at")
        else:
            stored = tensor in reader.tensors
            reader.set(name, stored, f"{tensor} is {'' if stored else 'not '}stored")
    reader.set("raw_target_embedding", not reader.fields["has_embed"].value, "rule of the format: stored rows enter")
    has_bias = _tensor(reader, "fc.bias") is not None
    reader.set("fc_bias", has_bias, f"fc.bias is {'' if has_bias else 'not '}stored")
    fc = _tensor(reader, "fc.weight")
    if fc is not None:
        dtype = fc.dtype if fc.dtype in FLOATS else "float32"
        reader.set("dtype", dtype, "dtype of fc.weight")
    else:
        reader.set("dtype", reader.get("dtype") or reader.get("torch_dtype"), f"{reader.file}: dtype")


def heads(reader: Reader, under: Sequence[str] = ("",), rules: Mapping[str, tuple[Any, str]] | None = None) -> None:
    """Fields of the sequential and the confidence head.

    Args:
        reader: Gets the fields; its `tensors` are set.
        under: Where the keys may be, each `""` or a path that ends in a dot.
        rules: The format's values for keys that are left out; a field without one must be there.
    """
    rules = rules or {}

    def take(name: str) -> Any:
        return reader.take(name, *(prefix + name for prefix in under), rule=rules.get(name))

    if take("markov_rank"):
        take("markov_head_type")
    else:
        reader.set("markov_head_type", "none", "markov_rank 0")
    if take("enable_confidence_head"):
        take("confidence_head_with_markov")
    else:
        reader.set("confidence_head_with_markov", False, "there is no confidence head")
    _confidence_bias(reader)


def _confidence_bias(reader: Reader) -> None:
    enabled = bool(reader.fields["enable_confidence_head"].value)
    if reader.tensors is None:
        reader.set("confidence_head_bias", enabled, "rule of the format: the projection has a bias")
    else:
        stored = "confidence_head.proj.bias" in reader.tensors
        reader.set("confidence_head_bias", stored, f"confidence_head.proj.bias is {'' if stored else 'not '}stored")


def target_width(reader: Reader) -> None:
    """`target_hidden_size` from the columns of `fc.weight`, or equal to `hidden_size` where they are not known."""
    fc, ids = _tensor(reader, "fc.weight"), reader.fields["target_layer_ids"].value
    width = reader.fields["hidden_size"].value
    taps = len(ids) if isinstance(ids, list) else 0
    if fc is None or not taps:
        reader.set("target_hidden_size", width, "rule of the format: as wide as the drafter")
        return
    columns = fc.shape[-1]
    declared = reader.count("target_hidden_size")
    if columns != taps * (declared or width) and columns != taps * width:
        raise ValueError(
            f"{reader.source}: fc.weight is {list(fc.shape)}, {columns} columns, but `target_layer_ids` has {taps} "
            f"entries {ids}, which makes {taps} x {declared or width} columns. One of them belongs to another drafter."
        )
    reader.set("target_hidden_size", columns // taps, f"columns of fc.weight ({columns}) / {taps} tapped layers")


def offset_vocabulary(reader: Reader, stored: dict[str, StoredTensor] | None, size: int | None) -> None:
    """`draft_vocab` from `d2t` as offsets (target id = i + d2t[i]), held against `t2d` where there is one.

    Args:
        reader: Gets the field, and `draft_token_ids` among its tensors.
        stored: The checkpoint's tensors by their stored names.
        size: Rows the config gives the draft vocabulary.

    Raises:
        ValueError: The map is missing, of another size, out of range, no offset table, or another set than `t2d`.
    """
    vocab = reader.fields["vocab_size"].value
    if stored is None or size is None or size == vocab:
        if stored is not None and "d2t" in stored and size == vocab:
            reader.ignored["d2t"] = "the draft vocabulary is the whole one"
        whole = size is None or size == vocab
        if not whole or (stored is not None and size is None and "d2t" in stored):
            raise ValueError(
                f"{reader.source}: a reduced vocabulary (d2t) without `draft_vocab_size`, or its weights."
            )
        reader.set("draft_vocab", None, f"{reader.file}: draft_vocab_size, the whole vocabulary")
        return
    d2t = stored.get("d2t")
    if d2t is None:
        raise ValueError(
            f"{reader.source}: `draft_vocab_size` {size} is below `vocab_size` {vocab}, and there is no tensor d2t: "
            "draft ids cannot be mapped to target ids. Restore d2t from the training run."
        )
    offsets = whole_numbers(reader, d2t, size)
    ids = torch.arange(len(offsets)) + offsets
    mask = stored.get("t2d")
    if mask is not None and (mask.dtype not in _MASKS or mask.shape != (vocab,)):
        raise ValueError(
            f"{reader.source}: t2d must mark each of the {vocab} ids of the target (`vocab_size`) true or false, got "
            f"{mask.dtype} {list(mask.shape)}."
        )
    _check_offsets(reader, ids, offsets, None if mask is None else mask[...], vocab)
    set_draft_vocab(reader, d2t, ids, "offsets to target ids", "tensor d2t (offsets)")


def set_draft_vocab(reader: Reader, d2t: StoredTensor, ids: torch.Tensor, transform: str, source: str) -> None:
    """`draft_vocab` of absolute sorted ids, and `draft_token_ids` among the tensors."""
    reader.set("draft_vocab", ids.tolist(), source)
    assert reader.tensors is not None
    reader.tensors["draft_token_ids"] = d2t.transformed(transform, ids)


def whole_numbers(reader: Reader, d2t: StoredTensor, size: int) -> torch.Tensor:
    """The numbers of `d2t`, int64 `[size]`.

    Raises:
        ValueError: It holds others, or another number of them.
    """
    if not d2t.dtype.startswith("int") or d2t.shape != (size,):
        raise ValueError(
            f"{reader.source}: d2t must be {size} integers, one per id of the draft vocabulary (`draft_vocab_size`), "
            f"got {d2t.dtype} {list(d2t.shape)}."
        )
    return d2t[...].long()


def _check_offsets(
    reader: Reader, ids: torch.Tensor, offsets: torch.Tensor, mask: torch.Tensor | None, vocab: int
) -> None:
    marked = None if mask is None else mask.bool().nonzero()[:, 0]
    is_absolute = marked is not None and torch.equal(marked, offsets)
    if is_absolute and not torch.equal(ids, offsets):
        raise ValueError(
            f"{reader.source}: d2t is no table of offsets (target id = i + d2t[i]): read so it disagrees with t2d, "
            "which marks the ids that d2t holds as they stand. This format stores offsets; convert it again."
        )
    outside = ((ids < 0) | (ids >= vocab)).nonzero()[:, 0]
    if len(outside):
        at = int(outside[0])
        raise ValueError(
            f"{reader.source}: d2t maps draft id {at} to target id {int(ids[at])}, outside 0..{vocab - 1}. As offsets "
            "(target id = i + d2t[i]) they leave the vocabulary: damaged, or absolute ids. Restore d2t."
        )
    if bool((ids[1:] <= ids[:-1]).any()):
        raise ValueError(
            f"{reader.source}: the target ids of d2t must be strictly increasing, got {ids[:8].tolist()}..."
        )
    if marked is not None and not torch.equal(marked, ids):
        raise ValueError(
            f"{reader.source}: d2t and t2d describe different vocabularies ({len(ids)} ids, {len(marked)} marked). "
            "With the wrong map every draft decodes as another token: restore both from one run."
        )


__all__ = [
    "BACKBONE", "NO_HEADS", "NO_SCALE", "REST", "backbone", "full_attention", "heads", "layer_kinds",
    "offset_vocabulary", "set_draft_vocab", "set_layers", "tables", "target_width", "whole_numbers",
]  # fmt: skip
