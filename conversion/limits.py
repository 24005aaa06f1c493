"""What a layout or the engine behind it cannot hold, as data, and the reasons it gives against a record.

A reason names the field, its value and a way out. What is not among the limits goes through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from .record import LayerSight, Record

# stored: copies of the target's tables are part of the layout. optional: the drafter's own are read where they are
# stored. borrowed: the target's are always used.
Tables = Literal["stored", "optional", "borrowed"]
_ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
_FOR_TARGET = "name the target with `--target` (`target=`)"


@dataclass(frozen=True)
class Limits:
    """What goes into a layout; by default a plain Qwen3 drafter with any head.

    Attributes:
        families: Draft layers.
        heads: Sequential heads.
        anchors: Values of `sample_from_anchor`.
        has_confidence: Whether there is a confidence head.
        has_draft_vocab: Whether a reduced vocabulary can be stored.
        taps_embedding: Whether the embedding output (layer id -1) can be tapped.
        window_rule: The one rule its sliding layers follow; None: all layers see everything.
        causal: Whether its sliding layers are causal in the block.
        tables: Where embedding and LM head come from.
        is_narrow: Whether drafters narrower or wider than the target are understood.
        has_bias: Whether attention projections may have a bias.
        activations: Of the MLP; empty: any.
        rope_types: Of the rotary positions.
        gemma: What it holds of Gemma 4's parts: scaled embeddings and a soft cap, as DeepSpec computes them.
        required: Fields that may not be unknown.
    """

    families: tuple[str, ...] = ("qwen3",)
    heads: tuple[str, ...] = ("none", "vanilla", "gated", "rnn")
    anchors: tuple[bool, ...] = (True, False)
    has_confidence: bool = True
    has_draft_vocab: bool = False
    taps_embedding: bool = False
    window_rule: str | None = None
    causal: Literal["always", "never", "either"] = "never"
    tables: Tables = "optional"
    is_narrow: bool = False
    has_bias: bool = True
    activations: tuple[str, ...] = ()
    rope_types: tuple[str, ...] = _ROPE_TYPES
    gemma: bool = False
    required: tuple[str, ...] = ("vocab_size",)


def reasons_against(record: Record, limits: Limits, who: str) -> list[str]:
    """Why `who`, which has these limits, cannot take a record; empty: it can."""
    return [f"{who}: {reason}" for rule in _RULES for reason in rule(record, limits)]


def _family(record: Record, limits: Limits) -> Iterator[str]:
    family = record["family"]
    if family not in limits.families:
        yield (
            f"`family` is {family!r}, draft layers there are {_listed(limits.families)}"
            + (": `--as-qwen3` writes them so, up to rounding" if family == "llama" else "")
        )
        return
    if limits.activations and record["hidden_act"] not in limits.activations:
        yield f"`hidden_act` is {record['hidden_act']!r}, its MLP has {_listed(limits.activations)}"
    if record["attention_bias"] and not limits.has_bias:
        yield "`attention_bias` is True, its attention has no biases"
    if record["fc_bias"]:
        yield "`fc_bias` is True, its context projection has no bias"
    kind = record["rope_parameters"].get("rope_type", "default")
    if family == "qwen3" and kind not in limits.rope_types:
        yield f"`rope_parameters` are of type {kind!r}, it knows {_listed(limits.rope_types)}"


def _unknown(record: Record, limits: Limits) -> Iterator[str]:
    for name in limits.required:
        if record[name] is None:
            yield f"`{name}` is not known from {record.source} and has to be written: {_FOR_TARGET}"


def _head(record: Record, limits: Limits) -> Iterator[str]:
    kind = record["markov_head_type"]
    if kind in limits.heads:
        return
    if kind == "none":
        yield (
            "`markov_rank` is 0, and it cannot run drafters without a sequential head: `--fill-zeros` adds one of "
            "zeros, which changes no draft"
        )
    else:
        yield f"`markov_head_type` is {kind!r}, it runs {_listed(limits.heads)}; sglang runs all three"


def _confidence(record: Record, limits: Limits) -> Iterator[str]:
    if not record["enable_confidence_head"]:
        return
    if not limits.has_confidence:
        yield "`enable_confidence_head` is True, it has no confidence head"
    elif not record["confidence_head_bias"]:
        yield (
            "`confidence_head_bias` is False, its confidence projection has a bias: `--fill-zeros` writes a bias of "
            "zero, which changes no confidence"
        )


def _anchor(record: Record, limits: Limits) -> Iterator[str]:
    if record["sample_from_anchor"] not in limits.anchors:
        says = "always drafts" if limits.anchors == (True,) else "never drafts"
        yield (
            f"`sample_from_anchor` is {record['sample_from_anchor']}, and its anchor slot {says}: read so, every slot "
            "would be off by one"
        )


def _layers(record: Record, limits: Limits) -> Iterator[str]:
    if -1 in record["target_layer_ids"] and not limits.taps_embedding:
        yield f"`target_layer_ids` {record['target_layer_ids']} taps the embedding output (-1), it taps layers only"
    width, own = record["target_hidden_size"] or record["hidden_size"], record["hidden_size"]
    if width != own and not limits.is_narrow:
        yield f"`target_hidden_size` {width} differs from `hidden_size` {own}, it wants them equal"


def _attention(record: Record, limits: Limits) -> Iterator[str]:
    layers: list[LayerSight] = record["layers_attention"]
    sliding = [layer for layer in layers if layer.window is not None]
    if any(layer.causal_in_block for layer in layers if layer.window is None):
        yield "`causal_in_block` is True for a layer that sees everything, there such layers read a block both ways"
    if not sliding:
        return
    windows, rules = sorted({layer.window or 0 for layer in sliding}), {layer.window_rule for layer in sliding}
    if limits.window_rule is None:
        yield f"`attention_windows` has windows {windows}, and readers of this layout do not agree on what they cut"
        return
    if rules != {limits.window_rule}:
        yield (
            f"`window_rule` is {_listed(sorted(map(str, rules)))}, windows there follow {limits.window_rule!r}, which "
            "sees other keys"
        )
    if len(windows) > 1:
        yield f"`attention_windows` has several windows {windows}, it has one for all sliding layers"
    causal = {layer.causal_in_block for layer in sliding}
    allowed = {"always": {True}, "never": {False}}.get(limits.causal, causal if len(causal) == 1 else set())
    if causal != allowed:
        wanted = {"always": "causal", "never": "not causal"}.get(limits.causal, "alike")
        yield f"`causal_in_block` of sliding layers is {sorted(causal)}, there all of them are {wanted}"


def _vocabulary(record: Record, limits: Limits) -> Iterator[str]:
    if record["draft_vocab"] is None:
        return
    if not limits.has_draft_vocab:
        yield (
            f"`draft_vocab_size` is {len(record['draft_vocab'])}, it has no reduced vocabularies: its drafts would "
            "decode as other tokens"
        )
    if not record["has_lm_head"]:
        yield "`draft_vocab_size` is set without an LM head of its own (`has_lm_head`): the target's has other rows"


def _own_tables(record: Record, limits: Limits) -> Iterator[str]:
    parts = (("has_embed", "embedding"), ("has_lm_head", "LM head"))
    for name, part in parts:
        if limits.tables == "stored" and not record[name]:
            yield f"`{name}` is False, and the layout holds a copy of the target's {part}: {_FOR_TARGET}"
        if limits.tables == "borrowed" and record[name] and not (name == "has_lm_head" and record["draft_vocab"]):
            yield (
                f"`{name}` is True, and it always uses the target's {part}: {_FOR_TARGET}, and the drafter's is left "
                "out where it is the same"
            )


def _scales(record: Record, limits: Limits) -> Iterator[str]:
    if not record["has_embed"] and not record["raw_target_embedding"]:
        yield (
            "`raw_target_embedding` is False: the drafter sees what the target's own embedding gives, others its "
            f"stored rows. Whether they are the same depends on the target: {_FOR_TARGET}"
        )
        return
    is_gemma = record["family"] == "gemma4"
    factor = float(record["hidden_size"]) ** 0.5 if is_gemma else 1.0
    if abs(record["embed_scale"] - factor) > 1e-6 * factor:
        yield f"`embed_scale` is {record['embed_scale']:g}, there embeddings are multiplied by {factor:g}"
    if record["logit_scale"] != 1:
        yield f"`logit_scale` is {record['logit_scale']:g}, it has none"
    cap = record["final_logit_softcapping"]
    if cap is not None and not (is_gemma and limits.gemma):
        yield f"`final_logit_softcapping` is {cap:g}, it caps no logits, or the sequential head's with them"


_RULES: tuple[Callable[[Record, Limits], Iterator[str]], ...] = (
    _family, _unknown, _head, _confidence, _anchor, _layers, _attention, _vocabulary, _own_tables, _scales,
)  # fmt: skip


def _listed(names: tuple[str, ...] | list[str]) -> str:
    return " or ".join(map(repr, names))


__all__ = ["Limits", "Tables", "reasons_against"]
