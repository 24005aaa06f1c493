"""Figures per draft position: does survival predict how far blocks really get?

The prediction of position k is survival a_k, the event "more than k drafts accepted", as in the reference's table and
in Figure 6 of the paper; calibration is about the product, since that is what a scheduler adds up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .ece import NUM_BINS, ReliabilityBins, auc, brier_score, reliability_bins
from .rounds import check_rounds, survival


@dataclass(frozen=True)
class PositionReliability:
    """Figures of one draft position; NaN where there is nothing to count.

    Attributes:
        position: 0-based.
        num_rounds: Rounds that verified it.
        predicted: Mean survival.
        observed: Share of those rounds that accepted it and all before it.
        ece: Expected calibration error of survival.
        auc: Area under the ROC curve of survival.
        own_auc: The same of the slot's own confidence, over the rounds in which all before it were accepted. No
            temperature changes it.
        brier: Brier score of survival.
        bins: The reliability diagram.
    """

    position: int
    num_rounds: int
    predicted: float
    observed: float
    ece: float
    auc: float
    own_auc: float
    brier: float
    bins: ReliabilityBins

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, None for NaN; of the bins those that are not empty."""
        names = ("predicted", "observed", "ece", "auc", "own_auc", "brier")
        figures = {name: None if math.isnan(value := getattr(self, name)) else value for name in names}
        edges = self.bins.edges.tolist()
        bins = [
            {"from": edges[b], "to": edges[b + 1], "count": count,
             "predicted": float(self.bins.mean_predicted[b]), "observed": float(self.bins.observed_rate[b])}
            for b, count in enumerate(self.bins.counts.tolist()) if count
        ]  # fmt: skip
        return {"position": self.position, "num_rounds": self.num_rounds, **figures, "bins": bins}


def position_reliability(
    confidence_logits: torch.Tensor | Sequence[Sequence[float]],
    accepted_lengths: torch.Tensor | Sequence[int],
    *,
    verified_lengths: torch.Tensor | Sequence[int] | None = None,
    temperatures: torch.Tensor | Sequence[float] | None = None,
    num_bins: int = NUM_BINS,
) -> list[PositionReliability]:
    """Figures of every draft position.

    Args:
        confidence_logits: Raw logits `[N, g]`. N may be 0.
        accepted_lengths: Accepted drafts `[N]`.
        verified_lengths: Verified drafts `[N]`; slots at or after them are left out. None: all g.
        temperatures: Calibration to judge, `[g]`; None: raw scores.
        num_bins: Bins of the ECE.

    Raises:
        ValueError: An argument breaks a rule, which the message names.
    """
    rounds = check_rounds(confidence_logits, accepted_lengths, verified_lengths)
    predicted = survival(rounds.logits, temperatures)
    figures = []
    for k in range(rounds.num_positions):
        decided, reached = rounds.is_decided(k), rounds.is_reached(k)
        scores, events = predicted[decided, k], rounds.survived(k)[decided]
        bins = reliability_bins(scores, events, num_bins=num_bins)
        figures.append(
            PositionReliability(
                position=k,
                num_rounds=int(decided.sum()),
                predicted=float(scores.mean()),
                observed=float(events.double().mean()),
                ece=bins.ece,
                auc=auc(scores, events),
                own_auc=auc(rounds.logits[reached, k], rounds.survived(k)[reached]),
                brier=brier_score(scores, events),
                bins=bins,
            )
        )
    return figures


__all__ = ["PositionReliability", "position_reliability"]
