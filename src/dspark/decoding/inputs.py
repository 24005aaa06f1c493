"""Inputs of the target's passes behind the prompt, as the model's own preparation makes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

PER_ROW = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")


def prepare_inputs(
    target: PreTrainedModel,
    ids: torch.Tensor,
    kwargs: dict[str, Any],
    per_token: Callable[[torch.Tensor], torch.Tensor],
    *,
    new: int,
    keep: int,
) -> dict[str, Any]:
    """Keywords for the target's forward.

    Args:
        target: The model.
        ids: int64 `[B, n]`, of which the last `new` are forwarded (some models' preparation looks at the whole text).
        kwargs: Cache, mask, positions of the new tokens, and whatever else `generate` prepared; changed.
        per_token: Lays a value per row `[B, 1]` out over the new tokens.
        new: Tokens of the pass per row of `ids`.
        keep: Positions whose logits are needed, from the end.
    """
    for name in PER_ROW:
        if (types := kwargs.get(name)) is not None:
            # The text goes on in the last token's type; multimodal types mark inputs only, and 0 is text.
            last = types[:, -1:]
            kwargs[name] = per_token(last if name == "token_type_ids" else torch.zeros_like(last))
    inputs = target.prepare_inputs_for_generation(ids, next_sequence_length=new, is_first_iteration=False, **kwargs)
    if "logits_to_keep" in kwargs:
        inputs["logits_to_keep"] = keep  # some models' preparation puts a number of their own
    return inputs


def select_rows(kwargs: dict[str, Any], rows: Sequence[int]) -> None:
    """Keep only these rows of the values `prepare_inputs` lays out, in place."""
    for name in PER_ROW:
        if kwargs.get(name) is not None:
            kwargs[name] = kwargs[name][list(rows)]


__all__ = ["PER_ROW", "prepare_inputs", "select_rows"]
