"""Which drafts stay and what follows them (step 6 of the round): exact rejection sampling and its greedy form.

A draft x stays with probability min(1, p_t(x) / p_d(x)); the first one refused is replaced by a draw from the
normalised residual (p_t - p_d)+; a row that keeps all its drafts gets a bonus token from p_t. The text then has the
target's law whatever the drafter proposed. Pure tensors, ragged rows, no host sync; forwards and caches are elsewhere.
Deviation: the reference floors p_d at 1e-8 in the ratio, which biases rarer drafts; there is no floor here.
Shape letters: `B` rows, `K` slots, `V` target tokens, `Vd` draft tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

_WITH_FLOAT64 = ("cpu", "cuda")  # others (mps) lack the dtype; uniforms are float32 there


class Verdict(NamedTuple):
    """What verification decided, per row.

    Attributes:
        num_accepted: Leading drafts that stay, int64 `[B]`, 0 to `lengths`; below `lengths` the next id is a recovered
            token, otherwise a bonus token.
        next_ids: The token after them (the next anchor), int64 `[B]`.
    """

    num_accepted: torch.Tensor
    next_ids: torch.Tensor


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
    _check_rows(draft_ids, lengths)
    _check_laws(draft_ids, draft_probs, target_probs, draft_token_ids)
    draws = _uniforms(uniforms, draft_ids, target_probs, generator)
    scheduled = _scheduled(draft_ids, lengths)
    drafts = draft_ids.where(scheduled, 0)  # padding may hold any id, mask tokens or -1 too
    target_at = target_probs[:, :-1].gather(-1, drafts[..., None]).squeeze(-1)
    draft_at = _prob_of_drafts(drafts, draft_probs, draft_token_ids)
    # u < p_t / p_d without the division: p_t = 0 never accepts, at u = 0 neither, and p_d = 0 gives no NaN.
    accepted = draws[:, :-1] * draft_at < target_at
    num_accepted = _leading(accepted & scheduled)
    weights = target_probs[torch.arange(len(drafts), device=drafts.device), num_accepted]  # [B, V]
    if draft_ids.shape[1]:
        residual = _residual(weights, drafts, num_accepted, draft_probs, draft_token_ids)
        # A refusal has probability sum (p_t - p_d)+. Where floats make that 0 yet a draft was refused, p_d and p_t
        # agree up to rounding and so does p_t with whatever belongs here; it also emits no token the target forbids.
        has_residual = (num_accepted < scheduled.sum(-1)) & (residual.amax(-1) > 0)
        weights = torch.where(has_residual[:, None], residual, weights)
    return Verdict(num_accepted, draw(weights, draws[:, -1]))


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
    _check_rows(draft_ids, lengths)
    rows, slots = draft_ids.shape
    if target_ids.shape != (rows, slots + 1) or target_ids.dtype != torch.int64:
        raise ValueError(
            f"`target_ids` must be int64 of shape {(rows, slots + 1)} (one choice per draft and one after them), got "
            f"{target_ids.dtype} of shape {tuple(target_ids.shape)}."
        )
    num_accepted = _leading((draft_ids == target_ids[:, :-1]) & _scheduled(draft_ids, lengths))
    return Verdict(num_accepted, target_ids.gather(1, num_accepted[:, None])[:, 0])


def draw(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Sample one index per row by inverting the cumulative weights.

    The weights are scaled to integers first: their sum is the same in any order, so a parallel scan gives the same
    index, and an index of weight 0 never comes out. This moves the law by less than 1e-7 in total variation (V up to
    2^18), as rounding probabilities to float32 does.

    Args:
        weights: Non-negative, not all 0, need not sum to 1, `[B, V]`.
        uniforms: In [0, 1), `[B]`.

    Returns:
        Indices int64 `[B]`; inside 0 .. V-1 even where the weights are NaN or all 0.
    """
    size = weights.shape[-1]
    bits = 62 - size.bit_length()  # V weights of at most 2^bits sum to less than 2^62
    scaled = weights / weights.amax(-1, keepdim=True) * 2.0**bits
    cumulative = scaled.to(torch.int64).cumsum(-1)
    total = cumulative[:, -1:]
    threshold = (uniforms[:, None] * total).to(torch.int64)
    # The product may round up to the total itself.
    index = torch.searchsorted(cumulative, torch.minimum(threshold, total - 1), right=True)
    return index[:, 0].clamp(max=size - 1)


def uniform_dtype(device: torch.device) -> torch.dtype:
    """The dtype of uniforms on `device`: float64 where there is one."""
    return torch.float64 if device.type in _WITH_FLOAT64 else torch.float32


def _scheduled(draft_ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return torch.arange(draft_ids.shape[1], device=draft_ids.device) < lengths[:, None]  # [B, K]


def _leading(accepted: torch.Tensor) -> torch.Tensor:
    """Length of the leading run of True, `[B, K]` -> int64 `[B]`."""
    return accepted.long().cumprod(-1).sum(-1)


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


def _prob_of_drafts(
    drafts: torch.Tensor, draft_probs: torch.Tensor | None, draft_token_ids: torch.Tensor | None
) -> torch.Tensor:
    """p_d of each draft, `[B, K]`; a scalar 1 for greedy drafts."""
    if draft_probs is None:
        return drafts.new_ones(())
    if draft_token_ids is None:
        return draft_probs.gather(-1, drafts[..., None]).squeeze(-1)
    column = torch.searchsorted(draft_token_ids, drafts).clamp(max=draft_token_ids.shape[0] - 1)
    probs = draft_probs.gather(-1, column[..., None]).squeeze(-1)
    return probs.where(draft_token_ids[column] == drafts, 0)


def _residual(
    target_row: torch.Tensor,
    drafts: torch.Tensor,
    num_accepted: torch.Tensor,
    draft_probs: torch.Tensor | None,
    draft_token_ids: torch.Tensor | None,
) -> torch.Tensor:
    """(p_t - p_d)+ at the refused slot of each row, `[B, V]`; without meaning in rows that refused none."""
    slot = num_accepted.clamp(max=drafts.shape[1] - 1)
    if draft_probs is None:
        return target_row.scatter(1, drafts.gather(1, slot[:, None]), 0)
    draft_row = draft_probs[torch.arange(len(drafts), device=drafts.device), slot]  # [B, Vd]
    if draft_token_ids is None:
        return (target_row - draft_row).clamp(min=0)
    inside = (target_row.index_select(1, draft_token_ids) - draft_row).clamp(min=0)
    return target_row.scatter(1, draft_token_ids.expand_as(inside), inside)


def _check_rows(draft_ids: torch.Tensor, lengths: torch.Tensor) -> None:
    if draft_ids.dim() != 2 or draft_ids.dtype != torch.int64:
        raise ValueError(
            f"`draft_ids` must be int64 of shape [B, K], got {draft_ids.dtype} of shape {tuple(draft_ids.shape)}."
        )
    if lengths.shape != draft_ids.shape[:1] or lengths.dtype != torch.int64:
        raise ValueError(
            f"`lengths` must be int64 of shape {tuple(draft_ids.shape[:1])} (one per row of `draft_ids`), got "
            f"{lengths.dtype} of shape {tuple(lengths.shape)}."
        )


def _check_laws(
    draft_ids: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    draft_token_ids: torch.Tensor | None,
) -> None:
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


__all__ = ["Verdict", "draw", "greedy_verify", "rejection_sample", "uniform_dtype"]
