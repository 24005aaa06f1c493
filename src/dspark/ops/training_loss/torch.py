"""The vocabulary-wide loss terms in torch: any device, in place where it can be."""

from __future__ import annotations

import torch

_Terms = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def training_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    target_probs: torch.Tensor | None,
    ce: float,
    l1: float,
    with_gradient: bool,
) -> _Terms:
    """Sums of both terms, acceptance and gradient; arguments as the door's."""
    log_probs = logits.float().log_softmax(-1)
    known = (labels >= 0).float()
    index = labels.clamp(min=0)[:, None]
    ce_sum = l1_sum = weights.new_zeros(())
    if ce:
        ce_sum = -(log_probs.gather(1, index)[:, 0] * known * weights).sum()
    probs = log_probs.exp_()
    sign = acceptance = None
    if target_probs is not None:
        difference = probs - target_probs
        distance = difference.abs().sum(-1) + missing_mass(target_probs)
        acceptance = (1 - 0.5 * distance).clamp(0, 1)
        l1_sum = (distance * weights).sum() if l1 else l1_sum
        sign = difference.sign_()
    if not with_gradient:
        return ce_sum, l1_sum, acceptance, None
    ce_rows = ce * known
    if sign is None:
        gradient = probs * ce_rows[:, None]
    else:
        inner = torch.linalg.vecdot(probs, sign)
        gradient = sign.mul_(l1).add_((ce_rows - l1 * inner)[:, None]).mul_(probs)
    gradient.scatter_add_(1, index, -ce_rows[:, None])
    return ce_sum, l1_sum, acceptance, gradient.mul_(weights[:, None])


def missing_mass(target_probs: torch.Tensor) -> torch.Tensor:
    """The target's probability of tokens outside the draft vocabulary, `[..., Vd]` -> `[...]`."""
    return (1 - target_probs.sum(-1)).clamp(min=0)


__all__ = ["missing_mass", "training_loss"]
