"""The vocabulary-wide part of the loss, chunk by chunk, with its gradient computed on the way.

Logits, target law and their gradient exist for one chunk of block positions at a time, so memory does not grow with
positions x vocabulary. Values and gradients are those of `block_loss` (tested); what is done with a chunk's logits is
in `ops/training_loss`.
Shape letters: `N` supervised positions, `n` of one chunk, `D` drafter width, `r` head rank, `Vd` width of the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..ops.training_loss import TermWeights, training_loss
from .losses import Objective, TargetLaw


class VocabularyHeads(NamedTuple):
    """Who computes the vocabulary-wide tensors of a chunk.

    Attributes:
        logits_of: Draft logits `[n, Vd]` of hidden states `[n, D]` and sequential-head features `[n, r]` (or None);
            called once per chunk.
        law_of: The target's law at the positions of a slice, or None without one.
        parameters: What `logits_of` reads and training changes.
    """

    logits_of: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
    law_of: Callable[[slice], TargetLaw | None]
    parameters: Sequence[torch.nn.Parameter]


class VocabularyTerms(NamedTuple):
    """Weighted sums over positions.

    Attributes:
        loss: `ce * CE + l1 * L1`, with a gradient.
        ce, l1: Its terms, detached.
        acceptance: `1 - L1 / 2` per position, float32 `[N]`; None without a target law.
    """

    loss: torch.Tensor
    ce: torch.Tensor
    l1: torch.Tensor
    acceptance: torch.Tensor | None


def vocabulary_loss(
    hidden: torch.Tensor,
    features: torch.Tensor | None,
    labels: torch.Tensor,
    weights: torch.Tensor,
    *,
    heads: VocabularyHeads,
    objective: Objective,
) -> VocabularyTerms:
    """Weighted sum of cross-entropy and L1 over positions.

    Args:
        hidden: `[N, D]`.
        features: `[N, r]`, or None without a sequential head.
        labels: int64 `[N]`, index into the draft vocabulary; -1: no cross-entropy.
        weights: float32 `[N]`.
        heads: See [`VocabularyHeads`].
        objective: Weights of the two terms, and the chunks' size.
    """
    call = (heads, labels, weights, objective)
    if not (objective.ce or objective.l1):  # only the acceptance is wanted
        hidden, features, heads = (
            hidden.detach(),
            None if features is None else features.detach(),
            heads._replace(parameters=()),
        )
    total, ce_sum, l1_sum, acceptance = _ChunkedLoss.apply(call, hidden, features, *heads.parameters)
    return VocabularyTerms(total, ce_sum, l1_sum, acceptance)


class _ChunkedLoss(torch.autograd.Function):
    """Computes the gradients in `forward`, while a chunk's logits are there; `backward` scales them."""

    @staticmethod
    def forward(ctx: Any, call: tuple, hidden: torch.Tensor, features: torch.Tensor | None, *parameters: Any) -> Any:
        heads, labels, weights, objective = call
        chunk_size = objective.chunk_size or max(len(hidden), 1)
        inputs = (hidden, features, *parameters)
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad[1:]) if needed]
        # Sums run in the parameters' own dtype, as autograd's would.
        grads: list[Any] = [torch.zeros_like(x) if i in wanted else None for i, x in enumerate(inputs)]
        sums = hidden.new_zeros(2, dtype=torch.float32)
        acceptance = []
        # A batch without a supervised position is one empty chunk: every parameter then has a (zero) gradient.
        for start in range(0, max(len(hidden), 1), chunk_size):
            rows = slice(start, start + chunk_size)
            with torch.enable_grad():
                leaves = [None if x is None else x[rows].detach().requires_grad_() for x in (hidden, features)]
                logits = heads.logits_of(*leaves)
            law = heads.law_of(rows)
            part = training_loss(
                logits.detach(), labels[rows], weights[rows], None if law is None else law.probs,
                TermWeights(objective.ce, objective.l1), with_gradient=bool(wanted),
            )  # fmt: skip
            sums += torch.stack([part.ce, part.l1])
            acceptance.append(part.acceptance)
            if part.gradient is not None:
                asked = [(*leaves, *parameters)[i] for i in wanted]
                found = torch.autograd.grad(logits, asked, part.gradient.to(logits.dtype), allow_unused=True)
                for i, grad in zip(wanted, found, strict=True):
                    if grad is not None:
                        grads[i][rows if i < 2 else ...] += grad  # 2: hidden states and features come in rows
        ctx.grads = grads
        ctx.mark_non_differentiable(*(weighed := (sums[0].clone(), sums[1].clone())))
        known = [part for part in acceptance if part is not None]
        return objective.ce * sums[0] + objective.l1 * sums[1], *weighed, torch.cat(known) if known else None

    @staticmethod
    def backward(ctx: Any, scale: torch.Tensor, *_: Any) -> Any:
        return None, *(None if grad is None else grad * scale.to(grad.dtype) for grad in ctx.grads)


__all__ = ["VocabularyHeads", "VocabularyTerms", "vocabulary_loss"]
