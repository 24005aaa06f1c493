"""`SpeculationConfig`: how a drafter is used, as opposed to what it is. Settable on the drafter and per call."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from numbers import Integral, Real
from typing import Any, Literal, get_args

from .ops.markov_step import MAX_CANDIDATES
from .scheduling import ThroughputCurve, VerifyPolicy, make_policy
from .stats import SpeculationStats

Policy = Literal["fixed", "threshold", "scheduled", "async", "auto"]
# Rule, largest value and what to do without one, of the fields that are counts or None.
_COUNTS = {
    "num_assistant_tokens": ("at least 1", inf, "To decode without drafts, leave `assistant_model` out."),
    "candidate_top_k": (
        f"1 to {MAX_CANDIDATES}", MAX_CANDIDATES, "None lets every column see the sequential head's bias.",
    ),
    "context_window": ("at least 1", inf, "None lets the drafter see the whole context."),
}  # fmt: skip


@dataclass(frozen=True)
class SpeculationConfig:
    """Settings of the decoding loop.

    Attributes:
        policy: How many drafts are verified. `"fixed"`: all of them, whatever the thresholds. `"threshold"`: up to
            the first below a confidence threshold (the two below); with both at 0 it is `"fixed"`. `"scheduled"`: what
            pays by the step curve, over all rows of the batch (paper Algorithm 1). `"async"`: as many as paid by the
            scores of two rounds ago, the likeliest first (paper 5.2). `"auto"`: as scheduled, on a curve that the
            rounds correct, and it also drafts fewer slots or none while that pays more; its rounds depend on measured
            times, so sampled texts of one seed differ from run to run (their law does not).
        num_assistant_tokens: Most drafts verified per round, at least 1; None: all the block gives. Only `"auto"`
            runs narrower blocks; attention within a block goes both ways, so they give other drafts.
        assistant_confidence_threshold: The block ends before the first slot whose own confidence is below this
            (strictly; the reference's rule), in [0, 1]. 0 is off.
        survival_threshold: The block ends before the first slot whose survival (running product of calibrated
            confidences) is below this, in [0, 1]. 0 is off.
        record_confidence: Keep each round's raw confidence logits in the statistics (for calibration and reliability
            diagrams); needs a drafter with a confidence head.
        record_trace: Keep what every round drafted, verified and emitted, token by token, in the statistics
            (`traces`); see `dspark trace`.
        throughput_curve: Step times that `"scheduled"`, `"async"` and `"auto"` decide by (see `dspark profile`);
            None: learnt from the rounds. What is learnt (by `"auto"` always: it starts from a copy of the curve) is
            kept with the drafter for later calls on the same target. The other policies do not look at it.
        candidate_top_k: Only so many columns of each slot, those of the largest base logits, see the sequential head's
            bias and may be drafted, 1 to 1024; the head reads that many rows of its table instead of all. Drafts are
            drawn from the restricted law and judged by it. None: all columns. Unused without a sequential head.
        context_window: Rows of context, the last ones, that the drafter attends to, at least 1; it keeps keys and
            values of about so many, and of a longer prompt only these are projected. The text stays the target's; what
            the drafter no longer sees may cost acceptance. None: all.
    """

    policy: Policy = "threshold"
    num_assistant_tokens: int | None = None
    assistant_confidence_threshold: float = 0.0
    survival_threshold: float = 0.0
    record_confidence: bool = False
    record_trace: bool = False
    throughput_curve: ThroughputCurve | None = None
    candidate_top_k: int | None = None
    context_window: int | None = None

    def __post_init__(self) -> None:
        if self.policy not in get_args(Policy):
            raise ValueError(f"`policy` must be one of {', '.join(map(repr, get_args(Policy)))}, got {self.policy!r}.")
        if self.throughput_curve is not None and not isinstance(self.throughput_curve, ThroughputCurve):
            raise ValueError(
                f"`throughput_curve` must be a ThroughputCurve, got {type(self.throughput_curve).__name__}. Read a "
                "file of `dspark profile` with `ThroughputCurve.load(path)`."
            )
        if self.throughput_curve is not None and not self.throughput_curve.contexts:
            raise ValueError("`throughput_curve` is empty. Leave it out to learn one from the rounds.")
        for field in ("record_confidence", "record_trace"):
            if not isinstance(getattr(self, field), bool):
                raise ValueError(f"`{field}` must be True or False, got {getattr(self, field)!r}.")
        for field, (rule, largest, none) in _COUNTS.items():
            value = getattr(self, field)
            if value is not None and not _is_count(value, largest):
                raise ValueError(f"`{field}` must be an integer of {rule} or None, got {value!r}. {none}")
        for field in ("assistant_confidence_threshold", "survival_threshold"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) <= 1:
                raise ValueError(f"`{field}` must be a number in [0, 1], got {value!r}. 0 turns it off.")

    @property
    def is_learnt(self) -> bool:
        """Whether the policy learns from its rounds what later calls on the same pair go on from."""
        return self.policy == "auto" or (self.policy in ("scheduled", "async") and self.throughput_curve is None)

    def new_policy(self) -> VerifyPolicy:
        """A policy that knows of no round yet."""
        return make_policy(
            self.policy,
            assistant_confidence_threshold=self.assistant_confidence_threshold,
            survival_threshold=self.survival_threshold,
            curve=self.throughput_curve,
        )

    def new_stats(self, num_rows: int) -> SpeculationStats:
        """Statistics of a call of `num_rows` rows, empty; settings that measure more have their own kind."""
        return SpeculationStats(num_rows=num_rows)


def _is_count(value: Any, largest: float) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and 1 <= int(value) <= largest


__all__ = ["Policy", "SpeculationConfig"]
