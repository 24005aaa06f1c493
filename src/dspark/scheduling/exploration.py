"""Learning a curve from rounds: what a round teaches, and which widths to run while too little is known.

The widths do not depend on any score, so a round that explores is as lossless as a fixed length.
"""

from __future__ import annotations

from .policy import RoundObservation
from .samples import BELIEVED
from .throughput import ThroughputCurve

_NEAR = 1.25  # token counts within this factor tell of the same step time
_MOST_ROUNDS = 3 * BELIEVED  # per number of rows: limits may keep a width from being run as asked


class Exploration:
    """Which width to run next for the curve's sake.

    Args:
        curve: Read here, filled by [`learn_round`].
    """

    def __init__(self, curve: ThroughputCurve) -> None:
        self.curve = curve
        self._tries: dict[int, int] = {}
        self._was_young = True

    def width(self, rows: int, most: int) -> int | None:
        """Drafts per row to verify this round, whatever the scores say; None when enough is known.

        Plain, full and half rounds take turns until each was seen often enough to outvote a warm-up; later, when the
        number of rows changes, only widths far from all known ones are run.
        """
        if self._tries.get(rows, 0) >= _MOST_ROUNDS:
            return None
        is_young = self._is_young()
        widths = dict.fromkeys((most, 0, most // 2))
        missing = [width for width in widths if self._is_missing(rows * (1 + width), is_young=is_young)]
        if not missing:
            return None
        self._tries[rows] = self._tries.get(rows, 0) + 1
        return min(missing, key=lambda width: self._near(rows * (1 + width)))

    def _is_young(self) -> bool:
        """Whether the curve has few samples in all; once it has enough, it keeps enough."""
        if self._was_young:
            self._was_young = sum(self._seen(n) for n in self.curve.token_counts()) < _MOST_ROUNDS
        return self._was_young

    def _is_missing(self, tokens: int, *, is_young: bool) -> bool:
        return not self.curve.has_near(tokens) or (is_young and self._near(tokens) < BELIEVED)

    def _near(self, tokens: int) -> int:
        counts = self.curve.token_counts()
        return sum(self._seen(n) for n in counts if tokens / _NEAR <= n <= tokens * _NEAR)

    def _seen(self, tokens: int) -> int:
        return self.curve.num_samples(tokens)


def learn_round(curve: ThroughputCurve, observation: RoundObservation) -> None:
    """Add a round's times; a time of 0 (a simulator without that cost) teaches nothing."""
    if observation.verify_seconds > 0:
        curve.learn(observation.tokens, observation.verify_seconds, rows=observation.rows)
    if observation.draft_seconds > 0:
        curve.learn_draft(observation.rows, observation.slots, observation.draft_seconds)


__all__ = ["Exploration", "learn_round"]
