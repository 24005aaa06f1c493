"""Statistics of a call: hand-made counts give hand-computed figures, and real calls keep the books.

Catches: the three acceptance figures mixed up, drafts behind a stop counted as rejected, a merge that loses or
doubles, a summary that is no JSON.
"""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch

from dspark import SpeculationStats
from dspark.stats import STEPS
from tests.decoding.pair import BLOCK, distinct, hostile, oracle, plain, prompt, target
from tests.scripted import CYCLE

PROMPT = 6


def stats_of(*rounds: tuple[int, int, int], **fields: Any) -> SpeculationStats:
    stats = SpeculationStats(**fields)
    for drafted, verified, accepted in rounds:
        stats.add_round(drafted, verified, accepted)
    return stats


# Four rounds of a block of three: all right, wrong at once, a block cut to one draft, one without drafts.
FOUR = ((3, 3, 3), (3, 3, 0), (3, 1, 1), (0, 0, 0))


def test_figures_of_four_rounds() -> None:
    stats = stats_of(*FOUR, num_new_tokens=9, num_target_passes=5, num_rows=1)
    assert stats.num_rounds == 4
    assert stats.mean_acceptance_length == 1 + 4 / 4
    assert stats.draft_acceptance_rate == 4 / 7
    assert stats.acceptance_histogram() == [2, 1, 0, 1]
    assert stats.tokens_per_pass == 9 / 5


def test_three_acceptance_figures_of_one_position_differ() -> None:
    # Position 0 was verified three times and accepted twice; position 1 was verified twice and accepted once, the
    # other time because the round had already failed before it.
    stats = stats_of(*FOUR)
    assert stats.survival_rate() == [2 / 3, 1 / 2, 1 / 2]
    assert stats.conditional_acceptance() == [2 / 3, 1.0, 1.0]
    # vLLM's figure divides by all rounds that drafted.
    histogram, drafts = stats.acceptance_histogram(), sum(d > 0 for d in stats.drafted)
    assert [sum(histogram[k + 1 :]) / drafts for k in range(3)] == [2 / 3, 1 / 3, 1 / 3]


def test_figures_without_rounds_or_drafts() -> None:
    empty = SpeculationStats()
    assert (empty.mean_acceptance_length, empty.draft_acceptance_rate, empty.tokens_per_pass) == (1.0, 0.0, 0.0)
    assert (empty.survival_rate(), empty.conditional_acceptance(), empty.acceptance_histogram()) == ([], [], [0])
    assert empty.host_share == 0.0
    undrafted = stats_of((0, 0, 0), (3, 0, 0))
    assert undrafted.survival_rate() == []
    assert undrafted.mean_acceptance_length == 1.0
    unreached = stats_of((3, 3, 0))
    assert unreached.conditional_acceptance() == [0.0, 0.0, 0.0]


def test_merging_is_associative_and_changes_nothing() -> None:
    # Binary fractions, so that sums of seconds are exact.
    parts = [
        stats_of(FOUR[0], num_new_tokens=5, num_target_passes=2, num_rows=1, prefill_seconds=0.5),
        stats_of(FOUR[1], FOUR[2], num_new_tokens=4, num_target_passes=3, num_rows=2, fallback_reason="why"),
        stats_of(FOUR[3], num_new_tokens=2, num_target_passes=2, num_rows=1, fallback_reason="other"),
    ]
    for i, part in enumerate(parts):
        part.step_seconds["verify"] = 0.25 * (i + 1)
        part.model_seconds["target"] = 0.125 * (i + 1)
    before = [part.to_dict() for part in parts]
    a, b, c = parts
    left, right = a.merge(b).merge(c), a.merge(b.merge(c))
    assert left == right
    assert (left.drafted, left.verified, left.accepted) == tuple(list(t) for t in zip(*FOUR, strict=True))
    assert (left.num_new_tokens, left.num_target_passes, left.num_rows) == (11, 7, 4)
    assert (left.step_seconds["verify"], left.model_seconds["target"], left.prefill_seconds) == (1.5, 0.75, 0.5)
    assert left.fallback_reason == "why"
    assert [part.to_dict() for part in parts] == before
    assert SpeculationStats().merge(a) == a.merge(SpeculationStats()) == a


def test_reasons_of_a_fallback_are_collected_once() -> None:
    stats = SpeculationStats()
    for reason in ("no head", "short context", "no head"):
        stats.fall_back(reason)
    assert stats.fallback_reason == "no head; short context"


