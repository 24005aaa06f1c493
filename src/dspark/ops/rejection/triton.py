"""Rejection sampling in Triton: three launches, one program per row and tile of the vocabulary in the first two.

1 which drafts stay, and each tile's largest weight; 2 each tile's sum of integer weights; 3 the tile and the token the
last uniform falls on. The arithmetic is the torch form's, step by step, so the verdict is the same.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..dispatch import device_of
from .arguments import Verdict
from .torch import weight_bits

_BLOCK_V = 1024
_PICK_WARPS = 8  # with 4, triton 3.7 keeps 8 bytes of it on the stack of sm_90


@triton.jit
def _column_of(tokens, draft_token_ids_ptr, size, search_steps):
    """Position of each token among the sorted ids (`size` where there is none), by bisection."""
    low = (tokens * 0).to(tl.int32)
    high = low + size
    for _ in range(search_steps):
        middle = (low + high) // 2
        is_open = low < high
        is_below = is_open & (tl.load(draft_token_ids_ptr + middle, mask=is_open, other=0) < tokens)
        low, high = tl.where(is_below, middle + 1, low), tl.where(is_open & (is_below == 0), middle, high)
    found = tl.load(draft_token_ids_ptr + low, mask=low < size, other=-1) == tokens
    return tl.where(found, low, size)


@triton.jit
def _draft_prob(at_ptr, tokens, ok, draft_token_ids_ptr, size, search_steps):
    """p_d of target ids, 0 outside the draft vocabulary; `at_ptr` points at the slots' laws."""
    column = tokens
    if draft_token_ids_ptr is not None:
        column = _column_of(tokens, draft_token_ids_ptr, size, search_steps)
    return tl.load(at_ptr + column, mask=ok & (column < size), other=0)


