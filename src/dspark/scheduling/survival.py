"""What past rounds say about survival: how far blocks got, and by how much the scores were off.

All sums fade, so recent rounds count most. Everything here is known before a round drafts, so nothing that is decided
by it can look at the round's draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass
class _Slot:
    """Faded sums of one slot.

    Attributes:
        drafted: Rows with a score.
        score: Their survival scores.
        predicted: Scores of rows that verified the slot.
        reached: Rows that verified it and accepted all before it.
        kept: Rows that accepted it.
    """

    drafted: float = 0.0
    score: float = 0.0
    predicted: float = 0.0
    reached: float = 0.0
    kept: float = 0.0

    def scale(self, factor: float) -> None:
        self.drafted *= factor
        self.score *= factor
        self.predicted *= factor
        self.reached *= factor
        self.kept *= factor


class SurvivalRecord:
    """Running survival per slot, over all rows alike."""

    def __init__(self) -> None:
        self._slots: list[_Slot] = []
        self._usual: list[float] = []  # of the first slots, as far as asked since the last round
        self._surprise, self._variance = 0.0, 0.0  # accepted less expected, summed over recent rounds

    @property
    def is_empty(self) -> bool:
        """Whether no draft was verified or scored yet."""
        return not any(slot.drafted or slot.reached for slot in self._slots[:1])

    @property
    def num_rows(self) -> float:
        """Rows of past rounds that verified something and count."""
        return self._slots[0].reached if self._slots else 0.0

    def observe(
        self,
        verified: Sequence[int],
        accepted: Sequence[int],
        survival: Sequence[Sequence[float]] | torch.Tensor | None,
    ) -> None:
        """Add one round: per row how many drafts were verified and accepted, and the scores of those drafted."""
        ends, kept = np.asarray(verified), np.asarray(accepted)
        rows, scores = len(ends), None if survival is None else np.asarray(survival, np.float64)
        is_explained = self.is_empty or self._explains(ends, kept)
        self.fade(max(_MEMORY - rows, _MEMORY / 2) if is_explained else _AFTER_CHANGE)
        width = max(verified) if scores is None else scores.shape[1]
        self._slots += [_Slot() for _ in range(width - len(self._slots))]
        places = np.arange(width)
        num_reached = (np.minimum(ends - 1, kept)[:, None] >= places).sum(0).tolist()
        num_kept = (kept[:, None] > places).sum(0).tolist()
        for slot, reaching, keeping in zip(self._slots, num_reached, num_kept, strict=False):
            slot.reached += reaching
            slot.kept += keeping
        if scores is not None:
            of_verified = (scores * (ends[:, None] > places)).sum(0).tolist()
            for slot, score, predicted in zip(self._slots, scores.sum(0).tolist(), of_verified, strict=False):
                faded = min(1.0, max(_SCORES_MEMORY - rows, 1.0) / max(slot.drafted, 1.0))
                slot.drafted = slot.drafted * faded + rows
                slot.score = slot.score * faded + score
                slot.predicted += predicted
        self._usual = []

    def _explains(self, verified: np.ndarray, accepted: np.ndarray) -> bool:
        """Whether recent rounds accepted about what was usual before them."""
        usual = self.usual(int(verified.max()))
        means = np.array([*accumulate(usual, initial=0.0)])
        squares = np.array([*accumulate(((2 * k + 1) * a for k, a in enumerate(usual)), initial=0.0)])
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
            factor = rows / self.num_rows
            for slot in self._slots:
                slot.scale(factor)
            self._usual = []

    def usual(self, slots: int) -> list[float]:
        """Expected survival of each slot next round, in (0, 1], never rising: corrected mean scores, or without scores
        the product of conditional acceptances."""
        if len(self._usual) < slots:
            self._usual = self._expected(slots)
        return self._usual[:slots]

    def _expected(self, slots: int) -> list[float]:
        ratios, conditional = self._ratios(slots), self._conditional(slots)
        values, before = [], 1.0
        for k in range(slots):
            slot = self._slots[k] if k < len(self._slots) else _Slot()
            value = slot.score / slot.drafted * ratios[k] if slot.drafted else before * conditional[k]
            before = max(min(value, before), _LEAST)
            values.append(before)
        return values

    def corrected(self, survival: torch.Tensor) -> torch.Tensor:
        """Scores `[R, g]` times what was accepted per score in past rounds, in (0, 1], never rising; float64, CPU.

        Each slot looks at those before it only.
        """
        values = survival.detach().to("cpu", torch.float64).numpy() * np.array(self._ratios(survival.shape[1]))
        return torch.from_numpy(np.minimum.accumulate(np.minimum(np.maximum(values, _LEAST), 1.0), axis=1))

    def estimate(self, rows: int, slots: int) -> torch.Tensor:
        """Survival in place of scores that do not exist, float64 `[R, g]`."""
        return torch.tensor(self.usual(slots), dtype=torch.float64).expand(rows, -1)

    def _ratios(self, slots: int) -> list[float]:
        """Accepted per predicted of each slot, leaning to that of all slots where a slot has few rounds."""
        predicted = sum(slot.predicted for slot in self._slots)
        pooled = (sum(slot.kept for slot in self._slots if slot.predicted) + _LEAN) / (predicted + _LEAN)
        known = [(slot.kept + _LEAN) / (slot.predicted + _LEAN / pooled) for slot in self._slots[:slots]]
        return known + [pooled] * (slots - len(known))

    def _conditional(self, slots: int) -> list[float]:
        """Acceptance of each slot given that it was reached, leaning likewise."""
        kept, reached = (sum(getattr(slot, name) for slot in self._slots) for name in ("kept", "reached"))
        pooled = (kept + _UNKNOWN) / (reached + 1)
        known = [(slot.kept + pooled) / (slot.reached + 1) for slot in self._slots[:slots]]
        return known + [pooled] * (slots - len(known))


__all__ = ["SurvivalRecord"]
