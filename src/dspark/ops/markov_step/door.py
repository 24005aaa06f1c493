"""The door of the Markov op: its contract, and which implementation runs.

    logits = base_logits + features W2,   law = softmax(logits / temperature)     (paper eq. 4 to 6)

with features `W1[previous]`, or those of the gated and the recurrent head.
Both forms keep one contract: float32 sums of products of the weights as stored, whatever their dtype, and no gradient.
The kernels add the bias tile by tile; as a tensor of width Vd it never exists there.
"""

from __future__ import annotations

import torch

from ..dispatch import Implementation, choose
from .arguments import MarkovDraw, MarkovTables, Sampling, check_block, complete
from .torch import block as torch_block


@torch.no_grad()
def markov_block(
    base_logits: torch.Tensor,
    anchor_ids: torch.Tensor,
    tables: MarkovTables,
    *,
    sampling: Sampling | None = None,
    candidate_top_k: int | None = None,
    with_law: bool = False,
    implementation: Implementation = "auto",
) -> MarkovDraw:
    """Draft a block left to right, each token from its corrected logits.

    Greedy (no sampling) takes what `torch.argmax` takes: the lowest column of equal ones, and the first NaN where
    there is one. Sampling follows the law up to float32 rounding (below 1e-5 in total variation); where there is none
    (NaN, +inf, all -inf) the law is uniform over the columns that are not forbidden. A token outside the columns never
    comes out. Nothing is read on the host.

    Args:
        base_logits: U_k, `[B, g, Vd]`, float32, float16 or bfloat16.
        anchor_ids: Token before the block, int64 `[B]`, target ids (rows of `tables.w1`, not checked).
        tables: Weights, column map, forbidden columns, and what features are made of.
        sampling: Temperature and noise; None: greedy, with log-probabilities at temperature 1.
        candidate_top_k: Only that many columns, the largest of `base_logits` per slot (not forbidden), see the bias
            and may be chosen; the law is the restricted one, its other logits -inf. 1 to 1024. None: all columns.
        with_law: Also give the laws' logits, at the temperature.
        implementation: `"auto"`, `"torch"` or `"triton"`; see `dispatch.choose`.

    Returns:
        Tokens, log-probabilities and, if asked for, laws.

    Raises:
        ValueError: Shapes, dtypes or settings that do not fit together; Triton asked for where it cannot run.
        ImportError: Triton asked for and not installed.
    """
    check_block(base_logits, anchor_ids, tables, candidate_top_k)
    draws = None if sampling is None else complete(sampling, base_logits)
    candidates = None
    if candidate_top_k is not None:
        candidates = candidate_columns(base_logits, candidate_top_k, tables.forbidden)
    if choose(implementation, base_logits) == "torch":
        form = torch_block
    else:
        from .triton import block as form  # triton is an optional dependency
    return form(base_logits, anchor_ids, tables, draws=draws, candidates=candidates, with_law=with_law)


def markov_step(
    base_logits: torch.Tensor,
    previous_ids: torch.Tensor,
    tables: MarkovTables,
    *,
    sampling: Sampling | None = None,
    candidate_top_k: int | None = None,
    with_law: bool = False,
    implementation: Implementation = "auto",
) -> MarkovDraw:
    """One step of [`markov_block`], for logits `[B, Vd]`; noise, features and fields lack the dimension `g` too.

    Raises:
        ValueError, ImportError: As [`markov_block`].
    """
    if base_logits.dim() != 2:
        raise ValueError(f"`base_logits` must be [B, Vd] for one step, got {list(base_logits.shape)}.")
    if sampling is not None and sampling.noise is not None:
        sampling = sampling._replace(noise=sampling.noise[:, None])
    features = tables.features
    if features is not None:
        tables = tables._replace(features=features._replace(hidden=features.hidden[:, None]))
    draw = markov_block(
        base_logits[:, None],
        previous_ids,
        tables,
        sampling=sampling,
        candidate_top_k=candidate_top_k,
        with_law=with_law,
        implementation=implementation,
    )
    law_logits = None if draw.law_logits is None else draw.law_logits[:, 0]
    return MarkovDraw(draw.token_ids[:, 0], draw.log_probs[:, 0], law_logits, draw.state)


def candidate_columns(base_logits: torch.Tensor, top_k: int, forbidden: torch.Tensor | None) -> torch.Tensor:
    """The `top_k` columns of the largest `base_logits [..., Vd]` that are not forbidden, int64 `[..., k]`, ascending.

    Forbidden columns fill up where fewer are left.
    """
    if forbidden is not None:  # below anything allowed, -inf too
        lowest = torch.finfo(base_logits.dtype).min
        base_logits = base_logits.clamp(min=lowest).masked_fill(forbidden, -torch.inf)
    return base_logits.topk(top_k, dim=-1).indices.sort(dim=-1).values


__all__ = ["candidate_columns", "markov_block", "markov_step"]
