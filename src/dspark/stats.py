"""`SpeculationStats`: what a `generate` call did, in integers and seconds, mergeable over calls and processes.

Field names of `to_dict` are those of vLLM's per-request `speculative_decoding` metrics where both have the figure.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from .round_trace import RowTrace

# The steps of a round; the same words are file names in `decoding/` and columns of reports.
STEPS = ("context", "draft", "propose", "confidence", "schedule", "verify", "commit")


@dataclass
class SpeculationStats:
    """Counts and times of one or more `generate` calls.

    A round is one verification pass of the target. Its accepted length is `accepted + 1`: the accepted drafts and the
    recovered or bonus token after them (paper footnote 3). A round that ends the text at one of its accepted drafts
    has no such token, and what it verified behind that draft, neither accepted nor rejected, is not counted (as the
    reference cuts its proposal length). `num_new_tokens` counts what was really emitted, so `tokens_per_pass` is
    exact.

    Attributes:
        drafted: Draft tokens proposed per round (0: the round had no draft).
        verified: Draft tokens verified per round.
        accepted: Draft tokens accepted per round.
        confidence_logits: Raw confidence logits of all drafts, per round with a draft; filled only where
            `SpeculationConfig.record_confidence` asks for it. See [`SpeculationStats.scored_rounds`].
        num_new_tokens: Tokens emitted, the first one (from the prompt's own pass) included.
        num_target_passes: Forward passes of the target, the prompt's pass included.
        num_rows: Rows decoded.
        step_seconds: Seconds per step of the round.
        model_seconds: Seconds inside the forward passes, under `"target"` and `"drafter"`; the prompt's pass is apart.
        prefill_seconds: Seconds of the prompt's pass, its context projection included.
        fallback_reason: Why the call decoded without drafts, with less context than it could or without a rule it was
            asked for; None if it did not.
        traces: Per row, what every round of it did; filled only where `SpeculationConfig.record_trace` asks for it.
    """

    drafted: list[int] = field(default_factory=list)
    verified: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    confidence_logits: list[list[float]] = field(default_factory=list)
    num_new_tokens: int = 0
    num_target_passes: int = 0
    num_rows: int = 0
    step_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STEPS, 0.0))
    model_seconds: dict[str, float] = field(default_factory=lambda: {"target": 0.0, "drafter": 0.0})
    prefill_seconds: float = 0.0
    fallback_reason: str | None = None
    traces: list[RowTrace] = field(default_factory=list)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Add the time of the body to step `name`."""
        start = time.perf_counter()
        yield
        self.step_seconds[name] += time.perf_counter() - start

    @contextmanager
    def forward(self, model: str) -> Iterator[None]:
        """Add the time of the body to the forward passes of `"target"` or `"drafter"`."""
        start = time.perf_counter()
        yield
        self.model_seconds[model] += time.perf_counter() - start

    def add_round(self, drafted: int, verified: int, accepted: int) -> None:
        """Record one row's part of a round."""
        self.drafted.append(drafted)
        self.verified.append(verified)
        self.accepted.append(accepted)

    def fall_back(self, reason: str) -> None:
        """Record why the call did less than it was asked to, once per reason."""
        if self.fallback_reason is None:
            self.fallback_reason = reason
        elif reason not in self.fallback_reason:
            self.fallback_reason += f"; {reason}"

    @property
    def num_rounds(self) -> int:
        """Row-rounds: a batch of B live rows adds B."""
        return len(self.accepted)

    @property
    def mean_acceptance_length(self) -> float:
        """tau: mean of `accepted + 1` over rounds; 1.0 without rounds."""
        return 1.0 + sum(self.accepted) / self.num_rounds if self.num_rounds else 1.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted over verified drafts, in [0, 1]; 0.0 when none was verified."""
        return sum(self.accepted) / sum(self.verified) if sum(self.verified) else 0.0

    @property
    def tokens_per_pass(self) -> float:
        """Emitted tokens over target passes per live row, the prompt's pass included: 1.0 is plain decoding."""
        passes = self.num_rounds + self.num_rows
        return self.num_new_tokens / passes if passes else 0.0

    @property
    def host_share(self) -> float:
        """Share of the rounds' time outside both models' forward passes, in [0, 1]."""
        total = sum(self.step_seconds.values())
        return max(0.0, total - sum(self.model_seconds.values())) / total if total else 0.0

    def survival_rate(self) -> list[float]:
        """Per position k: rounds that accepted more than k drafts over rounds that verified k."""
        reached = [sum(v > k for v in self.verified) for k in range(max(self.verified, default=0))]
        return [sum(a > k for a in self.accepted) / n for k, n in enumerate(reached)]

    def conditional_acceptance(self) -> list[float]:
        """Per position k: acceptance given that all before k were accepted and k was verified (paper Fig. 2)."""
        rates = []
        for k in range(max(self.verified, default=0)):
            reached = sum(v > k and a >= k for v, a in zip(self.verified, self.accepted, strict=True))
            rates.append(sum(a > k for a in self.accepted) / reached if reached else 0.0)
        return rates

    def scored_rounds(self) -> list[tuple[list[float], int, int]]:
        """Rounds with recorded confidence: raw logits of all drafts, how many were verified, how many accepted.

        Slots at or after `verified` say nothing about acceptance: they were cut, or the text ended before them.
        """
        rounds = [(v, a) for d, v, a in zip(self.drafted, self.verified, self.accepted, strict=True) if d]
        return [
            (logits, v, a)
            for logits, (v, a) in zip(self.confidence_logits, rounds, strict=bool(self.confidence_logits))
        ]

    def acceptance_histogram(self) -> list[int]:
        """Rounds by number of accepted drafts: entry a counts rounds that accepted a."""
        counts = [0] * (max(self.accepted, default=0) + 1)
        for accepted in self.accepted:
            counts[accepted] += 1
        return counts

    def merge(self, other: SpeculationStats) -> SpeculationStats:
        """Counts and times of both; neither is changed."""
        return SpeculationStats(
            drafted=self.drafted + other.drafted,
            verified=self.verified + other.verified,
            accepted=self.accepted + other.accepted,
            confidence_logits=self.confidence_logits + other.confidence_logits,
            num_new_tokens=self.num_new_tokens + other.num_new_tokens,
            num_target_passes=self.num_target_passes + other.num_target_passes,
            num_rows=self.num_rows + other.num_rows,
            step_seconds=_added(self.step_seconds, other.step_seconds),
            model_seconds=_added(self.model_seconds, other.model_seconds),
            prefill_seconds=self.prefill_seconds + other.prefill_seconds,
            fallback_reason=self.fallback_reason or other.fallback_reason,
            traces=self.traces + other.traces,
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-able summary; rates are fractions, times seconds."""
        return {
            "mean_acceptance_length": self.mean_acceptance_length,
            "draft_acceptance_rate": self.draft_acceptance_rate,
            "acceptance_histogram": self.acceptance_histogram(),
            "per_step_accepted": list(self.accepted),
            "per_step_drafted": list(self.verified),
            "num_drafts": self.num_rounds,
            "num_draft_tokens": sum(self.verified),
            "num_accepted_tokens": sum(self.accepted),
            "num_proposed_tokens": sum(self.drafted),
            "num_new_tokens": self.num_new_tokens,
            "num_target_passes": self.num_target_passes,
            "tokens_per_pass": self.tokens_per_pass,
            "survival_rate": self.survival_rate(),
            "conditional_acceptance": self.conditional_acceptance(),
            "step_seconds": dict(self.step_seconds),
            "model_seconds": dict(self.model_seconds),
            "prefill_seconds": self.prefill_seconds,
            "host_share": self.host_share,
            "fallback_reason": self.fallback_reason,
        }


def _added(a: dict[str, float], b: dict[str, float]) -> dict[str, float]:
    return {key: a.get(key, 0.0) + b.get(key, 0.0) for key in {**a, **b}}


__all__ = ["STEPS", "SpeculationStats"]
