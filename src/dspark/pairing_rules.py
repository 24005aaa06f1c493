"""The rules of the pairing check, one function each: a pair in, findings out. `pairing` runs them in order.

An error is a pair that breaks, or one that cannot be what was meant (another vocabulary, an unrelated architecture);
whatever only costs acceptance is a warning. Each message has the value found, the rule and the way out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from .target import embedding_module, head_module, logit_rows, rotary_kind, table_shape
from .target_note import TargetFacts, tokenizer_note

_ONLY_SLOWER = "Drafts may be accepted less often; the output stays exact."


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a pair.

    Attributes:
        severity: `"error"`: the pair cannot run, or cannot be what was meant. `"warning"`: it costs acceptance only.
        field: What it is about, mostly a field of `DSparkConfig` or of its note on the target.
        message: The value found, the rule and the way out.
    """

    severity: Literal["error", "warning"]
    field: str
    message: str


class DraftFacts(NamedTuple):
    """What a pairing check reads of a drafter's tensors.

    Attributes:
        embedding_hash: Of its own embedding; None when it borrows the target's.
        draft_vocab_hash: Of its reduced vocabulary, or None.
        draft_ids: Lowest id of that vocabulary, highest id, whether all ids increase strictly.
        is_on_meta: Whether its weights are missing.
    """

    embedding_hash: str | None
    draft_vocab_hash: str | None
    draft_ids: tuple[int, int, bool] | None
    is_on_meta: bool


class Pair(NamedTuple):
    """What the rules look at.

    Attributes:
        target: The target, unwrapped.
        config: The drafter's config.
        text: Config of the target's text decoder.
        facts: Read from the target's weights.
        adapter_hash: Of the target's active adapters, see `target_note.adapter_hash`.
        own: Read from the drafter's.
        note: The drafter's note on the target it was trained for; empty without one.
        tokenizer: Of the target, or None.
    """

    target: Any
    config: Any
    text: Any
    facts: TargetFacts
    adapter_hash: str | None
    own: DraftFacts
    note: dict[str, Any]
    tokenizer: Any


def _layers(pair: Pair) -> Iterator[Finding]:
    config, text = pair.config, pair.text
    width, count = config.target_hidden_size or config.hidden_size, text.num_hidden_layers
    if pair.facts.layers_problem:
        yield Finding("error", "decoder_layers", f"{pair.facts.layers_problem} Generate without `assistant_model`.")
    if text.hidden_size != width:
        yield Finding(
            "error",
            "target_hidden_size",
            f"The drafter reads hidden states of width {width}, the target's have {text.hidden_size}. They must be "
            "equal: load the drafter that was trained for this target.",
        )
    if config.num_target_layers is not None and count != config.num_target_layers:
        yield Finding(
            "error",
            "num_target_layers",
            f"The drafter was trained on a target of {config.num_target_layers} decoder layers, this one has {count}. "
            "They must be equal: load the drafter that was trained for this target.",
        )
    ids = config.target_layer_ids
    stored = pair.note.get("stored_layer_ids")
    found = f"{ids}, {stored} as its file counts them" if stored else f"{ids}"
    if min(ids) < -1 or max(ids) >= count - 1:
        yield Finding(
            "error",
            "target_layer_ids",
            f"The drafter reads target layers {found}, which must lie in -1..{count - 2} for a target of {count} "
            "layers (-1 is the embedding output; the last layer's output is only known after the final norm). Load "
            "the drafter that was trained for this target.",
        )


