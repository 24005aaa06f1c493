"""What past rounds say about survival: how far blocks got, and by how much the scores were off.

All sums fade, so recent rounds count most. Everything here is known before a round drafts, so nothing that is decided
by it can look at the round's draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

_MEMORY = 400.0  # rows of rounds that count: beyond, old ones fade
_SCORES_MEMORY = 25.0  # scores are far less noisy than acceptances, so a short while says what blocks are like now
_AFTER_CHANGE = 10.0  # and after rounds that the past does not explain
_SURPRISE_KEEP = 0.95  # fading of the surprise, per round: 20 rounds count
_SURPRISING = 3.5  # standard deviations; by chance about once in some thousand rounds
_LEAN = 2.0  # accepted drafts: a slot's own outweigh those of all slots, and theirs the bare scores
_UNKNOWN = 0.7  # conditional acceptance of a draft before any was verified
_LEAST = 1e-6  # survival is never said to be impossible


# Faded sums, per slot: rows with a score; their scores; scores of rows that verified the slot; rows that verified it
# and accepted all before it; rows that accepted it.
_DRAFTED, _SCORE, _PREDICTED, _REACHED, _KEPT = range(5)


class SurvivalRecord:
    """Running survival per slot, over all rows alike."""

    def __init__(self) -> None:
        self._sums = np.zeros((5, 0))  # [sum, slot]
        self._usual: list[float] = []  # of the first slots, as far as asked since the last round
        self._surprise, self._variance = 0.0, 0.0  # accepted less expected, summed over recent rounds

    @property
    def is_empty(self) -> bool:
        """Whether no draft was verified or scored yet."""
        return not self._sums[:, :1].any()

    @property
    def num_rows(self) -> float:
        """Rows of past rounds that verified something and count."""
        return float(self._sums[_REACHED, 0]) if self._sums.shape[1] else 0.0

    def observe(
        self,
        verified: Sequence[int],
        accepted: Sequence[int],
        survival: Sequence[Sequence[float]] | torch.Tensor | None,
    ) -> None:
        """Add one round: per row how many drafts were verified and accepted, and the scores of those drafted."""
        ends, kept = np.asarray(verified)[:, None], np.asarray(accepted)[:, None]  # [R, 1]
        rows, scores = len(ends), None if survival is None else np.asarray(survival, np.float64)
        is_explained = self.is_empty or self._explains(ends[:, 0], kept[:, 0])
        self.fade(max(_MEMORY - rows, _MEMORY / 2) if is_explained else _AFTER_CHANGE)
        width = int(ends.max(initial=0)) if scores is None else scores.shape[1]
        if width > self._sums.shape[1]:
            self._sums = np.concatenate([self._sums, np.zeros((5, width - self._sums.shape[1]))], axis=1)
        sums, slots = self._sums[:, :width], np.arange(width)
        is_verified = ends > slots  # [R, g]
        sums[_REACHED] += (is_verified & (kept >= slots)).sum(0)
        sums[_KEPT] += (kept > slots).sum(0)
        if scores is not None:
            faded = np.minimum(1.0, max(_SCORES_MEMORY - rows, 1.0) / np.maximum(sums[_DRAFTED], 1.0))
            sums[_DRAFTED] = sums[_DRAFTED] * faded + rows
            sums[_SCORE] = sums[_SCORE] * faded + scores.sum(0)
            sums[_PREDICTED] += (scores * is_verified).sum(0)
        self._usual = []

    def _explains(self, verified: np.ndarray, accepted: np.ndarray) -> bool:
        """Whether recent rounds accepted about what was usual before them."""
        usual = self.usual(int(verified.max()))
        means = np.fromiter(accumulate(usual, initial=0.0), float)
        squares = np.fromiter(accumulate(((2 * k + 1) * a for k, a in enumerate(usual)), initial=0.0), float)
        self._surprise = _SURPRISE_KEEP * self._surprise + float((accepted - means[verified]).sum())
        variance = float((squares[verified] - means[verified] ** 2).sum())  # of sum (2k+1) P(A > k)
        self._variance = _SURPRISE_KEEP**2 * self._variance + variance
        if self._surprise**2 <= _SURPRISING**2 * max(self._variance, 1.0):
            return True
        self._surprise = self._variance = 0.0
        return False

    def fade(self, rows: float) -> None:
        """Let the past count for at most `rows` rows, so that the next rounds weigh more."""
        if self.num_rows > rows:
            self._sums *= rows / self.num_rows
            self._usual = []

    def usual(self, slots: int) -> list[float]:
        """Expected survival of each slot next round, in (0, 1], never rising: corrected mean scores, or without scores
        the product of conditional acceptances."""
        if len(self._usual) < slots:
            self._usual = self._expected(slots)
        return self._usual[:slots]

    def _expected(self, slots: int) -> list[float]:
        ratios, conditional = self._ratios(slots), self._conditional(slots)
        drafted, score = self._sums[[_DRAFTED, _SCORE]].tolist()
        values, before = [], 1.0
        for k in range(slots):
            has_scores = k < len(drafted) and drafted[k] > 0
            value = score[k] / drafted[k] * ratios[k] if has_scores else before * conditional[k]
            before = max(min(value, before), _LEAST)
            values.append(before)
        return values

    def corrected(self, survival: torch.Tensor) -> torch.Tensor:
        """Scores `[R, g]` times what was accepted per score in past rounds, in (0, 1], never rising; float64, CPU.

        Each slot looks at those before it only.
        """
        values = survival.detach().to("cpu", torch.float64).numpy() * self._ratios(survival.shape[1])
        return torch.from_numpy(np.minimum.accumulate(values.clip(_LEAST, 1.0), axis=1))

    def estimate(self, rows: int, slots: int) -> torch.Tensor:
        """Survival in place of scores that do not exist, float64 `[R, g]`."""
        return torch.tensor(self.usual(slots), dtype=torch.float64).expand(rows, -1)

    def _ratios(self, slots: int) -> list[float]:
        """Accepted per predicted of each slot, leaning to that of all slots where a slot has few rounds."""
        predicted, kept = self._sums[[_PREDICTED, _KEPT]].tolist()
        of_scored = sum(k for k, p in zip(kept, predicted, strict=True) if p)
        pooled = (of_scored + _LEAN) / (sum(predicted) + _LEAN)
        known = [(k + _LEAN) / (p + _LEAN / pooled) for k, p in zip(kept, predicted, strict=True)][:slots]
        return known + [pooled] * (slots - len(known))

    def _conditional(self, slots: int) -> list[float]:
        """Acceptance of each slot given that it was reached, leaning likewise."""
        reached, kept = self._sums[[_REACHED, _KEPT]].tolist()
        pooled = (sum(kept) + _UNKNOWN) / (sum(reached) + 1)
        known = [(k + pooled) / (r + 1) for k, r in zip(kept, reached, strict=True)][:slots]
        return known + [pooled] * (slots - len(known))


__all__ = ["SurvivalRecord"]