@triton.jit
def _num_accepted(
    row, length, draft_ids_ptr, draft_probs_ptr, target_probs_ptr, uniforms_ptr, draft_token_ids_ptr, slots, size,
    search_steps, stride_ids, stride_draft, stride_draft_slot, stride_target, stride_target_slot,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Leading drafts that stay in one row."""
    lanes = tl.arange(0, BLOCK_K)
    scheduled = (lanes < length) & (lanes < slots)
    drafts = tl.load(draft_ids_ptr + row * stride_ids + lanes, mask=scheduled, other=0)
    target_at = tl.load(target_probs_ptr + row * stride_target + lanes * stride_target_slot + drafts,
                        mask=scheduled, other=0).to(tl.float64)  # fmt: skip
    uniforms = tl.load(uniforms_ptr + row * (slots + 1) + lanes, mask=scheduled, other=0)
    if draft_probs_ptr is not None:
        laws = draft_probs_ptr + row * stride_draft + lanes * stride_draft_slot
        draft_at = _draft_prob(laws, drafts, scheduled, draft_token_ids_ptr, size, search_steps)
        uniforms = uniforms * draft_at.to(tl.float64)
    return tl.min(tl.where(scheduled & (uniforms < target_at), BLOCK_K, lanes), axis=0)


@triton.jit
def _weights(
    row, num_accepted, length, cols, inside, draft_ids_ptr, draft_probs_ptr, target_probs_ptr, draft_token_ids_ptr,
    size, search_steps, stride_ids, stride_draft, stride_draft_slot, stride_target, stride_target_slot,
):  # fmt: skip
    """p_t and, in rows that refused a draft, (p_t - p_d)+ behind the drafts that stay, for a tile of tokens."""
    slot = num_accepted.to(tl.int64)
    behind_refusal = inside & (cols * 0 + num_accepted < length)
    target = tl.load(target_probs_ptr + row * stride_target + slot * stride_target_slot + cols, mask=inside, other=0)
    if draft_probs_ptr is None:
        refused = tl.load(draft_ids_ptr + row * stride_ids + slot, mask=num_accepted < length, other=-1)
        residual = tl.where(cols == refused, 0, target)
    else:
        law = draft_probs_ptr + row * stride_draft + slot * stride_draft_slot
        draft = _draft_prob(law, cols, behind_refusal, draft_token_ids_ptr, size, search_steps)
        residual = target - draft
        residual = tl.where(residual < 0, 0, residual)
    return target, tl.where(behind_refusal, residual, 0)


@triton.jit
def _scaled(weights, peak, scale):
    """Integer weights, as `draw` in the torch form."""
    if weights.dtype == tl.float32:
        shares = tl.math.div_rn(weights, peak)
    else:
        shares = weights / peak
    return (shares * scale).to(tl.int64)


@triton.jit
def _peak(peaks_ptr, row, batch, tiles, is_refused, BLOCK_T: tl.constexpr):
    """Whether the next token comes from the residual, and the largest weight."""
    lanes = tl.arange(0, BLOCK_T)
    ok = lanes < tiles
    residual = tl.max(tl.load(peaks_ptr + (batch + row) * tiles + lanes, mask=ok, other=0), axis=0)
    target = tl.max(tl.load(peaks_ptr + row * tiles + lanes, mask=ok, other=0), axis=0)
    from_residual = is_refused & (residual > 0)
    return from_residual, tl.where(from_residual, residual, target)


@triton.jit(do_not_specialize=["batch", "slots", "search_steps"])
def _rejection_peak_kernel(
    draft_ids_ptr, draft_probs_ptr, target_probs_ptr, lengths_ptr, uniforms_ptr, draft_token_ids_ptr, num_accepted_ptr,
    peaks_ptr, batch, slots, columns, size, search_steps, stride_ids, stride_draft, stride_draft_slot, stride_target,
    stride_target_slot, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Accepted drafts of a row (every tile finds them, the first writes them) and the largest weights of a tile."""
    row, tile, tiles = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    length = tl.load(lengths_ptr + row).to(tl.int32)
    num_accepted = _num_accepted(
        row, length, draft_ids_ptr, draft_probs_ptr, target_probs_ptr, uniforms_ptr, draft_token_ids_ptr, slots, size,
        search_steps, stride_ids, stride_draft, stride_draft_slot, stride_target, stride_target_slot, BLOCK_K,
    )  # fmt: skip
    if tile == 0:
        tl.store(num_accepted_ptr + row, num_accepted.to(tl.int64))
    cols = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    target, residual = _weights(
        row, num_accepted, length, cols, cols < columns, draft_ids_ptr, draft_probs_ptr,
        target_probs_ptr, draft_token_ids_ptr, size, search_steps, stride_ids, stride_draft, stride_draft_slot,
        stride_target, stride_target_slot,
    )  # fmt: skip
    tl.store(peaks_ptr + row * tiles + tile, tl.max(target, axis=0))
    tl.store(peaks_ptr + (batch + row) * tiles + tile, tl.max(residual, axis=0))


@triton.jit(do_not_specialize=["batch", "search_steps"])
def _rejection_sum_kernel(
    draft_ids_ptr, draft_probs_ptr, target_probs_ptr, lengths_ptr, draft_token_ids_ptr, num_accepted_ptr, peaks_ptr,
    sums_ptr, batch, columns, size, search_steps, scale, stride_ids, stride_draft, stride_draft_slot, stride_target,
    stride_target_slot, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Sum of a tile's integer weights."""
    row, tile, tiles = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    num_accepted = tl.load(num_accepted_ptr + row).to(tl.int32)
    length = tl.load(lengths_ptr + row).to(tl.int32)
    from_residual, peak = _peak(peaks_ptr, row, batch, tiles, num_accepted < length, BLOCK_T)
    cols = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    target, residual = _weights(
        row, num_accepted, length, cols, cols < columns, draft_ids_ptr, draft_probs_ptr, target_probs_ptr,
        draft_token_ids_ptr, size, search_steps, stride_ids, stride_draft, stride_draft_slot, stride_target,
        stride_target_slot,
    )  # fmt: skip
    scaled = _scaled(tl.where(from_residual, residual, target), peak, scale)
    tl.store(sums_ptr + row * tiles + tile, tl.sum(tl.where(cols < columns, scaled, 0), axis=0))


@triton.jit(do_not_specialize=["batch", "slots", "search_steps", "tiles"])
def _rejection_pick_kernel(
    draft_ids_ptr, draft_probs_ptr, target_probs_ptr, lengths_ptr, uniforms_ptr, draft_token_ids_ptr, num_accepted_ptr,
    peaks_ptr, sums_ptr, next_ids_ptr, batch, slots, columns, size, search_steps, tiles, scale, stride_ids,
    stride_draft, stride_draft_slot, stride_target, stride_target_slot, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The first token of a row whose cumulative weight exceeds the last uniform's share of the total."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK_T)
    sums = tl.load(sums_ptr + row * tiles + lanes, mask=lanes < tiles, other=0)
    total = tl.sum(sums, axis=0)
    uniform = tl.load(uniforms_ptr + row * (slots + 1) + slots)
    threshold = tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)
    tile = tl.sum(((tl.cumsum(sums, axis=0) <= threshold) & (lanes < tiles)).to(tl.int32), axis=0)
    tile = tl.minimum(tile, tiles - 1)
    threshold -= tl.sum(tl.where(lanes < tile, sums, 0), axis=0)

    num_accepted = tl.load(num_accepted_ptr + row).to(tl.int32)
    length = tl.load(lengths_ptr + row).to(tl.int32)
    from_residual, peak = _peak(peaks_ptr, row, batch, tiles, num_accepted < length, BLOCK_T)
    cols = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    target, residual = _weights(
        row, num_accepted, length, cols, cols < columns, draft_ids_ptr, draft_probs_ptr, target_probs_ptr,
        draft_token_ids_ptr, size, search_steps, stride_ids, stride_draft, stride_draft_slot, stride_target,
        stride_target_slot,
    )  # fmt: skip
    scaled = tl.where(cols < columns, _scaled(tl.where(from_residual, residual, target), peak, scale), 0)
    passed = tl.sum((tl.cumsum(scaled, axis=0) <= threshold).to(tl.int32), axis=0)
    tl.store(next_ids_ptr + row, tl.minimum(tile * BLOCK_V + passed, columns - 1).to(tl.int64))


def rejection_sample(
    draft_ids: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    lengths: torch.Tensor,
    uniforms: torch.Tensor,
    draft_token_ids: torch.Tensor | None,
) -> Verdict:
    """The verdict; arguments as the door's."""
    rows, slots = draft_ids.shape
    columns = target_probs.shape[2]
    tiles = triton.cdiv(columns, _BLOCK_V)
    target_probs, draft_ids = _rows_dense(target_probs), _rows_dense(draft_ids)
    uniforms = uniforms.double().contiguous()
    size, strides = columns, [draft_ids.stride(0), 0, 0, *target_probs.stride()[:2]]
    if draft_probs is not None:
        draft_probs = _rows_dense(draft_probs)
        size, strides[1:3] = draft_probs.shape[2], draft_probs.stride()[:2]
    if draft_token_ids is not None:
        draft_token_ids = draft_token_ids.contiguous()
    laws = (draft_ids, draft_probs, target_probs, lengths.contiguous())
    num_accepted, next_ids = (torch.empty_like(laws[3]) for _ in range(2))
    peaks = torch.empty(2, rows, tiles, dtype=target_probs.dtype, device=target_probs.device)
    sums = torch.empty(rows, tiles, dtype=torch.int64, device=target_probs.device)
    search, scale = (size, size.bit_length()), 2.0 ** weight_bits(columns)
    block_t = triton.next_power_of_2(tiles)
    with device_of(target_probs):
        _rejection_peak_kernel[(rows, tiles)](
            *laws, uniforms, draft_token_ids, num_accepted, peaks, rows, slots, columns, *search, *strides,
            BLOCK_K=triton.next_power_of_2(max(slots, 1)), BLOCK_V=_BLOCK_V,
        )  # fmt: skip
        _rejection_sum_kernel[(rows, tiles)](
            *laws, draft_token_ids, num_accepted, peaks, sums, rows, columns, *search, scale, *strides,
            BLOCK_T=block_t, BLOCK_V=_BLOCK_V,
        )  # fmt: skip
        _rejection_pick_kernel[(rows,)](
            *laws, uniforms, draft_token_ids, num_accepted, peaks, sums, next_ids, rows, slots, columns, *search,
            tiles, scale, *strides, BLOCK_T=block_t, BLOCK_V=_BLOCK_V, num_warps=_PICK_WARPS,
        )  # fmt: skip
    return Verdict(num_accepted, next_ids)


def _rows_dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with neighbours along the last dimension next to each other in memory."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


__all__ = ["rejection_sample"]
