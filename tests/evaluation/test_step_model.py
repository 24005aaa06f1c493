"""Predicted seconds of a batch are those of its real rounds at the curve's costs.

Catches: prompts' passes counted on one side, texts drawn instead of those that ran, rounds of the simulation that are
not the loop's.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from dspark.decoding import schedule
from dspark.evaluation import batches
from dspark.evaluation.step_model import StepCheck, check_step_model
from dspark.scheduling import ThroughputCurve
from dspark.stats import SpeculationStats
from tests.decoding.pair import prompt
from tests.evaluation.test_replay import pair

PROMPTS = [prompt(length, seed) for seed, length in enumerate((6, 3, 9))]
PREFILL = 50.0
DRAFT = 0.25


def cost(tokens: int) -> float:
    return 1.0 + 0.125 * tokens


def known_curve(block: int) -> ThroughputCurve:
    curve = ThroughputCurve()
    for tokens in range(1, 40):
        curve.learn(tokens, cost(tokens))
    for rows in (1, 2, 3):
        curve.learn_draft(rows, block, DRAFT)
    return curve


@pytest.fixture
def _said_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls take what their rounds cost by the curve, and `PREFILL`."""
    told: list[float] = []
    committed = schedule.RoundWatch.committed

    def watched(self: Any) -> None:
        drafting = DRAFT if self.num_drafts else 0.0
        told.append(drafting + cost(len(self.drafts) + sum(map(len, self.drafts))))
        committed(self)

    def timed(call: Any) -> tuple[Any, float]:
        told.clear()
        output = call()
        stats: SpeculationStats | None = getattr(output, "speculation", None)
        if stats is not None:
            stats.prefill_seconds = PREFILL
        return output, PREFILL + sum(told)

    monkeypatch.setattr(schedule.RoundWatch, "committed", watched)
    monkeypatch.setattr(batches, "timed", timed)


@pytest.mark.usefixtures("_said_costs")
@pytest.mark.parametrize("block", [3, 7])
def test_a_world_that_costs_what_the_curve_says_is_predicted_exactly(block: int) -> None:
    target, drafter = pair(block_size=block)
    checks = check_step_model(target, drafter, PROMPTS, known_curve(block), [1, 2, 3], max_new_tokens=20, repeats=2)
    assert [check.batch_size for check in checks] == [1, 2, 3]
    for check in checks:
        assert check.predicted_rounds == check.measured_rounds
        assert check.ratio == pytest.approx(1.0)
    assert checks[0].measured_rounds < 19, "some drafts are accepted"


def test_with_the_real_clock() -> None:
    target, drafter = pair()
    (check,) = check_step_model(target, drafter, PROMPTS, known_curve(7), [2], max_new_tokens=8, repeats=1)
    assert 0 < check.measured < check.predicted


def test_without_a_curve_the_pair_is_profiled_beside_the_batches() -> None:
    """A target that sleeps 20 ms and 2 ms a token is predicted by what was measured, not by anything given."""
    target, drafter = pair()

    def slowed(_module: Any, args: Any, call: dict[str, Any]) -> None:
        time.sleep(0.02 + 0.002 * call["input_ids"].numel())

    handle = target.register_forward_pre_hook(slowed, with_kwargs=True)
    try:
        checks = check_step_model(target, drafter, PROMPTS, None, [1, 3], max_new_tokens=24, repeats=1)
    finally:
        handle.remove()
    for check in checks:
        assert check.measured > 0.02 * check.measured_rounds / check.batch_size
        assert 0.75 < check.ratio < 1.3


def test_a_text_without_rounds_is_refused() -> None:
    target, drafter = pair()
    target.generation_config.eos_token_id = int(target.generate(PROMPTS[0], max_new_tokens=1)[0, -1])
    with pytest.raises(ValueError, match="answered by a single token"):
        check_step_model(target, drafter, PROMPTS, known_curve(7), [2], max_new_tokens=8, repeats=1)


def test_ratio() -> None:
    assert StepCheck(1, 2.0, 4.0, 3, 3).ratio == 0.5
