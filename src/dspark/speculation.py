"""`SpeculationConfig`: how a drafter is used, as opposed to what it is. Settable on the drafter and per call."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal, get_args

Policy = Literal["fixed", "threshold"]


@dataclass(frozen=True)
class SpeculationConfig:
    """Settings of the decoding loop.

    Attributes:
        policy: `"fixed"` verifies every drafted token, whatever the thresholds; `"threshold"` ends a block by its
            confidence (the two thresholds below). `"threshold"` with both thresholds at 0 is `"fixed"`.
        num_assistant_tokens: Most drafts verified per round, at least 1; None: all the block gives. The block itself
            always runs at full width, since its attention is bidirectional.
        assistant_confidence_threshold: The block ends before the first slot whose own confidence is below this
            (strictly; the reference's rule), in [0, 1]. 0 is off.
        survival_threshold: The block ends before the first slot whose survival (running product of calibrated
            confidences) is below this, in [0, 1]. 0 is off.
        record_confidence: Keep each round's raw confidence logits in the statistics (for calibration and reliability
            diagrams); needs a drafter with a confidence head.
    """

    policy: Policy = "threshold"
    num_assistant_tokens: int | None = None
    assistant_confidence_threshold: float = 0.0
    survival_threshold: float = 0.0
    record_confidence: bool = False

    def __post_init__(self) -> None:
        if self.policy not in get_args(Policy):
            raise ValueError(f"`policy` must be one of {', '.join(map(repr, get_args(Policy)))}, got {self.policy!r}.")
        most = self.num_assistant_tokens
        if most is not None and (isinstance(most, bool) or not isinstance(most, Integral) or most < 1):
            raise ValueError(
                f"`num_assistant_tokens` must be an integer of at least 1 or None, got {most!r}. To decode without "
                "drafts, leave `assistant_model` out."
            )
        for field in ("assistant_confidence_threshold", "survival_threshold"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) <= 1:
                raise ValueError(f"`{field}` must be a number in [0, 1], got {value!r}. 0 turns it off.")


__all__ = ["Policy", "SpeculationConfig"]
