"""The layout of vllm-project/speculators (`dspark` and `dflash`): a nested layer config, layer ids shifted by one.

Old saves without `sample_from_anchor` are told apart by `speculative_tokens`; what the package itself defaults to does
not count, as its own default differs from every engine's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .checkpoint import Checkpoint
from .names import SPECULATORS, map_names
from .parts import (
    BACKBONE,
    NO_HEADS,
    NO_SCALE,
    REST,
    backbone,
    heads,
    layer_kinds,
    offset_vocabulary,
    set_layers,
    tables,
    target_width,
)
from .reading import Reader
from .record import Record

NAME = "speculators"
_INNER = "transformer_layer_config."
_PROPOSALS = "speculators_config.proposal_methods"


def recognises(checkpoint: Checkpoint) -> bool:
    """Whether it has the discriminator of the package, which no other writer has."""
    return not checkpoint.is_gguf and checkpoint.config.get("speculators_model_type") in ("dspark", "dflash")


def read(checkpoint: Checkpoint, choices: Mapping[str, Any]) -> Record:
    """Record of a speculators folder.

    Raises:
        ValueError: A field is missing, the anchor's rule is contradictory, or the reduced vocabulary is damaged.
    """
    reader = Reader(NAME, checkpoint, choices)
    kind = checkpoint.config["speculators_model_type"]
    inner = [_INNER + name for name in BACKBONE if name != "rms_norm_eps"]
    reader.require(["block_size", "aux_hidden_state_layer_ids", "mask_token_id", *inner])
    stored = checkpoint.tensors
    reader.tensors = None if stored is None else map_names(reader.source, stored, SPECULATORS, reader.ignored)
    for name in ("block_size", "mask_token_id"):
        reader.take(name)
    reader.take("vocab_size", _INNER + "vocab_size")
    backbone(reader, _INNER, eps=(1e-6, "Qwen3's, which a difference dict leaves out"))
    _rope(reader)
    reader.layer_ids("aux_hidden_state_layer_ids", -1, "minus 1: an entry of `hidden_states` is the layer below it")
    _anchor(reader)
    _attention(reader)
    if kind == "dspark":
        _heads(reader)
    else:
        reader.fill(NO_HEADS)
    offset_vocabulary(reader, stored, _draft_vocab_size(reader))
    reduced = reader.fields["draft_vocab"].value is not None
    tables(reader, without=(False, reduced))
    target_width(reader)
    reader.take("final_logit_softcapping", rule=(None, "no cap unless the config has one"))
    _target(reader)
    reader.fill({**NO_SCALE, **REST})
    return reader.record()


def _anchor(reader: Reader) -> None:
    """`sample_from_anchor`: the flag and `block_size - speculative_tokens` must not contradict each other."""
    if "sample_from_anchor" in reader.choices:
        reader.set("sample_from_anchor", None, "")
        return
    block, flag = reader.fields["block_size"].value, reader.flag("sample_from_anchor")
    tokens = _speculative_tokens(reader)
    fewer = block - tokens if isinstance(tokens, int) and isinstance(block, int) else None
    if flag is not None:
        if fewer in (0, 1) and flag != (fewer == 0):
            raise ValueError(
                f"{reader.source}: `sample_from_anchor` {flag} means {block if flag else block - 1} drafts per block "
                f"of {block}, but `speculative_tokens` is {tokens}. Say which is right by passing "
                "`sample_from_anchor=True` or False: the wrong one halves acceptance without an error."
            )
        reader.set("sample_from_anchor", flag, "config.json: sample_from_anchor")
    elif fewer in (0, 1):
        reader.set(
            "sample_from_anchor",
            fewer == 0,
            f"config.json: block_size {block} - speculative_tokens {tokens} = {fewer}",
        )
    elif fewer is None:
        reader.set("sample_from_anchor", False, "rule of the format: files without the flag do not draft from it")
    else:
        raise ValueError(
            f"{reader.source}: there is no `sample_from_anchor`, and `block_size` {block} - `speculative_tokens` "
            f"{tokens} is {fewer}; it must be 0 (the anchor slot drafts) or 1 (it does not) to tell. Pass "
            "`sample_from_anchor=True` or False."
        )


def _speculative_tokens(reader: Reader) -> Any:
    methods = reader.get(_PROPOSALS)
    if not isinstance(methods, list):
        return None
    named = [method.get("speculative_tokens") for method in methods if isinstance(method, dict)]
    named = [tokens for tokens in named if tokens is not None]
    return named[0] if named and all(tokens == named[0] for tokens in named) else None


def _attention(reader: Reader) -> None:
    windows = layer_kinds(reader, _INNER)
    is_bidirectional = bool(reader.flag("sliding_window_non_causal"))
    causal = [window is not None and not is_bidirectional for window in windows]
    source = "config.json: transformer_layer_config.layer_types, sliding_window; sliding_window_non_causal"
    set_layers(reader, windows, rule="ctx_from_anchor", causal=causal, source=source)


def _rope(reader: Reader) -> None:
    inner = reader.config["transformer_layer_config"]
    rope = inner.get("rope_parameters")
    if isinstance(rope, dict) and any(isinstance(part, dict) for part in rope.values()):
        parts = [rope[kind] for kind in ("sliding_attention", "full_attention") if rope.get(kind) is not None]
        if any(part != parts[0] for part in parts):
            raise ValueError(
                f"{reader.source}: `{_INNER}rope_parameters` turns sliding and full layers differently, {parts}. It "
                "cannot be run: draft layers here have one rotary table."
            )
        inner = {**inner, "rope_parameters": parts[0] if parts else None}
    reader.rope(inner, under=_INNER)


def _heads(reader: Reader) -> None:
    held = reader.tensors or {}
    w1 = held.get("markov_head.markov_w1.weight")
    rank = 0 if w1 is None else w1.shape[-1]
    rules: dict[str, tuple[Any, str]] = {}
    if reader.tensors is not None:
        has_confidence = any(name.startswith("confidence_head.") for name in held)
        rules = {
            "markov_rank": (rank, "as many as markov_head.markov_w1.weight has columns"),
            "markov_head_type": ("vanilla", "vanilla where the config is silent; the tensors must agree"),
            "enable_confidence_head": (has_confidence, "enabled where confidence_head.* is stored"),
            "confidence_head_with_markov": (rank > 0, "with the Markov embedding where there is one"),
        }
    heads(reader, rules=rules)


def _draft_vocab_size(reader: Reader) -> int | None:
    size = reader.count("draft_vocab_size")
    d2t = (reader.checkpoint.tensors or {}).get("d2t")
    return d2t.num_elements if size is None and d2t is not None else size


def _target(reader: Reader) -> None:
    verifier = reader.get("speculators_config.verifier")
    verifier = verifier if isinstance(verifier, dict) else {}
    architectures = verifier.get("architectures")
    note = {
        "name": verifier.get("name_or_path"),
        "architecture": architectures[0] if isinstance(architectures, list) and architectures else None,
        "stored_layer_ids": reader.get("aux_hidden_state_layer_ids"),
    }  # fmt: skip
    kept = {key: value for key, value in note.items() if value}
    reader.set("target", kept or None, "config.json: speculators_config.verifier")


__all__ = ["NAME", "read", "recognises"]
