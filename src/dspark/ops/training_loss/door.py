"""The door of the training loss: its contract, and which implementation runs.

For a position with draft law `p = softmax(logits)`, target law `p_t` and weight `w` (paper section 3.3; the L1
distance is not halved):

    CE = -log p_label,   L1 = ||p - p_t||_1,   acceptance = 1 - L1 / 2
    d(w (ce CE + l1 L1)) / d logits = w (ce (p - onehot) + l1 p (s - <p, s>)),   s = sign(p - p_t)
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..dispatch import Implementation, choose
from .torch import training_loss as torch_form


class TermWeights(NamedTuple):
    """How much cross-entropy and L1 distance count; a term of weight 0 is not computed."""

    ce: float
    l1: float


class VocabularyLoss(NamedTuple):
    """Sums over positions, and what the positions give.

    Attributes:
        ce, l1: Sums of the terms, weighted by position only, float32 scalars; 0 where the term's weight is.
        acceptance: float32 `[n]`, in [0, 1]; None without a target law.
        gradient: Of `ce * CE + l1 * L1` by the logits, `[n, Vd]`, dtype of the logits (float32 from the torch form);
            None unless asked for.
    """

    ce: torch.Tensor
    l1: torch.Tensor
    acceptance: torch.Tensor | None
    gradient: torch.Tensor | None


@torch.no_grad()
def training_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    target_probs: torch.Tensor | None,
    terms: TermWeights,
    *,
    with_gradient: bool = True,
    implementation: Implementation = "auto",
) -> VocabularyLoss:
    """Terms and gradient of some positions; both forms agree to float32 rounding.

    Where p and p_t agree to rounding the sign of their difference is either, as it is of one form in another dtype.

    Args:
        logits: Draft logits, `[n, Vd]`, a float dtype; computed with in float32.
        labels: int64 `[n]`, column of each label; -1: no cross-entropy.
        weights: float32 `[n]`.
        target_probs: The target's law on the draft columns, float32 `[n, Vd]`; what it lacks to 1 counts as distance.
            None: cross-entropy alone.
        terms: See [`TermWeights`].
        with_gradient: Whether the gradient is wanted.
        implementation: `"auto"`, `"torch"` or `"triton"`; see `dispatch.choose`.

    Raises:
        ValueError: Shapes or dtypes that do not fit together; Triton asked for where it cannot run.
        ImportError: Triton asked for and not installed.
    """
    if logits.dim() != 2 or not logits.is_floating_point():
        raise ValueError(f"`logits` must be of a float dtype, [n, Vd], got {logits.dtype} {list(logits.shape)}.")
    wanted = {"labels": (labels, torch.int64, logits.shape[:1]), "weights": (weights, torch.float32, logits.shape[:1])}
    if target_probs is not None:
        wanted["target_probs"] = (target_probs, torch.float32, logits.shape)
    for name, (tensor, dtype, shape) in wanted.items():
        if tensor.dtype != dtype or tensor.shape != shape:
            raise ValueError(
                f"`{name}` must be {dtype} of shape {list(shape)}, got {tensor.dtype} {list(tensor.shape)}."
            )
    if choose(implementation, logits) == "torch":
        form = torch_form
    else:
        from .triton import training_loss as form  # triton is an optional dependency
    return VocabularyLoss(*form(logits, labels, weights, target_probs, *terms, with_gradient))


__all__ = ["TermWeights", "VocabularyLoss", "training_loss"]
