"""The policies by name: `fixed`, `threshold`, `scheduled`, `async` and `auto`."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from .auto import AutoPolicy
from .exploration import Exploration, learn_round
from .policy import RoundObservation, RoundSpeed, VerifyPolicy
from .prefix import prefix_schedule, ranked_prefixes
from .survival import SurvivalRecord
from .throughput import ThroughputCurve

POLICIES = ("fixed", "threshold", "scheduled", "async", "auto")


class FixedPolicy(VerifyPolicy):
    """Verifies every draft. Lossless: nothing is looked at."""


class ThresholdPolicy(VerifyPolicy):
    """Ends a row before its first slot below a threshold. Lossless: a slot's scores see tokens before it only.

    Args:
        assistant_confidence_threshold: On a slot's own confidence, strict `<`; 0 is off.
        survival_threshold: On survival, likewise.
    """

    def __init__(self, assistant_confidence_threshold: float = 0.0, survival_threshold: float = 0.0) -> None:
        self.assistant_confidence_threshold = assistant_confidence_threshold
        self.survival_threshold = survival_threshold
        self.needs_confidence = bool(assistant_confidence_threshold or survival_threshold)

    def lengths(self, own: torch.Tensor | None, survival: torch.Tensor | None, limits: Sequence[int]) -> list[int]:
        """Slots before the first one below a threshold; all of them without scores."""
        if own is None or survival is None:
            return list(limits)
        passes = (own >= self.assistant_confidence_threshold) & (survival >= self.survival_threshold)
        return [min(pair) for pair in zip(limits, passes.int().cumprod(-1).sum(-1).tolist(), strict=True)]


class ScheduledPolicy(VerifyPolicy):
    """Algorithm 1 on a curve whose step time includes the drafting time of the round.

    Lossless by the early stop, see [`prefix_schedule`]. Without scores, survival is that of past rounds. Without a
    curve the first rounds run lengths that no score decides, and the rounds themselves teach it.

    Args:
        curve: Used as it is; None: learnt from the first round on.
    """

    needs_confidence = True
    curve: ThroughputCurve

    def __init__(self, curve: ThroughputCurve | None = None) -> None:
        self.curve = ThroughputCurve() if curve is None else curve
        self.record = SurvivalRecord()
        self._exploration = Exploration(self.curve) if curve is None else None

    def lengths(
        self,
        own: torch.Tensor | None,  # noqa: ARG002 - the interface of all policies
        survival: torch.Tensor | None,
        limits: Sequence[int],
    ) -> list[int]:
        """Drafts per row by Algorithm 1."""
        rows, most = len(limits), max(limits, default=0)
        if survival is not None:
            most = min(most, survival.shape[1])
        scores = survival
        if scores is None and not self.record.is_empty:
            scores = self.record.estimate(rows, most)
        width = None if self._exploration is None or most == 0 else self._exploration.width(rows, most)
        lengths = self._decide(scores, limits) if width is None else None
        if scores is not None:
            self._remember(scores)
        if lengths is None:
            return [min(limit, most if width is None else width) for limit in limits]
        return lengths

    def observe(self, observation: RoundObservation) -> None:
        """Learn the curve where none was given, and how far blocks get."""
        if self._exploration is not None:
            learn_round(self.curve, observation)
        if observation.slots and observation.survival is None:  # scores need no past rounds to stand in for them
            self.record.observe(observation.verified, observation.accepted, None)

    def _decide(self, scores: torch.Tensor | None, limits: Sequence[int]) -> list[int] | None:
        """Lengths; None: nothing to decide by."""
        if scores is None or not self.curve.contexts:
            return None
        return prefix_schedule(scores, self._speed(scores), limits=limits).tolist()

    def _speed(self, scores: torch.Tensor) -> RoundSpeed:
        return RoundSpeed(self.curve, scores.shape[0], self.curve.draft_seconds(*scores.shape))

    def _remember(self, scores: torch.Tensor) -> None:
        """Keep scores for later rounds, where a policy looks at them."""


class AsyncPolicy(ScheduledPolicy):
    """A budget from the scores of two rounds ago, shared out by this round's ranking (paper, section 5.2).

    The budget is what a search over the whole curve, cliffs included, would admit of those scores; when rows have
    ended since, it shrinks with them. Lossless: the budget was fixed before this round drew anything, and a
    candidate's rank depends on those before it only. The first two rounds are scheduled by Algorithm 1.
    """

    def __init__(self, curve: ThroughputCurve | None = None) -> None:
        super().__init__(curve)
        self._past: deque[torch.Tensor] = deque(maxlen=2)

    def _decide(self, scores: torch.Tensor | None, limits: Sequence[int]) -> list[int] | None:
        if scores is None or not self.curve.contexts or len(self._past) < 2:
            return super()._decide(scores, limits)
        past = self._past[0]
        budget = int(prefix_schedule(past, self._speed(past), early_stop=False).sum())
        capacity = round(budget * scores.shape[0] / past.shape[0])
        return ranked_prefixes(scores, capacity, limits).tolist()

    def _remember(self, scores: torch.Tensor) -> None:
        self._past.append(scores.detach().cpu())


def make_policy(
    name: str,
    *,
    assistant_confidence_threshold: float = 0.0,
    survival_threshold: float = 0.0,
    curve: ThroughputCurve | None = None,
) -> VerifyPolicy:
    """A policy by its name.

    Args:
        name: One of `POLICIES`.
        assistant_confidence_threshold: Of `threshold`.
        survival_threshold: Of `threshold`.
        curve: Of `scheduled`, `async` (used as it is) and `auto` (which learns on a copy); None: learnt from rounds.

    Raises:
        ValueError: Another name.
    """
    if name == "fixed":
        return FixedPolicy()
    if name == "threshold":
        return ThresholdPolicy(assistant_confidence_threshold, survival_threshold)
    if name == "auto":
        return AutoPolicy(curve)
    if name in ("scheduled", "async"):
        return (ScheduledPolicy if name == "scheduled" else AsyncPolicy)(curve)
    raise ValueError(f"The policy must be one of {', '.join(map(repr, POLICIES))}, got {name!r}.")


__all__ = [
    "POLICIES", "AsyncPolicy", "AutoPolicy", "FixedPolicy", "RoundObservation", "ScheduledPolicy", "ThresholdPolicy",
    "VerifyPolicy", "make_policy",
]  # fmt: skip
