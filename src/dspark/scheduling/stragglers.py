"""Which rows a batch waits for, where none can join: it is done when its slowest row is.

Drafts for a row that will be done earlier anyway buy nothing: its tokens come sooner, the batch's end does not. So
only rows near the slowest are worth verifying for. All of it is known before a round drafts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

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
        """Whether there are rows to wait for."""
        return bool(self._live)

    def ratio(self, place: int) -> float:
        """Drafts that the live row at `place` keeps over what is usual."""
        pace = self._paces[self._live[place]]
        return (pace.ratio + _PRIOR) / (pace.rounds + _PRIOR)

    def shares(self, usual_gain: float) -> tuple[float, list[float]]:
        """What drafts do for the batch: how many times fewer rounds it takes, and the share of them each row needs.

        The slowest row sets the number of rounds; others need drafts in as many of them as bring them through in time.
        Of several rows one is out of luck, so the slowest is later than its mean.

        Args:
            usual_gain: Drafts a row usually keeps per round in which it gets some.
        """
        gains = [max(self.ratio(place) * usual_gain, _LEAST) for place in range(len(self._live))]
        lefts = [max(self._paces[row].remaining, 1) for row in self._live]
        # Standard deviations by which the unluckiest of so many rows lags behind (Blom's normal score).
        luck = NormalDist().inv_cdf((len(lefts) - 0.375) / (len(lefts) + 0.25))
        # Tokens of n rounds: n (1 + gain), less `luck` deviations of a sum with about the variance n * gain.
        roots = [
            (luck * gain**0.5 + (luck**2 * gain + 4 * (1 + gain) * left) ** 0.5) / (2 * (1 + gain))
            for gain, left in zip(gains, lefts, strict=True)
        ]
        rounds = min(max(roots) ** 2, max(lefts))
        safe = [left + luck * (rounds * gain) ** 0.5 for gain, left in zip(gains, lefts, strict=True)]
        shares = [min(max(left / rounds - 1, 0.0) / gain, 1.0) for gain, left in zip(gains, safe, strict=True)]
        return max(lefts) / rounds, shares

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
