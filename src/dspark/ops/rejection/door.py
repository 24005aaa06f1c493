"""The door of rejection sampling: its contract, and which implementation runs."""

from __future__ import annotations

import torch

from ..dispatch import Implementation, choose
from .arguments import Verdict, check_arguments
from .torch import rejection_sample as torch_form


def rejection_sample(
    draft_ids: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    lengths: torch.Tensor,
    uniforms: torch.Tensor,
    *,
    draft_token_ids: torch.Tensor | None = None,
    implementation: Implementation = "auto",
) -> Verdict:
    """Keep or replace drafts so that the text follows the target's law; a function of its arguments alone.

    A draft x stays where `u * p_d(x) < p_t(x)`, compared in float64. The next token comes from integer weights, whose
    sums do not depend on their order, so every implementation gives the same verdict on rows that have laws.

    Args:
        draft_ids: Drafts in target ids, int64 `[B, K]`. Slots from `lengths[b]` on are padding: any id, any law.
        draft_probs: The law each draft was drawn from, `[B, K, Vd]`; None: laws with all mass on `draft_ids`.
        target_probs: `[B, K + 1, V]`, float32 or float64.
        lengths: Scheduled drafts per row, int64 `[B]`, 0 to K.
        uniforms: In [0, 1), `[B, K + 1]`, float64 (float32 where the device has none); the last column drives the next
            token.
        draft_token_ids: Sorted target ids of a reduced draft vocabulary, int64 `[Vd]`; None: Vd is V.
        implementation: `"auto"`, `"torch"` or `"triton"`; see `dispatch.choose`.

    Returns:
        The verdict; an id inside the vocabulary for rows without laws (NaN, all 0) too.

    Raises:
        ValueError: Shapes or dtypes that do not fit together; Triton asked for where it cannot run.
        ImportError: Triton asked for and not installed.
    """
    check_arguments(draft_ids, draft_probs, target_probs, lengths, draft_token_ids)
    rows, slots = draft_ids.shape
    if uniforms.shape != (rows, slots + 1):
        raise ValueError(f"`uniforms` must be of shape {(rows, slots + 1)}, got {tuple(uniforms.shape)}.")
    if choose(implementation, target_probs) == "torch":
        return torch_form(draft_ids, draft_probs, target_probs, lengths, uniforms, draft_token_ids)
    from .triton import rejection_sample as triton_form  # triton is an optional dependency

    return triton_form(draft_ids, draft_probs, target_probs, lengths, uniforms, draft_token_ids)


__all__ = ["rejection_sample"]
