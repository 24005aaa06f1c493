"""The target's own text, free of what its generation config says: greedy, or drawn from its plain law."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers import PreTrainedModel

from .target import text_config, unwrap


def eos_ids(target: PreTrainedModel) -> set[int]:
    """Every id that ends a text of this target."""
    found: set[int] = set()
    for config in (unwrap(target).generation_config, text_config(unwrap(target))):
        ids = getattr(config, "eos_token_id", None)
        found |= set(ids) if isinstance(ids, list | tuple) else {ids} if ids is not None else set()
    return found


def plain_law(temperature: float) -> dict[str, Any]:
    """Arguments of `generate` for the target's plain law at a temperature (no top-k, top-p or penalties); 0: greedy.

    Said outright, since the target's own generation config may set any of them.
    """
    if temperature == 0:
        return {"repetition_penalty": 1.0, "do_sample": False}
    return {"repetition_penalty": 1.0, "do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}


def plain_decoding(target: PreTrainedModel, temperature: float, ends: Iterable[int] | None = None) -> dict[str, Any]:
    """`plain_law`, and where a text ends.

    Args:
        target: Whose end-of-sequence ids count.
        temperature: 0 is greedy.
        ends: Ids that end a text instead.
    """
    ids = sorted(eos_ids(target) if ends is None else ends)
    return {**plain_law(temperature), "eos_token_id": ids or None, "pad_token_id": ids[0] if ids else 0}


__all__ = ["eos_ids", "plain_decoding", "plain_law"]