def _vocabulary(pair: Pair) -> Iterator[Finding]:
    config, rows, known = pair.config, logit_rows(pair.target), pair.config.vocab_size
    if known is None:
        return
    way_out = "load the drafter for this target"
    if rows > known:
        way_out += f", or `target.resize_token_embeddings({known})` if the last {rows - known} rows are padding"
    highest = known - 1 if pair.own.draft_ids is None else min(pair.own.draft_ids[1], known - 1)
    if config.share_lm_head and head_module(pair.target) is not None and rows != known:
        yield Finding(
            "error",
            "vocab_size",
            f"The target has logits for {rows} ids, the drafter a vocabulary of {known}. A borrowed LM head must have "
            f"exactly the drafter's rows: {way_out}.",
        )
    elif rows > known:
        yield Finding(
            "error",
            "vocab_size",
            f"The target has logits for {rows} ids, the drafter a vocabulary of {known}: the target can emit ids the "
            f"drafter has no row for. Its rows must not exceed the drafter's: {way_out}.",
        )
    elif highest >= rows:
        yield Finding(
            "warning",
            "vocab_size",
            f"The target has logits for {rows} ids, the drafter knows ids up to {highest}. Ids from {rows} on are "
            "never drafted. Harmless if they pad the vocabulary; else load the drafter for this target.",
        )


def _draft_vocabulary(pair: Pair) -> Iterator[Finding]:
    if pair.own.draft_ids is None:
        return
    (lowest, highest, is_sorted), known = pair.own.draft_ids, pair.config.vocab_size
    if not is_sorted or lowest < 0 or highest >= known:
        found = f"{'sorted' if is_sorted else 'unsorted'} ids from {lowest} to {highest}"
        yield Finding(
            "error",
            "draft_token_ids",
            f"The reduced vocabulary has {found}; they must be strictly increasing and lie in 0..{known - 1}. The "
            "checkpoint is damaged or badly converted: convert or download it again.",
        )
    noted = pair.note.get("draft_vocab_hash")
    if noted is not None and noted != pair.own.draft_vocab_hash:
        yield Finding(
            "error",
            "draft_vocab_hash",
            f"The reduced vocabulary has hash {pair.own.draft_vocab_hash}, the one the drafter was trained with "
            f"{noted}. With another map every draft decodes as another token: restore the `draft_token_ids` of the "
            "checkpoint.",
        )


def _borrowed(pair: Pair) -> Iterator[Finding]:
    config = pair.config
    embedding = table_shape(embedding_module(pair.target)) if config.share_embedding else None
    if embedding is not None and config.mask_token_id >= embedding[0]:
        yield Finding(
            "error",
            "mask_token_id",
            f"The mask token {config.mask_token_id} is not in the target's embedding of {embedding[0]} rows, which "
            "the drafter borrows. Load the target with the vocabulary the drafter was trained with.",
        )
    parts = (
        ("share_embedding", "embedding", embedding_module(pair.target)),
        ("share_lm_head", "LM head", head_module(pair.target)),
    )
    for field, name, module in parts:
        if not getattr(config, field):
            continue
        shape = table_shape(module)
        if shape is None or shape[1] != config.hidden_size:
            found = "the target has none" if module is None else f"the target's is a {type(module).__name__}"
            width = "" if shape is None else f" of width {shape[1]}"
            yield Finding(
                "error",
                field,
                f"The drafter borrows the target's {name}, and {found}{width}. It must be one of width "
                f"{config.hidden_size} with a row per token: load a drafter that stores its own, or the target it was "
                "trained for.",
            )


def _architecture(pair: Pair) -> Iterator[Finding]:
    noted = pair.note.get("model_type")
    if noted is None:
        return
    names = {_stem(kind) for kind in (pair.target.config.model_type, pair.text.model_type)}
    if _stem(noted) in names:
        return
    # Equal embeddings vouch for a model that only goes by another name.
    known = {pair.note.get("embedding_hash"), pair.own.embedding_hash} - {None}
    has_same_embedding = pair.facts.hashes.embedding in known
    is_related = any(_is_variant(_stem(noted), name) or _is_variant(name, _stem(noted)) for name in names)
    found = f"The drafter was trained for the architecture {noted!r}, the target is {pair.target.config.model_type!r}."
    if is_related or has_same_embedding:
        yield Finding(
            "warning", "model_type", f"{found} {_ONLY_SLOWER} Load the drafter for this target if there is one."
        )
        return
    yield Finding(
        "error",
        "model_type",
        f"{found} They must be the same, for the hidden states of another architecture mean nothing to it: load the "
        "drafter for this target. If this is the same model under another name, set `drafter.config.target = None`.",
    )


