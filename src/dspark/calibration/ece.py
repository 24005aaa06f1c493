"""How well predicted probabilities agree with what happened: reliability bins, ECE, Brier score, area under the ROC.

Bins are those of the reference (deepseek-ai/DeepSpec): 20 of equal width over [0, 1], each closed on the left, the
last one on both sides, so 0.05 lies in the second bin and 1.0 in the last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

NUM_BINS = 20  # the reference's

Values = torch.Tensor | Sequence[float] | Sequence[int] | Sequence[bool]


class ReliabilityBins(NamedTuple):
    """A reliability diagram: point b is (`mean_predicted[b]`, `observed_rate[b]`), its weight `counts[b]`.

    Attributes:
        edges: float64 `[bins + 1]`, from 0 to 1.
        counts: int64 `[bins]`, predictions in each bin.
        mean_predicted: float64 `[bins]`, mean prediction in the bin; NaN where it is empty.
        observed_rate: float64 `[bins]`, share of the bin's events that happened; NaN where it is empty.
    """

    edges: torch.Tensor
    counts: torch.Tensor
    mean_predicted: torch.Tensor
    observed_rate: torch.Tensor

    @property
    def ece(self) -> float:
        """Expected calibration error in [0, 1]: gaps of the bins, weighted by their counts; NaN without any."""
        if not int(self.counts.sum()):
            return math.nan
        gaps = (self.mean_predicted - self.observed_rate).abs().nan_to_num()
        return float((gaps * self.counts).sum() / self.counts.sum())


def reliability_bins(predicted: Values, observed: Values, *, num_bins: int = NUM_BINS) -> ReliabilityBins:
    """Sort predictions into bins of equal width and compare each bin with what happened.

    Args:
        predicted: Probabilities `[N]` in [0, 1]. N may be 0.
        observed: Events `[N]`, 0 or 1.
        num_bins: At least 1.

    Raises:
        ValueError: Shapes differ, a value is out of range or not a number.
    """
    predicted, observed = _probabilities(predicted), _events(observed)
    _check_same_length(predicted, observed, "predicted")
    if num_bins < 1:
        raise ValueError(f"`num_bins` must be at least 1, got {num_bins}.")
    index = bin_of(predicted, num_bins)
    counts = torch.bincount(index, minlength=num_bins)
    means = [torch.bincount(index, weights=values, minlength=num_bins) / counts for values in (predicted, observed)]
    return ReliabilityBins(_edges(num_bins), counts, *means)


def bin_of(predicted: torch.Tensor, num_bins: int) -> torch.Tensor:
    """Bin of each probability, int64; by comparing with the edges, as a product with `num_bins` may round up."""
    return torch.bucketize(predicted.contiguous(), _edges(num_bins)[1:-1], right=True)


def _edges(num_bins: int) -> torch.Tensor:
    return torch.arange(num_bins + 1, dtype=torch.float64) / num_bins


def expected_calibration_error(predicted: Values, observed: Values, *, num_bins: int = NUM_BINS) -> float:
    """Mean gap between predictions and event rates over bins, weighted by the bins' counts.

    Figures of small samples are never 0: perfectly calibrated predictions p of n_b events in bin b still leave a gap
    of about 0.8 sqrt(p (1 - p) / n_b) there.

    Args:
        predicted: Probabilities `[N]` in [0, 1].
        observed: Events `[N]`, 0 or 1.
        num_bins: Bins of equal width.

    Returns:
        ECE in [0, 1]; NaN for N = 0.

    Raises:
        ValueError: As [`reliability_bins`].
    """
    return reliability_bins(predicted, observed, num_bins=num_bins).ece


def brier_score(predicted: Values, observed: Values) -> float:
    """Mean squared distance of predictions `[N]` and events `[N]`, in [0, 1]; NaN for N = 0.

    Unlike the ECE, a proper score: only the true probabilities minimise it, the base rate for everyone does not.

    Raises:
        ValueError: As [`reliability_bins`].
    """
    predicted, observed = _probabilities(predicted), _events(observed)
    _check_same_length(predicted, observed, "predicted")
    return float((predicted - observed).square().mean())


def auc(scores: Values, observed: Values) -> float:
    """Area under the ROC curve: the chance that an event that happened scored above one that did not, ties one half.

    Args:
        scores: Any numbers `[N]`, higher for likelier; infinite ones are in order too.
        observed: Events `[N]`, 0 or 1.

    Returns:
        In [0, 1]; NaN where all events or none happened.

    Raises:
        ValueError: Shapes differ, a score is NaN, or an event is neither 0 nor 1.
    """
    scores, observed = _vector(scores, "scores"), _events(observed)
    _check_same_length(scores, observed, "scores")
    if bool(scores.isnan().any()):
        raise ValueError(f"`scores` must be numbers, got {int(scores.isnan().sum())} NaN of {len(scores)}.")
    happened = int(observed.sum())
    missed = len(observed) - happened
    if not happened or not missed:
        return math.nan
    _, place, sizes = scores.unique(return_inverse=True, return_counts=True)
    # Scores that are equal share the mean of the ranks they take up (Mann-Whitney).
    mean_rank = sizes.cumsum(0).double() - (sizes.double() - 1) / 2
    rank_sum = float((mean_rank[place] * observed).sum())
    return (rank_sum - happened * (happened + 1) / 2) / (happened * missed)


def as_float64(values: torch.Tensor | Sequence[Any]) -> torch.Tensor:
    """Values on the CPU in float64; numbers of a list are never rounded to float32 on the way."""
    if isinstance(values, torch.Tensor):
        return values.detach().cpu().double()
    return torch.tensor(values, dtype=torch.float64)


def _vector(values: Values, name: str) -> torch.Tensor:
    tensor = as_float64(values)
    if tensor.dim() != 1:
        raise ValueError(f"`{name}` must be one-dimensional [N], got shape {tuple(tensor.shape)}.")
    return tensor


def _probabilities(values: Values) -> torch.Tensor:
    tensor = _vector(values, "predicted")
    outside = ~((tensor >= 0) & (tensor <= 1))
    if bool(outside.any()):
        raise ValueError(
            f"`predicted` must be probabilities in [0, 1], got {tensor[outside][0].item()} (and "
            f"{int(outside.sum()) - 1} more such). Logits go through a sigmoid first."
        )
    return tensor


def _events(values: Values) -> torch.Tensor:
    tensor = _vector(values, "observed")
    strange = (tensor != 0) & (tensor != 1)
    if bool(strange.any()):
        raise ValueError(f"`observed` must be events, 0 or 1, got {tensor[strange][0].item()}.")
    return tensor


def _check_same_length(values: torch.Tensor, observed: torch.Tensor, name: str) -> None:
    if len(values) != len(observed):
        raise ValueError(f"`{name}` and `observed` must have the same length, got {len(values)} and {len(observed)}.")


__all__ = [
    "NUM_BINS", "ReliabilityBins", "as_float64", "auc", "bin_of", "brier_score", "expected_calibration_error",
    "reliability_bins",
]  # fmt: skip
