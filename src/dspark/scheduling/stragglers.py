"""Which rows a batch waits for, where none can join: it is done when its slowest row is.

Drafts for a row that will be done earlier anyway buy nothing: its tokens come sooner, the batch's end does not. So
only rows near the slowest are worth verifying for. All of it is known before a round drafts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_NEAR = 0.7  # of the passes the slowest row still needs: rows are not told apart better than that
_KEEP = 0.95  # fading per round: about twenty count
_PRIOR = 1.0  # rounds for which a row is taken to be like the others


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

    def last(self, usual_gain: float) -> list[int]:
        """Places of the rows near the slowest one.

        Args:
            usual_gain: Drafts a row usually keeps per round.
        """
        passes = [
            self._paces[row].remaining / (1 + self.ratio(place) * usual_gain) for place, row in enumerate(self._live)
        ]
        return [place for place, needed in enumerate(passes) if needed >= _NEAR * max(passes)]

    def observe(self, kept: Sequence[float], usual_gain: float) -> None:
        """Drafts each live row was expected to keep, by its scores, where `usual_gain` is usual."""
        if usual_gain <= 0 or len(kept) != len(self._live):
            return
        for row, drafts in zip(self._live, kept, strict=True):
            pace = self._paces[row]
            pace.rounds = _KEEP * pace.rounds + 1
            pace.ratio = _KEEP * pace.ratio + drafts / usual_gain


__all__ = ["Stragglers"]
