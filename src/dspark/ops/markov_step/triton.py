"""The Markov block in Triton: two launches per step (three with a gated or recurrent head).

`_markov_tile_kernel` adds the bias to one tile of columns and keeps a few numbers per row and tile;
`_markov_choose_kernel` combines them. Scores are kept relative to the tile's largest logit, so that noise of order 1
is not lost beside logits of order 1e4. Features and candidates have files of their own.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..dispatch import device_of, is_interpreted
from .arguments import Draws, MarkovDraw, MarkovTables
from .triton_candidates import candidate_block
from .triton_features import FeatureSteps
from .triton_noise import gumbel

NOWHERE = tl.constexpr(2147483647)  # no column
# What the tile kernel keeps, per row and tile.
MAX, SUM, SCORE, PICKED, OTHER_SCORE = (tl.constexpr(i) for i in range(5))
INDEX, OTHER_INDEX, ALLOWED = (tl.constexpr(i) for i in range(3))
_BLOCK_V, _BLOCK_T = 128, 512
_ROWS = 16  # rows that share a tile's W2 in one product of matrices: the fewest a product takes


@triton.jit
def _bias(previous_ptr, w1_ptr, w2_ptr, rows, row_ok, cols, col_ok, rank, stride_previous, stride_w1, stride_w2,
          GATHERS: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr):  # fmt: skip
    """`W1[previous] W2` of a tile, float32 `[BLOCK_B, BLOCK_V]`; without `GATHERS`, `w1_ptr` has a row per row."""
    if GATHERS:
        previous = tl.load(previous_ptr + rows * stride_previous, mask=row_ok, other=0)
    else:
        previous = rows
    ranks = tl.arange(0, BLOCK_R)
    if BLOCK_B == 1:
        partial = tl.zeros([BLOCK_V, BLOCK_R], tl.float32)
    else:
        partial = tl.zeros([BLOCK_B, BLOCK_V], tl.float32)
    for start in range(0, rank, BLOCK_R):
        rank_ok = start + ranks < rank
        e = tl.load(w1_ptr + previous[:, None] * stride_w1 + start + ranks[None, :],
                    mask=row_ok[:, None] & rank_ok[None, :], other=0)  # fmt: skip
        w2 = tl.load(w2_ptr + cols.to(tl.int64)[:, None] * stride_w2 + start + ranks[None, :],
                     mask=col_ok[:, None] & rank_ok[None, :], other=0)  # fmt: skip
        if BLOCK_B == 1:
            partial += w2.to(tl.float32) * e.to(tl.float32)
        else:
            partial = tl.dot(e, tl.trans(w2), partial, input_precision="ieee")
    if BLOCK_B == 1:
        return tl.sum(partial, axis=1)[None, :]
    else:
        return partial


@triton.jit(do_not_specialize=["step", "batch", "slots"])
def _markov_tile_kernel(
    base_ptr, tokens_ptr, w1_ptr, w2_ptr, forbidden_ptr, temperatures_ptr, seeds_ptr, offsets_ptr, noise_ptr, law_ptr,
    floats_ptr, ints_ptr, step, batch, slots, columns, rank, stride_base, stride_base_slot, stride_w1, stride_w2,
    GATHERS: tl.constexpr, SAMPLES: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Logits of one tile of columns for `BLOCK_B` rows, and what choosing needs of them.

    `tokens_ptr` is `[B, g + 1]`, the anchors first; noise and law are `[B, g, Vd]`.
    """
    tile, tiles = tl.program_id(1), tl.num_programs(1)
    rows = (tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)).to(tl.int64)
    cols = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    row_ok, col_ok = rows < batch, cols < columns
    inside = row_ok[:, None] & col_ok[None, :]
    bias = _bias(tokens_ptr + step, w1_ptr, w2_ptr, rows, row_ok, cols, col_ok, rank, slots + 1, stride_w1, stride_w2,
                 GATHERS, BLOCK_B, BLOCK_V, BLOCK_R)  # fmt: skip
    in_base = rows[:, None] * stride_base + step.to(tl.int64) * stride_base_slot + cols[None, :]
    in_block = (rows[:, None] * slots + step) * columns + cols[None, :]
    x = tl.load(base_ptr + in_base, mask=inside, other=0).to(tl.float32) + bias
    allowed = inside
    if forbidden_ptr is not None:
        allowed = inside & (tl.load(forbidden_ptr + cols, mask=col_ok, other=1)[None, :] == 0)
    if SAMPLES:
        x = tl.math.div_rn(x, tl.load(temperatures_ptr + rows, mask=row_ok, other=1)[:, None])
    x = tl.where(allowed, x, -float("inf"))
    if law_ptr is not None:
        tl.store(law_ptr + in_block, x, mask=inside)

    is_nan = x != x
    largest = tl.max(tl.where(is_nan, -float("inf"), x), axis=1)  # [BLOCK_B]
    relative = x - tl.where(largest == -float("inf"), 0, largest)[:, None]
    total = tl.sum(tl.where(allowed, tl.exp(relative), 0), axis=1)
    everywhere = cols[None, :] + tl.zeros([BLOCK_B, BLOCK_V], tl.int32)
    if SAMPLES:
        if noise_ptr is not None:
            noise = tl.load(noise_ptr + in_block, mask=inside, other=0)
        else:
            seeds = tl.load(seeds_ptr + rows, mask=row_ok, other=0)[:, None]
            offsets = tl.load(offsets_ptr + rows, mask=row_ok, other=0)[:, None] + step
            noise = gumbel(seeds, offsets, everywhere)
        scores = tl.where(is_nan | (x == -float("inf")), -float("inf"), relative + noise)
        scores = tl.where(scores != scores, -float("inf"), scores)
        score = tl.max(scores, axis=1)
        index = tl.min(tl.where(inside & (scores == score[:, None]), everywhere, NOWHERE), axis=1)
        picked = tl.sum(tl.where(everywhere == index[:, None], relative, 0), axis=1)
        # The choice of a row without a law: uniform over what is allowed.
        others = tl.where(allowed, noise, -float("inf"))
        other_score = tl.max(others, axis=1)
        other_index = tl.min(tl.where(inside & (others == other_score[:, None]), everywhere, NOWHERE), axis=1)
    else:
        score, other_score, picked = largest, tl.zeros_like(largest), tl.zeros_like(largest)
        index = tl.min(tl.where(inside & (x == largest[:, None]), everywhere, NOWHERE), axis=1)
        other_index = tl.min(tl.where(inside & is_nan, everywhere, NOWHERE), axis=1)

    keep = rows * tiles + tile
    field = batch.to(tl.int64) * tiles
    tl.store(floats_ptr + MAX * field + keep, largest, mask=row_ok)
    tl.store(floats_ptr + SUM * field + keep, total, mask=row_ok)
    tl.store(floats_ptr + SCORE * field + keep, score, mask=row_ok)
    tl.store(floats_ptr + PICKED * field + keep, picked, mask=row_ok)
    tl.store(floats_ptr + OTHER_SCORE * field + keep, other_score, mask=row_ok)
    tl.store(ints_ptr + INDEX * field + keep, index, mask=row_ok)
    tl.store(ints_ptr + OTHER_INDEX * field + keep, other_index, mask=row_ok)
    tl.store(ints_ptr + ALLOWED * field + keep, tl.sum(allowed.to(tl.int32), axis=1), mask=row_ok)


