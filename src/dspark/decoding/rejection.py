"""Which drafts stay and what follows them (step 6 of the round): exact rejection sampling and its greedy form.

A draft x stays with probability min(1, p_t(x) / p_d(x)); the first one refused is replaced by a draw from the
normalised residual (p_t - p_d)+; a row that keeps all its drafts gets a bonus token from p_t. The text then has the
target's law whatever the drafter proposed. Pure tensors, ragged rows, no host sync; what is done with the uniforms is
in `ops/rejection`, forwards and caches are elsewhere.
Shape letters: `B` rows, `K` slots, `V` target tokens, `Vd` draft tokens.
"""

from __future__ import annotations

import torch

from ..ops import rejection as op
from ..ops.rejection import Verdict, draw

_WITH_FLOAT64 = ("cpu", "cuda")  # others (mps) lack the dtype; uniforms are float32 there


def rejection_sample(
    draft_ids: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    lengths: torch.Tensor,
    *,
    draft_token_ids: torch.Tensor | None = None,
    uniforms: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Verdict:
    """Keep or replace sampled drafts so that the text follows the target's law exactly.

    With float32 laws and uniforms acceptance is decided as in exact arithmetic (the products fit float64). The
    uniforms must be independent of those the drafts were drawn with; a generator that has moved on since is.

    Args:
        draft_ids: Drafts in target ids, int64 `[B, K]`. Slots from `lengths[b]` on are padding: any id, any law.
        draft_probs: The law each draft was drawn from, after every warper, `[B, K, Vd]`. None: greedy drafts, that is
            laws with all mass on `draft_ids`, of which nothing V-wide is built; this form is exact however the drafts
            and their number were chosen. A scheduled draft with p_d(x) = 0, which cannot have been drawn, is judged by
            the limit of the ratio: it stays if p_t(x) > 0.
        target_probs: The target's law at each slot and after the last, `[B, K + 1, V]`, float32 or float64.
        lengths: Scheduled drafts per row, int64 `[B]`, 0 to K.
        draft_token_ids: Sorted target ids of a reduced draft vocabulary, int64 `[Vd]`; None: Vd is V. Unused when
            `draft_probs` is None.
        uniforms: In [0, 1): `[B, K]` decides acceptance and the next token is drawn with `generator`; `[B, K + 1]`
            drives the next token by its last column too. None: all drawn with `generator`.
        generator: Source of randomness; None: the global one.

    Returns:
        The verdict. A row with NaN in its laws has no law to follow but still gets an id inside the vocabulary.

    Raises:
        ValueError: Shapes or dtypes that do not fit together. Values are not looked at, which would stall the device.
    """
    op.check_arguments(draft_ids, draft_probs, target_probs, lengths, draft_token_ids)
    draws = _uniforms(uniforms, draft_ids, target_probs, generator)
    return op.rejection_sample(draft_ids, draft_probs, target_probs, lengths, draws, draft_token_ids=draft_token_ids)


def greedy_verify(draft_ids: torch.Tensor, target_ids: torch.Tensor, lengths: torch.Tensor) -> Verdict:
    """Keep drafts while they equal the target's own choice; the target's choice follows.

    Args:
        draft_ids: Drafts in target ids, int64 `[B, K]`. Slots from `lengths[b]` on are ignored.
        target_ids: The target's arg-max at each slot and after the last, int64 `[B, K + 1]`.
        lengths: Scheduled drafts per row, int64 `[B]`, 0 to K.

    Returns:
        The verdict; example: drafts 5 6 7 against 5 6 9 4 with length 3 keep two, and 9 is next.

    Raises:
        ValueError: Shapes or dtypes that do not fit together.
    """
    op.check_rows(draft_ids, lengths)
    rows, slots = draft_ids.shape
    if target_ids.shape != (rows, slots + 1) or target_ids.dtype != torch.int64:
        raise ValueError(
            f"`target_ids` must be int64 of shape {(rows, slots + 1)} (one choice per draft and one after them), got "
            f"{target_ids.dtype} of shape {tuple(target_ids.shape)}."
        )
    scheduled = torch.arange(slots, device=draft_ids.device) < lengths[:, None]
    num_accepted = ((draft_ids == target_ids[:, :-1]) & scheduled).long().cumprod(-1).sum(-1)
    return Verdict(num_accepted, target_ids.gather(1, num_accepted[:, None])[:, 0])


def uniform_dtype(device: torch.device) -> torch.dtype:
    """The dtype of uniforms on `device`: float64 where there is one."""
    return torch.float64 if device.type in _WITH_FLOAT64 else torch.float32


def _uniforms(
    given: torch.Tensor | None, draft_ids: torch.Tensor, like: torch.Tensor, generator: torch.Generator | None
) -> torch.Tensor:
    """Uniforms `[B, K + 1]`; the last column is for the next token."""
    rows, slots = draft_ids.shape
    dtype = uniform_dtype(like.device)
    if given is not None and given.shape not in ((rows, slots), (rows, slots + 1)):
        raise ValueError(
            f"`uniforms` must be of shape {(rows, slots)} (acceptance) or {(rows, slots + 1)} (and the next token), "
            f"got {tuple(given.shape)}."
        )
    if given is not None and given.shape[1] == slots + 1:
        return given.to(dtype)
    missing = slots + 1 if given is None else 1
    drawn = torch.rand(rows, missing, dtype=dtype, device=like.device, generator=generator)
    return drawn if given is None else torch.cat([given.to(dtype), drawn], dim=1)


__all__ = ["Verdict", "draw", "greedy_verify", "rejection_sample", "uniform_dtype"]
