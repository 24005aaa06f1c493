"""Figures of one trace: counts, how often confidence kept its word, verify lengths, time per step. Pure numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..round_trace import Kind, RoundTrace
from ..stats import STEPS
from .file import Trace

_BINS = 10


class Bin(NamedTuple):
    """Drafts whose predicted chance lay in one tenth of [0, 1].

    Attributes:
        num_drafts: How many.
        predicted: Mean of what was predicted.
        observed: Share that came true.
    """

    num_drafts: int
    predicted: float
    observed: float


class StepTime(NamedTuple):
    """Time of one step.

    Attributes:
        name: The step.
        milliseconds: Per round.
        share: Of all steps.
    """

    name: str
    milliseconds: float
    share: float


@dataclass(frozen=True)
class Figures:
    """What a trace sums up to.

    Attributes:
        num_tokens: New tokens.
        num_rounds: Rounds.
        num_drafted, num_verified, num_accepted: Drafts, over all rounds.
        accepted_length: Mean of accepted drafts and the target's own token per round; 1 without rounds.
        kinds: Tokens by kind.
        block: Drafts of the widest block.
        verified_lengths: Rounds by number of verified drafts, entry n counts those with n.
        accepted_lengths: Likewise by number of accepted drafts.
        confidence: Own confidence against acceptance, over drafts that were decided on; empty tenths are left out.
        survival: Survival against being accepted, over all drafts that were verified.
        steps: Times of the steps.
        seconds: Of all rounds.
    """

    num_tokens: int
    num_rounds: int
    num_drafted: int
    num_verified: int
    num_accepted: int
    accepted_length: float
    kinds: dict[Kind, int]
    block: int
    verified_lengths: list[int]
    accepted_lengths: list[int]
    confidence: list[Bin]
    survival: list[Bin]
    steps: list[StepTime]
    seconds: float


def figures(trace: Trace) -> Figures:
    """Figures of a trace."""
    rounds = trace.row.rounds
    kinds = trace.row.kinds()
    accepted = sum(entry.num_accepted for entry in rounds)
    block = max((len(entry.draft_ids) for entry in rounds), default=0)
    return Figures(
        num_tokens=len(kinds),
        num_rounds=len(rounds),
        num_drafted=sum(len(entry.draft_ids) for entry in rounds),
        num_verified=sum(entry.num_verified for entry in rounds),
        num_accepted=accepted,
        accepted_length=1 + accepted / len(rounds) if rounds else 1.0,
        kinds={kind: kinds.count(kind) for kind in ("first", "accepted", "recovered", "bonus")},
        block=block,
        verified_lengths=_counts([entry.num_verified for entry in rounds], block),
        accepted_lengths=_counts([entry.num_accepted for entry in rounds], block),
        confidence=_bins([pair for entry in rounds for pair in _own(entry)]),
        survival=_bins([pair for entry in rounds for pair in _survived(entry)]),
        steps=_times(rounds),
        seconds=sum(sum(entry.step_seconds.values()) for entry in rounds),
    )


def _counts(values: list[int], most: int) -> list[int]:
    return [values.count(n) for n in range(most + 1)] if values else []


def _own(entry: RoundTrace) -> list[tuple[float, bool]]:
    """Confidence of each draft that was decided on, which are those before and at a refusal, and whether it stayed."""
    decided = min(entry.num_accepted + 1, entry.num_verified)
    return [(p, k < entry.num_accepted) for k, p in enumerate((entry.confidence or [])[:decided])]


def _survived(entry: RoundTrace) -> list[tuple[float, bool]]:
    return [(p, k < entry.num_accepted) for k, p in enumerate((entry.survival or [])[: entry.num_verified])]


def _bins(pairs: list[tuple[float, bool]]) -> list[Bin]:
    bins = []
    for tenth in range(_BINS):
        inside = [pair for pair in pairs if min(int(pair[0] * _BINS), _BINS - 1) == tenth]
        if inside:
            count = len(inside)
            bins.append(Bin(count, sum(p for p, _ in inside) / count, sum(came for _, came in inside) / count))
    return bins


def _times(rounds: list[RoundTrace]) -> list[StepTime]:
    seconds = {name: sum(entry.step_seconds[name] for entry in rounds) for name in STEPS}
    total = sum(seconds.values())
    return [
        StepTime(name, 1000 * spent / max(len(rounds), 1), spent / total if total else 0.0)
        for name, spent in seconds.items()
    ]


__all__ = ["Bin", "Figures", "StepTime", "figures"]
