"""Clocks of single rounds and single plain steps, for `dspark bench round`.

The loop's own statistics add up over a call, and on an accelerator they see only how long work took to hand over. A
`RoundClock` keeps every round apart and waits for the accelerator at the end of each part, so that a part's time is
its work's. Waiting takes away what runs side by side: whole calls are timed without it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ..scheduling import VerifyPolicy
from ..speculation import Policy, SpeculationConfig
from ..stats import STEPS, SpeculationStats
from .compare import finish_queue


@dataclass
class RoundTimes:
    """One round of one row.

    Attributes:
        drafted, verified: Draft tokens of the round.
        seconds: From the end of the round before (of the first: from its first step) to its own.
        steps: Seconds per step that ran.
        forwards: Seconds inside `"target"`'s or `"drafter"`'s forward passes, by step and model.
    """

    drafted: int = 0
    verified: int = 0
    seconds: float = 0.0
    steps: dict[str, float] = field(default_factory=dict)
    forwards: dict[tuple[str, str], float] = field(default_factory=dict)


@dataclass
class RoundClock(SpeculationStats):
    """Statistics of a single row that also keep the times of every round.

    Attributes:
        rounds: Finished rounds, in order.
    """

    rounds: list[RoundTimes] = field(default_factory=list)
    _now: RoundTimes = field(default_factory=RoundTimes)
    _step: str = ""
    _start: float | None = None

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Add the time of the body to step `name` of this round; its last step ends the round."""
        self._start = time.perf_counter() if self._start is None else self._start
        self._step, before = name, self.step_seconds[name]
        with super().step(name):
            yield
            finish_queue()
        self._now.steps[name] = self.step_seconds[name] - before
        if name == STEPS[-1]:
            end = time.perf_counter()
            self._now.seconds, self._start = end - self._start, end
            self.rounds.append(self._now)
            self._now = RoundTimes()

    @contextmanager
    def forward(self, model: str) -> Iterator[None]:
        """Add the time of the body to the forward passes of `"target"` or `"drafter"` in this step."""
        before, key = self.model_seconds[model], (self._step, model)
        with super().forward(model):
            yield
            finish_queue()
        self._now.forwards[key] = self._now.forwards.get(key, 0.0) + self.model_seconds[model] - before

    def add_round(self, drafted: int, verified: int, accepted: int) -> None:
        """Record the row's part of a round."""
        super().add_round(drafted, verified, accepted)
        self._now.drafted, self._now.verified = drafted, verified


class _Whole(VerifyPolicy):
    """Whole blocks, every draft verified; scores are computed if wanted, as scheduling needs them, and not used."""

    def __init__(self, *, is_scored: bool) -> None:
        self.needs_confidence = is_scored


@dataclass(frozen=True)
class RoundSettings(SpeculationConfig):
    """Whole blocks, every draft verified.

    Attributes:
        is_scored: Drafts are scored, as policies that cut by confidence need it.
        is_clocked: Statistics are a `RoundClock`.
    """

    policy: Policy = "fixed"
    is_scored: bool = False
    is_clocked: bool = False

    def new_policy(self) -> VerifyPolicy:
        """One that cuts nothing."""
        return _Whole(is_scored=self.is_scored)

    def new_stats(self, num_rows: int) -> SpeculationStats:
        """A clock, where that is wanted."""
        return RoundClock(num_rows=num_rows) if self.is_clocked else super().new_stats(num_rows)


class StepTimes:
    """A streamer that notes when plain `generate` hands over each token."""

    def __init__(self) -> None:
        self._times: list[float] = []

    def put(self, value: Any) -> None:  # noqa: ARG002 - whatever it is, it is there now
        """The prompt, then token by token."""
        finish_queue()
        self._times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing to do."""

    @property
    def seconds(self) -> list[float]:
        """Of the steps behind the prompt's pass: one per token but the first."""
        return [after - before for before, after in pairwise(self._times[1:])]


__all__ = ["RoundClock", "RoundSettings", "RoundTimes", "StepTimes"]