def _stem(model_type: str) -> str:
    return model_type.removesuffix("_text")


def _is_variant(name: str, of: str) -> bool:
    return name.startswith(f"{of}_")


def _weights(pair: Pair) -> Iterator[Finding]:
    now, note = pair.facts.hashes, pair.note
    layers = note.get("layer_hashes") or {}
    shared = [name for name in layers if name in now.layers]
    changed = [name for name in shared if layers[name] != now.layers[name]]
    parts = [
        name
        for name, digest, noted in (
            ("the embedding", now.embedding, note.get("embedding_hash")),
            ("the LM head", now.lm_head, note.get("lm_head_hash")),
            ("its active adapters", pair.adapter_hash, note.get("adapter_hash", "none" if layers else None)),
        )
        if None not in (digest, noted) and digest != noted
    ]
    if changed:
        parts.append(f"{len(changed)} of {len(shared)} sampled matrices of the middle layer")
    if parts:
        yield Finding(
            "warning",
            "fingerprint",
            f"The target's weights are not those the drafter was trained on: {', '.join(parts)} differ, as in a "
            f"fine-tuned, merged or quantised copy. {_ONLY_SLOWER} Load the original target, or train the drafter on "
            "this one.",
        )


def _positions(pair: Pair) -> Iterator[Finding]:
    for field, now in zip(("rope_type", "rope_theta"), rotary_kind(pair.text), strict=True):
        noted = pair.note.get(field)
        if None not in (noted, now) and noted != now:
            yield Finding(
                "warning",
                field,
                f"The target's {field} is {now!r}, the drafter was trained on {noted!r}. {_ONLY_SLOWER} Load the "
                "target with its original rope parameters, or train the drafter on this one.",
            )
    longest, own = getattr(pair.text, "max_position_embeddings", None), pair.config.max_position_embeddings
    if longest is not None and own < longest:
        yield Finding(
            "warning",
            "max_position_embeddings",
            f"The drafter was made for {own} positions, the target for {longest}. Beyond {own} tokens drafts may be "
            "accepted less often; the output stays exact. Keep to shorter texts, or train the drafter on longer ones.",
        )


def _tokenizer(pair: Pair) -> Iterator[Finding]:
    if pair.tokenizer is None or not any(key in pair.note for key in _TOKENIZER_KEYS):
        return
    differing = {
        key: (pair.note[key], now)
        for key, now in tokenizer_note(pair.tokenizer).items()
        if None not in (pair.note.get(key), now) and pair.note[key] != now
    }
    if "tokenizer_hash" in differing:
        noted, now = differing["tokenizer_hash"]
        name = f"{type(pair.tokenizer).__name__} ({getattr(pair.tokenizer, 'name_or_path', None) or 'unnamed'})"
        yield Finding(
            "error",
            "tokenizer",
            f"{name} gives other ids for the same text than the tokenizer the drafter was trained with (hash {now}, "
            f"noted {noted}). Target and drafter must share a vocabulary: load the drafter for this target, or this "
            "target's tokenizer.",
        )
    for key, what in _TOKENIZER_KEYS.items():
        if what is not None and key in differing:
            noted, now = differing[key]
            yield Finding(
                "warning",
                key,
                f"{what} is {now!r}, the drafter was trained with {noted!r}. {_ONLY_SLOWER} Use the tokenizer and "
                "template of the drafter's card, or train the drafter on this one.",
            )


_TOKENIZER_KEYS = {
    "tokenizer_hash": None,
    "tokenizer_size": "The tokenizer's size",
    "chat_template_hash": "The chat template's hash",
    "has_thinking_switch": "The chat template's thinking switch",
}
RULES = (_layers, _vocabulary, _draft_vocabulary, _borrowed, _architecture, _weights, _positions, _tokenizer)

__all__ = ["RULES", "DraftFacts", "Finding", "Pair"]
