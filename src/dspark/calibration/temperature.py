"""Sequential temperature scaling (paper, section 3.2.1): one temperature per draft position, fitted left to right.

T_k is chosen so that survival a_k = a_{k-1} sigmoid(logit_k / T_k) is calibrated against "more than k drafts
accepted", with all earlier temperatures frozen. The objective is the paper's, the ECE, and two rules keep it from a
trap: a prediction that is the base rate for everyone has ECE 0, so a huge T_k wins where the base rate is one half.

1. A temperature whose Brier score is worse than that of T_k = 1 is no candidate.
2. Candidates whose ECE is either the least or within what sampling noise leaves to perfectly calibrated predictions
   cannot be told apart by it: among them the least Brier score decides.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .ece import NUM_BINS, bin_of
from .rounds import ScoredRounds, check_rounds

LOWEST, HIGHEST = 0.1, 10.0
_COARSE = 81  # log-spaced from LOWEST to HIGHEST: steps of 6%, exactly 1 in the middle
_STEP = (HIGHEST / LOWEST) ** (1 / (_COARSE - 1))
_FINE = 21  # log-spaced between the neighbours of the coarse choice: steps of 0.6%
MIN_ROUNDS = 50  # rounds that reached a position; with fewer, log T is off by 0.4 and more


@dataclass(frozen=True)
class PositionFit:
    """What the fit of one draft position gave.

    Attributes:
        position: 0-based.
        temperature: T_k.
        num_rounds: Rounds that verified it.
        num_reached: Of those, the ones that had accepted all before it; only they tell about its own confidence.
        note: Why T_k was not fitted and is the previous position's (1 for the first), or that it lies at the end of
            the grid; None for an ordinary fit.
        is_fitted: False: the temperature is the previous position's.
    """

    position: int
    temperature: float
    num_rounds: int
    num_reached: int
    note: str | None = None
    is_fitted: bool = True


def fit_positions(
    confidence_logits: torch.Tensor | Sequence[Sequence[float]],
    accepted_lengths: torch.Tensor | Sequence[int],
    *,
    verified_lengths: torch.Tensor | Sequence[int] | None = None,
    min_rounds: int = MIN_ROUNDS,
    num_bins: int = NUM_BINS,
) -> list[PositionFit]:
    """Fit every position, and say for each how it went. Arguments and errors as [`fit_sequential_temperatures`]."""
    rounds = check_rounds(confidence_logits, accepted_lengths, verified_lengths)
    if min_rounds < 1:
        raise ValueError(f"`min_rounds` must be at least 1, got {min_rounds}.")
    before = torch.ones(len(rounds.logits), dtype=torch.float64)  # a_{k-1}, calibrated
    previous = 1.0
    fits = []
    for k in range(rounds.num_positions):
        note = _too_little(rounds, k, min_rounds)
        if is_fitted := note is None:
            decided = rounds.is_decided(k)
            events = rounds.survived(k)[decided].double()
            previous = _fit(rounds.logits[decided, k], before[decided], events, num_bins)
            if not LOWEST * _STEP < previous < HIGHEST / _STEP:
                note = f"the best temperature lies at the end of the grid, {LOWEST} to {HIGHEST}"
        else:
            note = f"{note}: kept {'1' if k == 0 else 'the temperature before it'}"
        decided_count, reached_count = int(rounds.is_decided(k).sum()), int(rounds.is_reached(k).sum())
        fits.append(PositionFit(k, previous, decided_count, reached_count, note, is_fitted))
        before = before * (rounds.logits[:, k] / previous).sigmoid()
    return fits


def fit_sequential_temperatures(
    confidence_logits: torch.Tensor | Sequence[Sequence[float]],
    accepted_lengths: torch.Tensor | Sequence[int],
    *,
    verified_lengths: torch.Tensor | Sequence[int] | None = None,
    min_rounds: int = MIN_ROUNDS,
    num_bins: int = NUM_BINS,
) -> torch.Tensor:
    """Calibrated temperature of every draft position.

    The grid is log-spaced from 0.1 to 10 in steps of 6%, then in steps of 0.6% around the choice. A position that too
    few rounds reached, or whose drafts were all accepted or all rejected there, keeps the temperature of the one
    before it (the head is one layer for all of them), the first one 1; a warning names such positions.

    Args:
        confidence_logits: Raw logits `[N, g]` of rounds that were verified whatever the confidence said.
        accepted_lengths: Accepted drafts `[N]`.
        verified_lengths: Verified drafts `[N]`; slots at or after them are left out (behind an end-of-sequence token,
            or cut). None: all g in every round.
        min_rounds: Rounds that must have reached a position for it to be fitted, at least 1.
        num_bins: Bins of the ECE.

    Returns:
        float64 `[g]`, each in [0.1, 10].

    Raises:
        ValueError: An argument breaks a rule, which the message names.
    """
    fits = fit_positions(
        confidence_logits, accepted_lengths, verified_lengths=verified_lengths, min_rounds=min_rounds,
        num_bins=num_bins,
    )  # fmt: skip
    if notes := [f"position {fit.position}: {fit.note}" for fit in fits if fit.note]:
        warnings.warn("Calibration: " + "; ".join(notes) + ".", stacklevel=2)
    return torch.tensor([fit.temperature for fit in fits], dtype=torch.float64)


def _too_little(rounds: ScoredRounds, k: int, min_rounds: int) -> str | None:
    """Why position k cannot be fitted, or None."""
    reached = rounds.is_reached(k)
    count, accepted = int(reached.sum()), int(rounds.survived(k)[reached].sum())
    if count < min_rounds:
        return f"{count} rounds reached it, fewer than {min_rounds}"
    if accepted in (0, count):
        return f"all {count} rounds that reached it {'accepted' if accepted else 'rejected'} it"
    return None


def _fit(logits: torch.Tensor, before: torch.Tensor, events: torch.Tensor, num_bins: int) -> float:
    """Temperature of one position: coarse grid, then a finer one between the neighbours of its choice.

    Args:
        logits: float64 `[n]`, raw.
        before: float64 `[n]`, calibrated survival of the position before.
        events: float64 `[n]`, 0 or 1.
        num_bins: Bins of the ECE.
    """

    def judged(log_temperatures: torch.Tensor) -> list[_Judged]:
        return [_judge(float(t), logits, before, events, num_bins) for t in log_temperatures.exp()]

    grid = torch.linspace(math.log(LOWEST), math.log(HIGHEST), _COARSE, dtype=torch.float64)
    grid[_COARSE // 2] = 0.0
    coarse = judged(grid)
    limit = coarse[_COARSE // 2].brier
    at = coarse.index(_best(coarse, limit))
    low, high = grid[max(at - 1, 0)], grid[min(at + 1, _COARSE - 1)]
    fine = judged(torch.linspace(float(low), float(high), _FINE, dtype=torch.float64))
    return _best([*fine, coarse[at]], limit).temperature


@dataclass(frozen=True)
class _Judged:
    temperature: float
    ece: float
    noise: float
    brier: float


def _judge(
    temperature: float, logits: torch.Tensor, before: torch.Tensor, events: torch.Tensor, num_bins: int
) -> _Judged:
    """ECE, Brier score, and the largest ECE that noise explains, of one temperature.

    Were the predictions of bin b exactly right, its gap would be normal with deviation s_b, the root of sum p (1 - p)
    over n; the ECE, a sum of absolute gaps, would have mean sqrt(2/pi) sum s_b and variance (1 - 2/pi) sum s_b^2. The
    bound is two deviations above the mean.
    """
    predicted = before * (logits / temperature).sigmoid()
    index, count = bin_of(predicted, num_bins), len(predicted)

    def total(values: torch.Tensor) -> torch.Tensor:
        return torch.bincount(index, weights=values, minlength=num_bins)

    ece = float(total(predicted - events).abs().sum()) / count
    variances = total(predicted * (1 - predicted)) / count**2
    noise = math.sqrt(2 / math.pi) * variances.sqrt().sum() + 2 * ((1 - 2 / math.pi) * variances.sum()).sqrt()
    return _Judged(temperature, ece, float(noise), float((predicted - events).square().mean()))


def _best(judged: list[_Judged], limit: float) -> _Judged:
    """The choice among temperatures, see the rules on top; `limit` is the Brier score of temperature 1."""
    candidates = [j for j in judged if j.brier <= limit] or judged
    least = min(j.ece for j in candidates)
    return min((j for j in candidates if j.ece <= max(least, j.noise)), key=lambda j: j.brier)


__all__ = ["HIGHEST", "LOWEST", "MIN_ROUNDS", "PositionFit", "fit_positions", "fit_sequential_temperatures"]
