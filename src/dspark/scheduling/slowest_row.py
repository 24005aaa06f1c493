"""What drafts do for a batch that none can join: it is done when its slowest row is.

Of several rows one is out of luck or hard to draft for, so a batch gains less than its mean row. All of it is known
before a round drafts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

_KEEP = 0.95  # fading per round: about twenty count
_LEAST = 1e-3  # drafts: no row is said to keep nothing at all
_PRIOR = 2.0  # rounds for which a row is taken to be like the others


@dataclass
class _Pace:
    """Faded sums of one row.

    Attributes:
        rounds: That count.
        ratio: Drafts it was expected to keep over what is usual, summed.
        remaining: Tokens it could still get when last seen.
    """

    rounds: float = 0.0
    ratio: float = 0.0
    remaining: int = 0


class SlowestRow:
    """Paces of a batch's rows, by the rows' names, and what the slowest makes of drafts."""

    def __init__(self) -> None:
        self._paces: dict[int, _Pace] = {}

    def begin(self, remaining: Mapping[int, int]) -> None:
        """A round of these rows begins; what is known of rows that are not there, or of other texts, is forgotten.

        Args:
            remaining: Tokens each live row may still get.
        """
        known, self._paces = self._paces, {}
        for row, left in remaining.items():
            pace = known.get(row)
            if pace is None or left > pace.remaining:  # more than before: another text under the same name
                pace = _Pace()
            pace.remaining = left
            self._paces[row] = pace

    @property
    def is_told(self) -> bool:
        """Whether the rows of a batch are known."""
        return bool(self._paces)

    def ratios(self) -> list[float]:
        """Drafts that each row keeps over what is usual."""
        return [(pace.ratio + _PRIOR) / (pace.rounds + _PRIOR) for pace in self._paces.values()]

    def speeds(self, usual_gains: Sequence[float]) -> np.ndarray:
        """How many times fewer rounds the batch takes than without drafts, float64 `[W]`, at least 1.

        Args:
            usual_gains: Drafts a row usually keeps per round, `[W]` for as many ways to draft.
        """
        gains = np.maximum(np.asarray(usual_gains)[:, None] * self.ratios(), _LEAST)
        lefts = np.maximum([pace.remaining for pace in self._paces.values()], 1)
        # Standard deviations by which the unluckiest of so many rows lags behind (Blom's normal score).
        luck = NormalDist().inv_cdf((len(lefts) - 0.375) / (len(lefts) + 0.25))
        # A row's tokens in n rounds: n (1 + gain), less `luck` deviations of a sum of n geometric numbers.
        spread = luck * (gains * (1 + gains)) ** 0.5
        roots = (spread + (spread**2 + 4 * (1 + gains) * lefts) ** 0.5) / (2 * (1 + gains))
        return lefts.max() / np.minimum(roots.max(1) ** 2, lefts.max())

    def observe(self, kept: Sequence[float], usual_gain: float) -> None:
        """Drafts each row was expected to keep, by its scores, where `usual_gain` is usual."""
        if usual_gain <= 0 or len(kept) != len(self._paces):
            return
        for pace, drafts in zip(self._paces.values(), kept, strict=True):
            pace.rounds = _KEEP * pace.rounds + 1
            pace.ratio = _KEEP * pace.ratio + drafts / usual_gain


__all__ = ["SlowestRow"]
