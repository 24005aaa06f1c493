"""Whether a drafter fits a target, asked before the first forward: what breaks is refused, the rest warns.

`require_pair` is cheap enough to run before every `generate`: the rules (`pairing_rules`) read configs and module
shapes each time, weights are read once (`target_note`). Nothing is written on either model or keeps it alive.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

from transformers import PreTrainedModel
from transformers.utils import logging

from .pairing_rules import RULES, DraftFacts, Finding, Pair
from .target import describe, is_on_meta, text_config, unwrap
from .target_note import FactCache, adapter_hash, draft_vocab_hash, fingerprint, hash_rows, target_facts

logger = logging.get_logger("dspark.pairing")

_ENCODER_DECODER = (
    "The target is an encoder-decoder model (is_encoder_decoder=True), and a drafter reads the hidden states of a "
    "decoder-only model. Use a causal LM, or generate without `assistant_model`."
)
_ON_META = (
    "The weights of the {} are on the meta device, that is, there are none: it was built without loading a "
    "checkpoint. Use `from_pretrained`."
)

_draft_facts: FactCache[DraftFacts] = FactCache()
# target -> drafter -> messages already logged
_warned: weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[Any, set[str]]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def check_pair(target: PreTrainedModel, drafter: Any, *, tokenizer: Any = None) -> list[Finding]:
    """Everything that speaks against drafting for `target` with `drafter`; empty for a clean pair.

    Args:
        target: The target; `torch.compile` and PEFT wrappers are looked through.
        drafter: A `DSparkDrafter`, or a PEFT model of one.
        tokenizer: Also compare ids and chat template with the drafter's note, where that has them.

    Returns:
        Findings in the order of the rules. A pair that cannot be looked at (encoder-decoder target, weights on the
        meta device) has only that one.
    """
    target, drafter = unwrap(target), unwrap(drafter)
    if getattr(target.config, "is_encoder_decoder", False):
        return [Finding("error", "is_encoder_decoder", _ENCODER_DECODER)]
    config = drafter.config
    facts, own = target_facts(target), _facts_of(drafter)
    on_meta = [name for name, is_meta in (("target", facts.is_on_meta), ("drafter", own.is_on_meta)) if is_meta]
    if on_meta:
        return [Finding("error", "device", _ON_META.format(" and the ".join(on_meta)))]
    # Adapters are switched without a change to any weight, so they are looked at each time.
    adapters, note = adapter_hash(target), config.target or {}
    pair = Pair(target, config, text_config(target), facts, adapters, own, note, tokenizer)
    return [finding for rule in RULES for finding in rule(pair)]


def require_pair(target: PreTrainedModel, drafter: Any, tokenizer: Any = None) -> list[Finding]:
    """`check_pair`, with consequences: errors raise, warnings are logged once per pair.

    Returns:
        The warnings, logged before or not.

    Raises:
        ValueError: The pair has errors; the message names both models and lists all of them.
    """
    findings = check_pair(target, drafter, tokenizer=tokenizer)
    if not findings:
        return []
    target, drafter = unwrap(target), unwrap(drafter)
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        listed = "\n".join(f"- {finding.field}: {finding.message}" for finding in errors)
        raise ValueError(f"{describe_drafter(drafter)} cannot draft for {describe(target)}:\n{listed}")
    with _lock:
        logged = _warned.setdefault(target, weakref.WeakKeyDictionary()).setdefault(drafter, set())
        fresh = [finding for finding in findings if finding.message not in logged]
        logged.update(finding.message for finding in fresh)
    for finding in fresh:
        logger.warning(f"{describe_drafter(drafter)} with {describe(target)}: {finding.field}: {finding.message}")
    return findings


def describe_drafter(drafter: Any) -> str:
    """Short name of a drafter for messages: class, path or Hub id, and the target it was trained for where known."""
    drafter = unwrap(drafter)
    note = drafter.config.target or {}
    trained_for = note.get("name") or note.get("architecture") or note.get("model_type")
    return describe(drafter) + (f", trained for {trained_for}," if trained_for else "")


def _facts_of(drafter: Any) -> DraftFacts:
    embedding = getattr(drafter.embed_tokens, "weight", None)
    ids = drafter.draft_token_ids
    watched = [getattr(drafter.fc, "weight", None), embedding, ids]
    facts = _draft_facts.get(drafter, watched)
    if facts is None:
        readable = ids is not None and not ids.is_meta
        span = (int(ids.min()), int(ids.max()), bool((ids[1:] > ids[:-1]).all())) if readable else None
        facts = DraftFacts(hash_rows(embedding), draft_vocab_hash(drafter), span, is_on_meta(drafter))
        if not facts.is_on_meta:
            _draft_facts.put(drafter, watched, facts)
    return facts


__all__ = ["Finding", "check_pair", "describe_drafter", "draft_vocab_hash", "fingerprint", "require_pair"]
