"""Rounds whose right temperatures are known, and slow, obvious forms of the figures."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

TRUE = [2.0, 0.5, 1.0, 3.0, 1.3]


def rounds(
    count: int, temperatures: Sequence[float] = TRUE, *, seed: int = 0, mean: float = 1.0, bias: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits `[N, g]` and accepted lengths `[N]`: slot k is accepted with chance sigmoid(logit_k / T_k - bias)."""
    generator = torch.Generator().manual_seed(seed)
    shape = (count, len(temperatures))
    honest = mean + 1.5 * torch.randn(shape, generator=generator, dtype=torch.float64)
    accepts = torch.rand(shape, generator=generator, dtype=torch.float64) < (honest - bias).sigmoid()
    return honest * torch.tensor(temperatures), accepts.long().cumprod(1).sum(1)


def slow_ece(predicted: Sequence[float], observed: Sequence[float], num_bins: int = 20) -> float:
    """ECE by loops, bins found by comparing with their edges."""
    total = 0.0
    for b in range(num_bins):
        low, high = b / num_bins, (b + 1) / num_bins
        inside = [
            (p, y)
            for p, y in zip(predicted, observed, strict=True)
            if low <= p < high or (b == num_bins - 1 and p == 1)
        ]
        if inside:
            gap = sum(p for p, _ in inside) / len(inside) - sum(y for _, y in inside) / len(inside)
            total += len(inside) / len(predicted) * abs(gap)
    return total if predicted else math.nan


def slow_auc(scores: Sequence[float], observed: Sequence[float]) -> float:
    """Every pair of an event that happened and one that did not."""
    happened = [s for s, y in zip(scores, observed, strict=True) if y]
    missed = [s for s, y in zip(scores, observed, strict=True) if not y]
    if not happened or not missed:
        return math.nan
    return sum((a > b) + 0.5 * (a == b) for a in happened for b in missed) / (len(happened) * len(missed))


__all__ = ["TRUE", "rounds", "slow_auc", "slow_ece"]
