"""What rejection sampling gives, and the checks of what can be checked without looking at values."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Verdict(NamedTuple):
    """What verification decided, per row.

    Attributes:
        num_accepted: Leading drafts that stay, int64 `[B]`, 0 to `lengths`; below `lengths` the next id is a recovered
            token, otherwise a bonus token.
        next_ids: The token after them (the next anchor), int64 `[B]`.
    """

    num_accepted: torch.Tensor
    next_ids: torch.Tensor


def check_arguments(
    draft_ids: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    lengths: torch.Tensor,
    draft_token_ids: torch.Tensor | None,
) -> None:
    """Refuse ids, laws and lengths whose shapes or dtypes do not fit together (`ValueError`)."""
    check_rows(draft_ids, lengths)
    rows, slots = draft_ids.shape
    if target_probs.dim() != 3 or target_probs.shape[:2] != (rows, slots + 1):
        raise ValueError(
            f"`target_probs` must be of shape [{rows}, {slots + 1}, V] (one law per draft and one after them), got "
            f"{tuple(target_probs.shape)}."
        )
    dtype = target_probs.dtype
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"`target_probs` must be float32 or float64, got {dtype}: half precision changes the law. Take the "
            "softmax of float32 logits."
        )
    if draft_probs is None:
        return
    size = target_probs.shape[2] if draft_token_ids is None else draft_token_ids.shape[0]
    if draft_probs.shape != (rows, slots, size):
        raise ValueError(
            f"`draft_probs` must be of shape {(rows, slots, size)} (one law per draft), got "
            f"{tuple(draft_probs.shape)}. For a reduced draft vocabulary pass its sorted target ids as "
            "`draft_token_ids`."
        )
    if draft_probs.dtype != dtype:
        raise ValueError(f"`draft_probs` must have the dtype of `target_probs`, {dtype}, got {draft_probs.dtype}.")


def check_rows(draft_ids: torch.Tensor, lengths: torch.Tensor) -> None:
    """Refuse drafts that are not int64 `[B, K]` or lengths that are not int64 `[B]` (`ValueError`)."""
    if draft_ids.dim() != 2 or draft_ids.dtype != torch.int64:
        raise ValueError(
            f"`draft_ids` must be int64 of shape [B, K], got {draft_ids.dtype} of shape {tuple(draft_ids.shape)}."
        )
    if lengths.shape != draft_ids.shape[:1] or lengths.dtype != torch.int64:
        raise ValueError(
            f"`lengths` must be int64 of shape {tuple(draft_ids.shape[:1])} (one per row of `draft_ids`), got "
            f"{lengths.dtype} of shape {tuple(lengths.shape)}."
        )


__all__ = ["Verdict", "check_arguments", "check_rows"]
