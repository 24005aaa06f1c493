"""Figures of a trace against counts by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dspark.round_trace import Candidate, Rejection, RoundTrace, RowTrace
from dspark.stats import STEPS
from dspark.trace.charts import bars, points, strip
from dspark.trace.figures import Bin, figures
from tests.trace import made

CANDIDATE = [Candidate(1, 0.5)]


def entry(verified: int, accepted: int, *, drafted: int = 3, own: bool = True) -> RoundTrace:
    drafts = [1] * drafted
    return RoundTrace(
        anchor=0, draft_ids=drafts, base_probs=[0.5] * drafted, head_probs=[0.5] * drafted, draft_probs=None,
        confidence=[0.95, 0.55, 0.15][:drafted], survival=[0.95, 0.52, 0.08][:drafted],
        num_verified=verified, num_accepted=accepted, emitted_ids=drafts[:accepted] + [1] * own,
        emitted_probs=[0.5] * (accepted + own),
        rejection=Rejection(0.1, CANDIDATE, CANDIDATE, CANDIDATE) if accepted < verified else None,
        step_seconds=dict.fromkeys(STEPS, 0.0) | {"verify": 0.003, "draft": 0.001},
        model_seconds={"target": 0.002, "drafter": 0.001},
    )  # fmt: skip


ROUNDS = [entry(3, 3), entry(3, 1), entry(2, 0), entry(0, 0), entry(1, 1, own=False)]


def test_counts() -> None:
    found = figures(replace(made.trace(), row=RowTrace(1, 0.5, ROUNDS)))
    assert (found.num_rounds, found.num_drafted, found.num_verified, found.num_accepted) == (5, 15, 9, 5)
    assert found.num_tokens == 1 + 4 + 2 + 1 + 1 + 1
    assert found.kinds == {"first": 1, "accepted": 5, "recovered": 2, "bonus": 2}
    assert found.accepted_length == 2.0
    assert found.verified_lengths == [1, 1, 1, 2]
    assert found.accepted_lengths == [2, 2, 0, 1]
    assert found.seconds == pytest.approx(0.02)
    steps = {step.name: step for step in found.steps}
    assert (steps["verify"].milliseconds, steps["verify"].share) == pytest.approx((3.0, 0.75))
    assert list(steps) == list(STEPS)


def test_confidence_counts_what_was_decided_and_survival_what_was_verified() -> None:
    found = figures(replace(made.trace(), row=RowTrace(1, 0.5, ROUNDS)))
    # First slots: kept in rounds 1, 2 and 5 of 4; second: decided in 1 and 2, kept in 1; third: decided in 1 alone.
    assert found.confidence == [Bin(1, 0.15, 1.0), Bin(2, 0.55, 0.5), Bin(4, 0.95, 0.75)]
    # Survival of second slots also counts in round 3, where the first was refused; of third ones in round 2.
    assert found.survival == [Bin(2, 0.08, 0.5), Bin(3, pytest.approx(0.52), pytest.approx(1 / 3)), Bin(4, 0.95, 0.75)]


def test_a_certain_prediction_lies_in_the_last_tenth() -> None:
    sure = replace(entry(1, 1, drafted=1), confidence=[1.0], survival=[1.0])
    assert figures(replace(made.trace(), row=RowTrace(1, 0.5, [sure]))).survival == [Bin(1, 1.0, 1.0)]


def test_a_text_of_one_token() -> None:
    found = figures(made.trace(1))
    assert (found.num_tokens, found.num_rounds, found.accepted_length) == (1, 0, 1.0)
    assert found.verified_lengths == found.survival == []
    assert all(step.share == step.milliseconds == 0 for step in found.steps)


def test_drawings_are_plain_numbers() -> None:
    drawn = strip(ROUNDS, 3)
    assert (drawn["width"], drawn["height"]) == (25, 3)
    assert drawn["accepted"] == "M0 3v-3h4v3zM5 3v-1h4v1zM20 3v-1h4v1z"
    assert bars([0, 1, 4]) == [0.0, 25.0, 100.0]
    assert bars([0, 0]) == [0.0, 0.0]
    assert points([Bin(4, 0.9, 1.0), Bin(1, 0.1, 0.0)]) == [{"x": 90, "y": 0, "r": 5}, {"x": 10, "y": 100, "r": 3.25}]