def test_the_summary_is_json_under_the_names_serving_frameworks_use() -> None:
    summary = json.loads(json.dumps(stats_of(*FOUR, num_new_tokens=9, num_target_passes=5, num_rows=1).to_dict()))
    assert summary["mean_acceptance_length"] == 2.0
    assert summary["acceptance_histogram"] == [2, 1, 0, 1]
    assert summary["per_step_accepted"] == [3, 0, 1, 0]
    assert summary["per_step_drafted"] == [3, 3, 1, 0]
    assert (summary["num_drafts"], summary["num_draft_tokens"], summary["num_accepted_tokens"]) == (4, 7, 4)
    assert summary["draft_acceptance_rate"] == pytest.approx(4 / 7)
    assert set(summary["step_seconds"]) == set(STEPS)


def test_step_times_add_up() -> None:
    stats = SpeculationStats()
    for _ in range(2):
        with stats.step("verify"):
            time.sleep(0.02)
            with stats.forward("target"):
                time.sleep(0.01)
    assert stats.step_seconds["verify"] >= 0.06
    assert 0.02 <= stats.model_seconds["target"] < stats.step_seconds["verify"]
    assert 0 < stats.host_share < 1
    assert sum(stats.step_seconds.values()) == stats.step_seconds["verify"]


# --- books of real calls ---------------------------------------------------------------------------------------------


def books_balance(stats: SpeculationStats, *, inside: int = 0) -> bool:
    """Every token is a row's first, an accepted draft, or a round's own; `inside`: rounds a stop left without one."""
    return stats.num_new_tokens == stats.num_rows + sum(stats.accepted) + stats.num_rounds - inside


@pytest.mark.parametrize("extra", [{}, {"repetition_penalty": 1.0001}], ids=["at once", "slot by slot"])
def test_tokens_are_accounted_for(extra: dict[str, Any]) -> None:
    ids, _ = distinct()
    for drafter in (oracle((None,)), oracle(CYCLE), hostile()):
        for count in (1, 2, 8, 9, 30):
            out = plain(target(), ids, max_new_tokens=count, assistant_model=drafter, **extra)
            stats = drafter.last_stats
            assert stats.num_new_tokens == out.shape[1] - PROMPT == count
            assert books_balance(stats)
            assert stats.num_target_passes == 1 + stats.num_rounds
            assert all(a <= v <= d for d, v, a in zip(stats.drafted, stats.verified, stats.accepted, strict=True))


@pytest.mark.parametrize("extra", [{}, {"repetition_penalty": 1.0001}], ids=["at once", "slot by slot"])
@pytest.mark.parametrize("place", range(1, BLOCK + 3))
def test_drafts_behind_a_stop_are_not_counted(place: int, extra: dict[str, Any]) -> None:
    # A criterion the drafter knows nothing of stops at new token `place`; all drafts are right.
    ids, _ = distinct()
    drafter = oracle((None,))

    def stop(input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> bool:
        return input_ids.shape[1] == PROMPT + place + 1

    plain(target(), ids, max_new_tokens=30, stopping_criteria=[stop], assistant_model=drafter, **extra)
    stats = drafter.last_stats
    accepted = [BLOCK] * (place // (BLOCK + 1)) + [place % (BLOCK + 1)] * (place % (BLOCK + 1) > 0)
    assert stats.accepted == stats.verified == accepted
    assert stats.draft_acceptance_rate == 1.0
    assert set(stats.survival_rate()) == {1.0}
    assert books_balance(stats, inside=int(place % (BLOCK + 1) > 0))


def test_books_of_a_batch() -> None:
    batch = torch.cat([prompt(seed=seed) for seed in range(3)])
    drafter = hostile()
    plain(target(), batch, max_new_tokens=15, assistant_model=drafter)
    stats = drafter.last_stats
    assert stats.num_rows == 3
    assert stats.num_new_tokens == 45
    assert books_balance(stats)
    assert stats.num_rounds >= stats.num_target_passes - 1


def test_times_are_measured_under_the_names_of_the_steps() -> None:
    ids, _ = distinct()
    drafter = oracle()
    plain(target(), ids, max_new_tokens=30, assistant_model=drafter)
    stats = drafter.last_stats
    assert tuple(stats.step_seconds) == STEPS
    assert all(stats.step_seconds[name] > 0 for name in STEPS)
    assert all(seconds > 0 for seconds in stats.model_seconds.values())
    assert stats.prefill_seconds > 0
    assert 0 < stats.host_share < 1
