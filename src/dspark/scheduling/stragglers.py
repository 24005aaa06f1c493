"""What drafts do for a batch that none can join: it is done when its slowest row is.

Drafts for a row that will be done earlier anyway buy nothing: its tokens come sooner, the batch's end does not. So a
row gets drafts in the share of rounds that brings it through with the slowest one. All of it is known before a round
drafts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

_WHOLE = 1 - 1e-9  # credits are sums of fractions
_KEEP = 0.95  # fading per round: about twenty count
_LEAST = 1e-3  # drafts: no row is said to keep nothing at all
_PRIOR = 1.0  # rounds for which a row is taken to be like the others


@dataclass
class _Pace:
    """Faded sums of one row.

    Attributes:
        rounds: That count.
        ratio: Drafts it was expected to keep over what is usual, summed.
        remaining: Tokens it could still get when last seen.
        credit: Rounds with drafts it was due, less those it got.
    """

    rounds: float = 0.0
    ratio: float = 0.0
    remaining: int = 0
    credit: float = 0.5


class Stragglers:
    """Paces of a batch's rows, by the rows' names."""

    def __init__(self) -> None:
        self._paces: dict[int, _Pace] = {}
        self._live: list[int] = []

    def begin(self, remaining: Mapping[int, int]) -> None:
        """A round of these rows begins; what is known of rows that are not there, or of other texts, is forgotten.

        Args:
            remaining: Tokens each live row may still get.
        """
        known = self._paces
        self._live, self._paces = list(remaining), {}
        for row, left in remaining.items():
            pace = known.get(row)
            if pace is None or left > pace.remaining:  # more than before: another text under the same name
                pace = _Pace()
            pace.remaining = left
            self._paces[row] = pace

    @property
    def is_told(self) -> bool:
        """Whether the rows of a batch are known."""
        return bool(self._live)

    def ratio(self, place: int) -> float:
        """Drafts that the live row at `place` keeps over what is usual."""
        pace = self._paces[self._live[place]]
        return (pace.ratio + _PRIOR) / (pace.rounds + _PRIOR)

    def shares(self, usual_gains: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
        """What drafts do for the batch, and the share of rounds in which each row needs some.

        The slowest row sets the number of rounds; others need drafts in as many of them as bring them through in time.
        Of several rows one is out of luck, so the slowest is later than its mean.

        Args:
            usual_gains: Drafts a row usually keeps per round in which it gets some, `[W]` for as many ways to draft.

        Returns:
            How many times fewer rounds the batch takes, float64 `[W]`, and the shares, float64 `[W, R]`.
        """
        ratios = np.array([self.ratio(place) for place in range(len(self._live))])
        gains = np.maximum(np.asarray(usual_gains)[:, None] * ratios, _LEAST)
        lefts = np.maximum([self._paces[row].remaining for row in self._live], 1)
        # Standard deviations by which the unluckiest of so many rows lags behind (Blom's normal score).
        luck = NormalDist().inv_cdf((len(lefts) - 0.375) / (len(lefts) + 0.25))
        # Tokens of n rounds: n (1 + gain), less `luck` deviations of a sum with about the variance n * gain.
        roots = (luck * gains**0.5 + (luck**2 * gains + 4 * (1 + gains) * lefts) ** 0.5) / (2 * (1 + gains))
        rounds = np.minimum(roots.max(1) ** 2, lefts.max())[:, None]
        safe = lefts + luck * (rounds * gains) ** 0.5
        return lefts.max() / rounds[:, 0], np.clip((safe / rounds - 1) / gains, 0.0, 1.0)

    def due(self, shares: Sequence[float]) -> list[int]:
        """Places of the rows whose turn it is this round; over many, each row gets its share of them."""
        places = []
        for place, (row, share) in enumerate(zip(self._live, shares, strict=True)):
            pace = self._paces[row]
            pace.credit += share
            if pace.credit >= _WHOLE:
                pace.credit -= 1
                places.append(place)
        return places

    def observe(self, kept: Sequence[float], usual_gain: float) -> None:
        """Drafts each live row was expected to keep, by its scores, where `usual_gain` is usual."""
        if usual_gain <= 0 or len(kept) != len(self._live):
            return
        for row, drafts in zip(self._live, kept, strict=True):
            pace = self._paces[row]
            pace.rounds = _KEEP * pace.rounds + 1
            pace.ratio = _KEEP * pace.ratio + drafts / usual_gain


__all__ = ["Stragglers"]
