"""Figures of a set of prompts, from counts and seconds alone.

Definitions: accepted length tau counts the bonus (paper, footnote 3); conditional acceptance of a position is over the
rounds that had accepted all before it (Figure 2); survival is over all rounds that verified it. A speed-up is a ratio
of seconds per new token, plain over speculative, of runs taken next to each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any

from ..stats import SpeculationStats
from .results import DraftedRun, PlainRun, PromptResult

Pair = tuple[PromptResult, DraftedRun]


def pick(results: Iterable[PromptResult], *, drafter: str, temperature: float, threshold: float) -> list[Pair]:
    """The runs of one drafter at one temperature and threshold, with the prompts they belong to."""
    return [
        (result, run)
        for result in results
        if result.temperature == temperature
        for run in result.runs
        if run.drafter == drafter and run.threshold == threshold
    ]


def merged_stats(pairs: Sequence[Pair]) -> SpeculationStats:
    """Counts and times of all runs."""
    return reduce(SpeculationStats.merge, (run.stats for _, run in pairs), SpeculationStats())


def figures(name: str, pairs: Sequence[Pair]) -> dict[str, Any]:
    """All figures of `pairs`, JSON-able; what there is nothing to divide for is None.

    Args:
        name: Of the set.
        pairs: Runs of one drafter at one temperature and threshold.
    """
    stats = merged_stats(pairs)
    rounds, verified = stats.num_rounds, sum(stats.verified)
    return {
        "name": name,
        "prompts": len(pairs),
        "prompt_tokens": sum(result.num_prompt_tokens for result, _ in pairs),
        "new_tokens": stats.num_new_tokens,
        "target_passes": stats.num_target_passes,
        "tokens_per_pass": stats.tokens_per_pass if rounds else None,
        "rounds": rounds,
        "drafted_tokens": sum(stats.drafted),
        "verified_tokens": verified,
        "accepted_tokens": sum(stats.accepted),
        "accepted_length": _ratio(sum(stats.accepted) + rounds, rounds),
        "acceptance_rate": _ratio(sum(stats.accepted), verified),
        "verified_per_round": _ratio(verified, rounds),
        "positions": positions(stats),
        "ids": _ids(pairs),
        "speed": _speed(pairs),
        "step_seconds": stats.step_seconds,
        "model_seconds": stats.model_seconds,
        "prefill_seconds": stats.prefill_seconds,
        "host_share": stats.host_share,
        "fallbacks": sorted({run.stats.fallback_reason for _, run in pairs if run.stats.fallback_reason}),
    }


def positions(stats: SpeculationStats) -> list[dict[str, Any]]:
    """Counts and rates per draft position, `position` 1-based as in the paper.

    `verified` counts rounds that verified the position, `reached` those of them that had accepted all before it,
    `accepted` those that accepted it too.
    """
    table = []
    for k in range(max(stats.verified, default=0)):
        rounds = [a for v, a in zip(stats.verified, stats.accepted, strict=True) if v > k]
        reached, accepted = sum(a >= k for a in rounds), sum(a > k for a in rounds)
        table.append(
            {
                "position": k + 1,
                "verified": len(rounds),
                "reached": reached,
                "accepted": accepted,
                "conditional": _ratio(accepted, reached),
                "survival": _ratio(accepted, len(rounds)),
            }
        )
    return table


def means(sets: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Unweighted means over sets; of speed-ups over those sets that have one, or None."""
    lengths = [s["accepted_length"] for s in sets if s["accepted_length"] is not None]
    speedups = [s["speed"]["speedup"] for s in sets if s["speed"] and s["speed"]["speedup"] is not None]
    return {
        "accepted_length": _ratio(sum(lengths), len(lengths)),
        "speedup": _ratio(sum(speedups), len(speedups)),
        "sets_with_speedup": len(speedups),
    }


def _ids(pairs: Sequence[Pair]) -> dict[str, Any] | None:
    """How many runs have the ids of plain `generate`; None where ids cannot be compared."""
    compared = [(result, run) for result, run in pairs if run.is_equal is not None]
    if not compared:
        return None
    differing = [
        {"set": result.set_name, "index": result.index, "token": run.divergence}
        for result, run in compared
        if not run.is_equal
    ]
    return {"compared": len(compared), "equal": len(compared) - len(differing), "differing": differing}


def _speed(pairs: Sequence[Pair]) -> dict[str, Any] | None:
    """Speed against plain `generate`; prompts whose greedy ids differ from it are left out."""
    timed = [(result.plain, run) for result, run in pairs if result.plain is not None]
    if not timed:
        return None
    counted = [(plain, run) for plain, run in timed if run.is_equal is not False]
    is_sampled = any(run.is_equal is None for _, run in counted)
    plain, ours = _per_token([p for p, _ in counted]), _per_token([run for _, run in counted])
    return {
        "speedup": None if plain is None or not ours else plain / ours,
        "prompts": len(counted),
        "basis": "seconds per token of sampled texts" if is_sampled else "prompts with equal ids",
        "plain_ms_per_token": None if plain is None else 1000 * plain,
        "speculative_ms_per_token": None if ours is None else 1000 * ours,
    }


def _per_token(runs: Sequence[PlainRun] | Sequence[DraftedRun]) -> float | None:
    return _ratio(sum(run.seconds for run in runs), sum(run.num_new_tokens for run in runs))


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


__all__ = ["figures", "means", "merged_stats", "pick", "positions"]
