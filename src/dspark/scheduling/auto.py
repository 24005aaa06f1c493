"""`auto`: Algorithm 1 on a curve learnt while decoding, and as many drafts as pay, none included.

Before each round the width of the block is chosen by expected tokens per second, from step times and survival of past
rounds; within the round the verify lengths are chosen from the scores. Where no row can join, tokens per second are
those of the batch's slowest row (see `slowest_row.py`). Rarely, another width is tried, so that a world that changed
is noticed; what such a try is expected to cost is a bounded share of the time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from .exploration import Exploration, learn_round
from .policy import RoundObservation, RoundSpeed, VerifyPolicy
from .prefix import foresighted_schedule
from .slowest_row import SlowestRow
from .survival import SurvivalRecord
from .throughput import ThroughputCurve

_LOSS_SHARE = 0.012  # of the time that tries of other widths may cost
_LEAST_WAIT = 8  # rounds between tries
_MOST_PATIENCE = 3.0  # how far waits grow while tries do not pay
_PATIENCE_GROWTH = 1.25
_DOUBT = 0.3  # standard errors of the accepted length that count in favour of drafting
_MOST_HOPE = 3.0  # factor on scores that doubt may give
_TIE = 0.995  # a wider block within this share of the best rate is taken: scores can still cut it
_PLAIN_LEAD = 1.03  # below this gain rounds are plain: a drift of the machine between two timings fakes as much
_EDGE_KEEP, _EDGE_PRIOR = 0.98, 50.0  # fading of achieved over expected, and tokens it takes to be believed


class AutoPolicy(VerifyPolicy):
    """Adaptive drafting and Algorithm 1; without scores, survival is that of past rounds.

    Lossless: the width is a function of past rounds; lengths look at a slot's own score and those before it (see
    [`foresighted_schedule`]), corrected by what past rounds accepted; rounds that explore verify every draft.

    Args:
        curve: Where to start; a copy is learnt on. None: the first rounds measure.
    """

    needs_confidence = True
    curve: ThroughputCurve

    def __init__(self, curve: ThroughputCurve | None = None) -> None:
        self.curve = ThroughputCurve() if curve is None else curve.copy()
        self.record = SurvivalRecord()
        self._exploration = Exploration(self.curve)
        self._edge = _Edge()
        self._verifies_all = True
        self._expected_rate = 0.0  # tokens per second of a row the round is expected to give; 0: not judged
        self._slowest_row = SlowestRow()
        self._share = 1.0  # of what this round's drafts bring the mean row, what they bring the batch
        self._trial: _Trial | None = None  # of this round
        self._repeats_trial = False
        self._patience = 1.0
        self._since_trial, self._rounds_since_trial, self._num_trials = 0.0, 0, 0
        self._was_drafting = True

    # --- before drafting ------------------------------------------------------------------------------------------

    def slots(self, rows: int, most: int, remaining: Mapping[int, int] | None = None) -> int:
        """Width of the next block: what is expected to give most tokens per second."""
        self._verifies_all, self._trial, self._expected_rate, self._share = True, None, 0.0, 1.0
        if rows == 1:
            remaining = None  # nothing to tell apart
        self._slowest_row.begin(remaining or {})
        if rows < 1 or most < 1:
            return 0
        width = self._exploration.width(rows, most)
        if width is None and self.record.is_empty:
            width = most
        if width is not None:
            return width
        widths = self._widths(rows, most)
        best = self._best([width.rate for width in widths])
        if (best > 0) != self._was_drafting:
            self._was_drafting, self._patience = best > 0, 1.0
        self._trial = self._next_trial(rows, widths, best)
        slots = best if self._trial is None else self._trial.width
        self._share = widths[slots].speed / (1 + widths[slots].gain)
        if self._trial is None:
            self._verifies_all, self._expected_rate = False, widths[best].rate if best else 0.0
        return slots

    def _widths(self, rows: int, most: int) -> list[_Width]:
        """What widths of 0 to `most` are expected to bring; drafted ones get the benefit of the doubt, since only
        drafting removes it."""
        found = [_Width(1 / self.curve.step_seconds(rows, rows, 0), 1.0, 0.0, 1.0)]
        gains = [*accumulate(self.record.usual(most))]
        speeds = self._slowest_row.speeds(gains) if self._slowest_row.is_told else 1 + np.array(gains)
        tokens = rows * np.arange(2, most + 2)
        seconds = self.curve.seconds_of(tokens, rows=rows)
        for width in range(1, most + 1):
            before = self.curve.draft_seconds(rows, width)
            rates = speeds[:width] / (before + seconds[:width])
            length = int(rates.argmax())
            hope = self._edge.value * (1 + self._doubt(gains[length]) / (1 + gains[length]))
            found.append(
                _Width(float(rates[length]) * hope, float(speeds[length]), gains[length], float(speeds[width - 1]))
            )
        return found

    def _doubt(self, accepted: float) -> float:
        """By how much the accepted drafts of a row may be more than what past rounds say."""
        known = max(self.record.num_rows, 1.0)
        # They vary about as a geometric number of that mean does.
        return _DOUBT * ((accepted * (1 + accepted) + 3 / known) / known) ** 0.5

    @staticmethod
    def _best(rates: list[float]) -> int:
        top = max(rates)
        if rates[0] * _PLAIN_LEAD >= top:
            return 0
        return max(w for w, rate in enumerate(rates) if w and rate >= _TIE * top)

    def _next_trial(self, rows: int, widths: list[_Width], best: int) -> _Trial | None:
        """A try of another width, when the time since the last one pays for it."""
        most = len(widths) - 1
        if best == 0:
            drafted = max(range(1, most + 1), key=lambda width: widths[width].rate)
            width = most if self._num_trials % 4 == 3 else drafted
        else:
            width = 0 if best == most or self._num_trials % 2 else most
        if not (self._repeats_trial and best == 0):
            if self._rounds_since_trial < _LEAST_WAIT * self._patience:
                return None
            # A try verifies all it drafts; what it brings would otherwise have taken its time too.
            seconds = self.curve.step_seconds(rows, rows * (1 + width), width)
            loss = max(seconds - widths[width].whole_speed / widths[best].rate, 0.0)
            if self._since_trial < loss * self._patience / _LOSS_SHARE:
                return None
        return _Trial(width, widths[best].rate)

    # --- after the scores -----------------------------------------------------------------------------------------

    def lengths(
        self,
        own: torch.Tensor | None,  # noqa: ARG002 - the interface of all policies
        survival: torch.Tensor | None,
        limits: Sequence[int],
    ) -> list[int]:
        """Drafts per row by Algorithm 1; all in rounds that explore."""
        width = max(limits, default=0)
        if survival is not None:
            width = min(width, survival.shape[1])
        if self._verifies_all or survival is None or not width:
            return [min(limit, width) for limit in limits]  # without scores the width is all there is to decide
        speed = RoundSpeed(self.curve, len(survival), self.curve.draft_seconds(*survival.shape))
        usual = self.record.usual(survival.shape[1])
        # The benefit of the doubt that chose the width: a block drafted for it is not cut for the lack of it.
        factor = min(1 + self._doubt(sum(usual)) / sum(usual), _MOST_HOPE)
        scores = (self.record.corrected(survival) * factor).clamp_(max=1.0)
        return foresighted_schedule(scores, speed, usual, limits=limits).tolist()

    # --- after the round ------------------------------------------------------------------------------------------

    def observe(self, observation: RoundObservation) -> None:
        """Learn step times and survival, and judge the width that was tried."""
        learn_round(self.curve, observation)
        seconds = observation.draft_seconds + observation.verify_seconds
        tokens = self._share * (1 + sum(observation.accepted) / observation.rows)
        if observation.slots:
            if observation.survival is not None:
                kept = self.record.corrected(torch.as_tensor(observation.survival)).sum(1).tolist()
                self._slowest_row.observe(kept, sum(self.record.usual(observation.slots)))
            self.record.observe(observation.verified, observation.accepted, observation.survival)
            self._edge.observe(tokens, self._expected_rate * seconds)
        if self._trial is None:
            self._since_trial += seconds
            self._rounds_since_trial += 1
        else:
            self._judge(self._trial, tokens, seconds)
        # The next round may come without a question about its width.
        self._trial, self._expected_rate = None, 0.0

    def _judge(self, trial: _Trial, tokens: float, seconds: float) -> None:
        has_paid = tokens > trial.rate_to_beat * seconds
        self._repeats_trial = has_paid and trial.width > 0 and not self._was_drafting
        self._patience = 1.0 if has_paid else min(self._patience * _PATIENCE_GROWTH, _MOST_PATIENCE)
        self._since_trial, self._rounds_since_trial = 0.0, 0
        self._num_trials += 1


class _Width(NamedTuple):
    """What blocks of one width are expected to bring, verified as far as pays.

    Attributes:
        rate: Tokens per second of the batch's slowest row.
        speed: How many times fewer rounds than without drafts.
        gain: Drafts a row usually keeps in a round that verifies some of it.
        whole_speed: `speed` with every draft verified.
    """

    rate: float
    speed: float
    gain: float
    whole_speed: float


class _Trial:
    """A round of another width, and the tokens per second of a row that it must beat to have paid."""

    def __init__(self, width: int, rate_to_beat: float) -> None:
        self.width = width
        self.rate_to_beat = rate_to_beat


class _Edge:
    """What drafted rounds gave over what was expected: scores cut hard blocks short, which means do not see."""

    def __init__(self) -> None:
        self._tokens = self._expected = 0.0

    def observe(self, tokens: float, expected: float) -> None:
        """Tokens per row of a round, and how many were expected in its time; 0: none were."""
        if expected > 0:
            self._tokens = _EDGE_KEEP * self._tokens + tokens
            self._expected = _EDGE_KEEP * self._expected + expected

    @property
    def value(self) -> float:
        """Factor on expected rates of drafted widths, at least 1: what is accepted less often is in the survival."""
        return max((self._tokens + _EDGE_PRIOR) / (self._expected + _EDGE_PRIOR), 1.0)


__all__ = ["AutoPolicy"]
