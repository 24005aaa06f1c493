"""What an evaluation runs: temperatures, confidence thresholds, lengths. Everything else is what it runs on."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..plain_decoding import plain_law
from ..speculation import SpeculationConfig

SWEEP = tuple(step / 10 for step in range(10))  # thresholds of the paper's Figure 5


@dataclass(frozen=True)
class EvaluationSettings:
    """Settings of an evaluation; the figures of two runs with other settings do not compare.

    Attributes:
        temperatures: 0 is greedy; above, the target's plain law at that temperature (no top-k, top-p or penalties).
        thresholds: `assistant_confidence_threshold` of the drafter's runs, each in [0, 1]; 0 verifies every draft.
        max_new_tokens: New tokens per prompt at most.
        seed: Of sampled runs.
        speed: Also run plain `generate`, for ids to compare with and for speed-ups.
        reliability: Keep the raw confidence of every round at the lowest threshold. Its cost shows in the step
            `confidence` of those runs.
    """

    temperatures: tuple[float, ...] = (0.0, 1.0)
    thresholds: tuple[float, ...] = (0.0,)
    max_new_tokens: int = 256
    seed: int = 0
    speed: bool = True
    reliability: bool = True

    def __post_init__(self) -> None:
        _check_numbers("temperatures", self.temperatures, most=math.inf, rule="at least 0 (0 is greedy)")
        _check_numbers("thresholds", self.thresholds, most=1.0, rule="in [0, 1] (0 verifies every draft)")
        if self.max_new_tokens < 1:
            raise ValueError(f"`max_new_tokens` must be at least 1, got {self.max_new_tokens}.")

    @property
    def lowest_threshold(self) -> float:
        """The threshold whose rounds reliability is read from: its cuts hide least."""
        return min(self.thresholds)

    def generate_arguments(self, temperature: float) -> dict[str, Any]:
        """Arguments of both `generate` calls at `temperature`; said outright, whatever the target's own defaults."""
        return {"max_new_tokens": self.max_new_tokens, **plain_law(temperature)}

    def speculation(self, threshold: float, *, has_confidence: bool) -> SpeculationConfig:
        """Settings of a drafter's run at `threshold`."""
        records = self.reliability and has_confidence and threshold == self.lowest_threshold
        return SpeculationConfig(assistant_confidence_threshold=threshold, record_confidence=records)

    def seed_of(self, set_name: str, index: int, temperature: float) -> int:
        """Seed of a prompt's runs: the same whatever ran before, so that an interrupted evaluation can go on."""
        return zlib.crc32(f"{self.seed}/{set_name}/{index}/{temperature}".encode())


def _check_numbers(name: str, values: Sequence[float], *, most: float, rule: str) -> None:
    if not values:
        raise ValueError(f"`{name}` must name at least one value.")
    for value in values:
        if not 0 <= value <= most or not math.isfinite(value):
            raise ValueError(f"`{name}` must be {rule}, got {value}.")
    if len(set(values)) < len(values):
        raise ValueError(f"`{name}` must name each value once, got {', '.join(map(str, values))}.")


__all__ = ["SWEEP", "EvaluationSettings"]