@triton.jit(do_not_specialize=["step", "batch", "slots", "columns", "tiles"])
def _markov_choose_kernel(
    floats_ptr, ints_ptr, draft_token_ids_ptr, forbidden_ptr, tokens_ptr, log_probs_ptr, law_ptr, step, batch, slots,
    columns, tiles, SAMPLES: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Token and log-probability of one row from what its tiles kept."""
    row = tl.program_id(0).to(tl.int64)
    field = batch.to(tl.int64) * tiles
    lanes = tl.arange(0, BLOCK_T)
    largest = tl.full([BLOCK_T], -float("inf"), tl.float32)
    for start in range(0, tiles, BLOCK_T):
        ok = start + lanes < tiles
        kept = floats_ptr + row * tiles + start + lanes
        largest = tl.maximum(largest, tl.load(kept + MAX * field, mask=ok, other=-float("inf")))
    top = tl.max(largest, axis=0)

    total, num_allowed = tl.zeros([BLOCK_T], tl.float32), tl.zeros([BLOCK_T], tl.int32)
    score, other_score = tl.full([BLOCK_T], -float("inf"), tl.float32), tl.full([BLOCK_T], -float("inf"), tl.float32)
    index, other_index = tl.full([BLOCK_T], NOWHERE, tl.int32), tl.full([BLOCK_T], NOWHERE, tl.int32)
    picked = tl.zeros([BLOCK_T], tl.float32)
    for start in range(0, tiles, BLOCK_T):
        ok = start + lanes < tiles
        kept, kept_ints = floats_ptr + row * tiles + start + lanes, ints_ptr + row * tiles + start + lanes
        above = tl.load(kept + MAX * field, mask=ok, other=-float("inf")) - top
        total += tl.where(ok, tl.load(kept + SUM * field, mask=ok, other=0) * tl.exp(above), 0)
        this_score = tl.load(kept + SCORE * field, mask=ok, other=-float("inf"))
        this_other = tl.load(kept + OTHER_SCORE * field, mask=ok, other=-float("inf"))
        this_index = tl.load(kept_ints + INDEX * field, mask=ok, other=NOWHERE)
        this_other_index = tl.load(kept_ints + OTHER_INDEX * field, mask=ok, other=NOWHERE)
        if SAMPLES:
            this_score += above
            num_allowed += tl.load(kept_ints + ALLOWED * field, mask=ok, other=0)
        # Later tiles have higher columns, so equal scores keep what is there.
        better = (this_score > score) | (index == NOWHERE)
        score, index = tl.where(better, this_score, score), tl.where(better, this_index, index)
        picked = tl.where(better, tl.load(kept + PICKED * field, mask=ok, other=0) + above, picked)
        better = (this_other > other_score) | (other_index == NOWHERE)
        other_score = tl.where(better, this_other, other_score)
        other_index = tl.where(better, this_other_index, other_index)

    mass = tl.sum(total, axis=0)
    chosen = tl.min(tl.where(score == tl.max(score, axis=0), index, NOWHERE), axis=0)
    log_prob = tl.sum(tl.where(index == chosen, picked, 0), axis=0) - tl.log(mass)
    other = tl.min(tl.where(other_score == tl.max(other_score, axis=0), other_index, NOWHERE), axis=0)
    if SAMPLES:
        if mass != mass:
            chosen, log_prob = other, -tl.log(tl.sum(num_allowed, axis=0).to(tl.float32))
            if law_ptr is not None:
                for start in range(0, columns, BLOCK_V):
                    cols = start + tl.arange(0, BLOCK_V)
                    law = tl.zeros([BLOCK_V], tl.float32)
                    if forbidden_ptr is not None:
                        denied = tl.load(forbidden_ptr + cols, mask=cols < columns, other=1) != 0
                        law = tl.where(denied, -float("inf"), law)
                    tl.store(law_ptr + (row * slots + step) * columns + cols, law, mask=cols < columns)
    else:
        chosen = tl.where(other < NOWHERE, other, chosen)  # the first NaN, as arg-max
    chosen = tl.minimum(chosen, columns - 1).to(tl.int64)
    if draft_token_ids_ptr is not None:
        chosen = tl.load(draft_token_ids_ptr + chosen)
    tl.store(tokens_ptr + row * (slots + 1) + step + 1, chosen)
    tl.store(log_probs_ptr + row * slots + step, log_prob)


def block(
    base_logits: torch.Tensor,
    anchor_ids: torch.Tensor,
    tables: MarkovTables,
    *,
    draws: Draws | None,
    candidates: torch.Tensor | None,
    with_law: bool,
) -> MarkovDraw:
    """All steps; arguments as the torch form's."""
    rows, slots, columns = base_logits.shape
    device = base_logits.device
    if base_logits.stride(-1) != 1:
        base_logits = base_logits.contiguous()
    ids, forbidden = (None if t is None else t.contiguous() for t in (tables.draft_token_ids, tables.forbidden))
    tables = MarkovTables(tables.w1.contiguous(), tables.w2.contiguous(), ids, forbidden, tables.features)
    draws = None if draws is None else Draws(*(None if t is None else t.contiguous() for t in draws))  # type: ignore[arg-type]
    law_logits = torch.empty(rows, slots, columns, dtype=torch.float32, device=device) if with_law else None
    tokens = torch.empty(rows, slots + 1, dtype=torch.int64, device=device)
    tokens[:, 0] = anchor_ids
    log_probs = torch.empty(rows, slots, dtype=torch.float32, device=device)
    out = MarkovDraw(tokens, log_probs, law_logits)
    features = None if tables.features is None else FeatureSteps(tables, tokens)
    with device_of(base_logits):
        if candidates is None:
            _full_block(base_logits, tables, features, draws, out)
        else:
            candidate_block(base_logits, tables, features, draws, candidates, out)
    return out._replace(token_ids=tokens[:, 1:], state=None if features is None else features.last_state)


def tile_options(rows: int, rank: int, dtype: torch.dtype) -> dict[str, int]:
    """Tile sizes and warps of the tile kernel.

    Few rows read W2 as a matrix times a vector. Wide float32 tiles of both kinds would spill registers.
    """
    # Triton's interpreter (3.9) multiplies matrices of bfloat16 as if their bits were integers.
    one_by_one = rows < _ROWS // 4 or (dtype == torch.bfloat16 and is_interpreted())
    width = 32 if one_by_one or dtype == torch.float32 else 64
    return {
        "BLOCK_B": 1 if one_by_one else _ROWS,
        "BLOCK_V": _BLOCK_V,
        "BLOCK_R": min(width, max(16, triton.next_power_of_2(rank))),
        "num_warps": 4 if one_by_one else 8,
    }


def _full_block(
    base_logits: torch.Tensor,
    tables: MarkovTables,
    features: FeatureSteps | None,
    draws: Draws | None,
    out: MarkovDraw,
) -> None:
    """Launch every step; what it draws goes into `out`, behind the anchors."""
    rows, slots, columns = base_logits.shape
    tiles = triton.cdiv(columns, _BLOCK_V)
    rank = tables.w1.shape[1]
    options = tile_options(rows, rank, tables.w1.dtype)
    grid = (triton.cdiv(rows, options["BLOCK_B"]), tiles)
    floats = torch.empty(5, rows, tiles, dtype=torch.float32, device=base_logits.device)
    ints = torch.empty(3, rows, tiles, dtype=torch.int32, device=base_logits.device)
    temperatures, seeds, offsets, noise = (None,) * 4 if draws is None else draws
    w1 = tables.w1 if features is None else features.features
    # Whole tensors and the step's number, not slices: slices differ in alignment, and each would be compiled for.
    for k in range(slots):
        if features is not None:
            features.launch(k)
        _markov_tile_kernel[grid](
            base_logits, out.token_ids, w1, tables.w2, tables.forbidden, temperatures, seeds, offsets, noise,
            out.law_logits, floats, ints, k, rows, slots, columns, rank, base_logits.stride(0), base_logits.stride(1),
            w1.stride(0), tables.w2.stride(0), GATHERS=features is None, SAMPLES=draws is not None, **options,
        )  # fmt: skip
        _markov_choose_kernel[(rows,)](
            floats, ints, tables.draft_token_ids, tables.forbidden, out.token_ids, out.log_probs, out.law_logits, k,
            rows, slots, columns, tiles, SAMPLES=draws is not None,
            BLOCK_T=min(_BLOCK_T, triton.next_power_of_2(tiles)), BLOCK_V=1024,
        )  # fmt: skip


__all__ = ["block", "tile_options"]
