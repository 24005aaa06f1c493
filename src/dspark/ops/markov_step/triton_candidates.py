"""The Markov block over few candidates in Triton: one program walks a whole block, tokens stay in registers.

A head whose features come from a kernel of their own is walked one slot per launch.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from .arguments import Draws, MarkovDraw, MarkovTables
from .triton_features import FeatureSteps
from .triton_noise import gumbel

NOWHERE = tl.constexpr(2147483647)  # no column


@triton.jit
def _candidate_bias(previous, w1_ptr, w2_ptr, cols, ok, rank, stride_w1, stride_w2,
                    BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr):  # fmt: skip
    """`W1[previous] W2` at the columns `cols`, float32 `[BLOCK_K]`."""
    ranks = tl.arange(0, BLOCK_R)
    partial = tl.zeros([BLOCK_K, BLOCK_R], tl.float32)
    for start in range(0, rank, BLOCK_R):
        rank_ok = start + ranks < rank
        e = tl.load(w1_ptr + previous * stride_w1 + start + ranks, mask=rank_ok, other=0)
        w2 = tl.load(w2_ptr + cols[:, None] * stride_w2 + start + ranks[None, :],
                     mask=ok[:, None] & rank_ok[None, :], other=0)  # fmt: skip
        partial += w2.to(tl.float32) * e.to(tl.float32)[None, :]
    return tl.sum(partial, axis=1)


@triton.jit(do_not_specialize=["first", "last", "slots", "columns", "num_candidates"])
def _markov_candidates_kernel(
    base_ptr, tokens_ptr, candidates_ptr, w1_ptr, w2_ptr, draft_token_ids_ptr, forbidden_ptr, temperatures_ptr,
    seeds_ptr, offsets_ptr, noise_ptr, log_probs_ptr, law_ptr, first, last, slots, columns, num_candidates, rank,
    stride_base, stride_base_slot, stride_w1, stride_w2,
    GATHERS: tl.constexpr, SAMPLES: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Steps `first` to `last` (exclusive) of one row, all of them with `GATHERS`; without, `w1_ptr` has a row per row.

    Tokens are `[B, g + 1]`, the anchors first, and the candidates' law is `[B, g, k]`.
    """
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK_K)
    ok = lanes < num_candidates
    previous = tl.load(tokens_ptr + row * (slots + 1) + first)
    for k in range(first, last):
        at = row * slots + k
        cols = tl.load(candidates_ptr + at * num_candidates + lanes, mask=ok, other=0)  # ascending
        if GATHERS:
            source = previous
        else:
            source = row
        bias = _candidate_bias(source, w1_ptr, w2_ptr, cols, ok, rank, stride_w1, stride_w2, BLOCK_K, BLOCK_R)
        x = tl.load(base_ptr + row * stride_base + k * stride_base_slot + cols, mask=ok, other=0).to(tl.float32) + bias
        allowed = ok
        if forbidden_ptr is not None:
            allowed = ok & (tl.load(forbidden_ptr + cols, mask=ok, other=1) == 0)
        if SAMPLES:
            x = tl.math.div_rn(x, tl.load(temperatures_ptr + row))
        x = tl.where(allowed, x, -float("inf"))
        is_nan = x != x
        largest = tl.max(tl.where(is_nan, -float("inf"), x), axis=0)
        mass = tl.sum(tl.where(allowed, tl.exp(x - largest), 0), axis=0)
        if SAMPLES:
            if noise_ptr is not None:
                noise = tl.load(noise_ptr + at * columns + cols, mask=ok, other=0)
            else:
                noise = gumbel(tl.load(seeds_ptr + row), tl.load(offsets_ptr + row) + k, cols.to(tl.int32))
            if mass != mass:  # no law: uniform over what is allowed
                x = tl.where(allowed, 0.0, -float("inf"))
                largest = 0.0
                mass = tl.sum(allowed.to(tl.float32), axis=0)
            scores = tl.where(allowed, x - largest + noise, -float("inf"))
            chosen = tl.min(tl.where(ok & (scores == tl.max(scores, axis=0)), lanes, NOWHERE), axis=0)
        else:
            chosen = tl.min(tl.where(ok & (x == largest), lanes, NOWHERE), axis=0)
            first_nan = tl.min(tl.where(ok & is_nan, lanes, NOWHERE), axis=0)
            chosen = tl.where(first_nan < NOWHERE, first_nan, chosen)  # as arg-max
        if law_ptr is not None:
            tl.store(law_ptr + at * num_candidates + lanes, x, mask=ok)
        relative = tl.sum(tl.where(lanes == chosen, x - largest, 0), axis=0)
        previous = tl.sum(tl.where(lanes == chosen, cols, 0), axis=0)
        if draft_token_ids_ptr is not None:
            previous = tl.load(draft_token_ids_ptr + previous)
        tl.store(tokens_ptr + row * (slots + 1) + k + 1, previous)
        tl.store(log_probs_ptr + at, relative - tl.log(mass))


def candidate_options(num_candidates: int, rank: int) -> dict[str, int]:
    """Tile sizes and warps of the kernel: its tile of W2 stays in registers."""
    block_k = triton.next_power_of_2(num_candidates)
    width = min(64, triton.next_power_of_2(rank), max(8, 4096 // block_k))
    return {"BLOCK_K": block_k, "BLOCK_R": width, "num_warps": 8 if block_k > 128 else 4}


def candidate_block(
    base_logits: torch.Tensor,
    tables: MarkovTables,
    features: FeatureSteps | None,
    draws: Draws | None,
    candidates: torch.Tensor,
    out: MarkovDraw,
) -> None:
    """Launch the block; what it draws goes into `out`, behind the anchors."""
    rows, slots, columns = base_logits.shape
    num_candidates, rank = candidates.shape[2], tables.w1.shape[1]
    temperatures, seeds, offsets, noise = (None,) * 4 if draws is None else draws
    law = None
    if out.law_logits is not None:
        law = torch.empty(candidates.shape, dtype=torch.float32, device=base_logits.device)
    w1 = tables.w1 if features is None else features.features
    for first, last in [(0, slots)] if features is None else [(k, k + 1) for k in range(slots)]:
        if features is not None:
            features.launch(first)
        _markov_candidates_kernel[(rows,)](
            base_logits, out.token_ids, candidates, w1, tables.w2, tables.draft_token_ids, tables.forbidden,
            temperatures, seeds, offsets, noise, out.log_probs, law, first, last, slots, columns, num_candidates, rank,
            base_logits.stride(0), base_logits.stride(1), w1.stride(0), tables.w2.stride(0),
            GATHERS=features is None, SAMPLES=draws is not None, **candidate_options(num_candidates, rank),
        )  # fmt: skip
    if out.law_logits is not None and law is not None:
        out.law_logits.fill_(-torch.inf).scatter_(2, candidates, law)


__all__ = ["candidate_block", "candidate_options"]
