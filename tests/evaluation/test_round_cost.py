"""What a round costs: every round is seen, parts lie where they were spent, figures follow from them by the formulas.

Catches: a part booked under another step, rounds of a clock that are not those of decoding, a speed-up of clocked
runs, figures of outputs that differ, a settings class that cuts drafts.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from dspark import SpeculationConfig
from dspark.decoding import loop
from dspark.evaluation import round_clock
from dspark.evaluation.round_clock import RoundClock, RoundSettings, RoundTimes, StepTimes
from dspark.evaluation.round_cost import BETWEEN, OutputsDifferError, RoundCost, measure_round
from dspark.stats import STEPS
from tests.decoding.pair import prompt
from tests.evaluation.test_replay import pair

PROMPTS = [prompt(length, seed) for seed, length in enumerate((6, 3))]
NEW = 20


def measured(**how: Any) -> RoundCost:
    target, drafter = pair()
    return measure_round(target, drafter, PROMPTS, max_new_tokens=NEW, repeats=1, **how)


@pytest.mark.parametrize("is_scored", [False, True])
def test_a_clock_sees_the_rounds_of_decoding(is_scored: bool) -> None:
    target, drafter = pair()
    call = {"max_new_tokens": NEW, "return_dict_in_generate": True, "assistant_model": drafter}
    usual = target.generate(PROMPTS[0], speculation=SpeculationConfig("fixed"), **call)
    clocked = target.generate(PROMPTS[0], speculation=RoundSettings(is_clocked=True, is_scored=is_scored), **call)
    assert torch.equal(clocked.sequences, usual.sequences)
    clock = clocked.speculation
    assert isinstance(clock, RoundClock)
    assert [times.drafted for times in clock.rounds] == usual.speculation.drafted
    assert [times.verified for times in clock.rounds] == usual.speculation.verified
    for name in STEPS:
        spent = sum(times.steps.get(name, 0.0) for times in clock.rounds)
        assert spent == pytest.approx(clock.step_seconds[name])
    for model in ("target", "drafter"):
        spent = sum(value for t in clock.rounds for (_, m), value in t.forwards.items() if m == model)
        assert spent == pytest.approx(clock.model_seconds[model])
    for times in clock.rounds:
        assert sum(times.steps.values()) <= times.seconds
        assert ("verify", "target") in times.forwards
        assert all(value <= times.steps[step] for (step, _), value in times.forwards.items())
    whole = [times for times in clock.rounds if times.drafted]
    assert all((("confidence", "drafter") in times.forwards) == is_scored for times in whole)


def test_time_is_booked_where_it_was_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    pause, commit = 0.02, loop.commit
    target, drafter = pair()
    draft_block = drafter.draft_block

    def slow_draft(*args: Any) -> Any:
        time.sleep(pause)
        return draft_block(*args)

    def slow_commit(*args: Any) -> None:
        time.sleep(2 * pause)
        commit(*args)

    monkeypatch.setattr(drafter, "draft_block", slow_draft)
    monkeypatch.setattr(loop, "commit", slow_commit)
    cost = measure_round(target, drafter, PROMPTS, max_new_tokens=NEW, repeats=1)
    lines = {line["name"]: line for line in cost.lines()}
    assert list(lines) == [*STEPS, BETWEEN]
    assert lines["draft"]["seconds"] >= pause
    assert [inside["name"] for inside in lines["draft"]["forwards"]] == ["drafter"]
    assert lines["draft"]["forwards"][0]["seconds"] >= pause
    assert lines["commit"]["seconds"] >= 2 * pause
    assert lines["commit"]["forwards"] == []
    assert cost.drafting >= pause
    assert cost.host_share * sum(times.seconds for times in cost.whole_rounds) >= 2 * pause * len(cost.whole_rounds)
    assert max(lines["schedule"]["seconds"], lines[BETWEEN]["seconds"]) < pause


def test_figures_by_hand() -> None:
    def times(scale: float, verified: int = 3) -> RoundTimes:
        parts = {"context": 1, "draft": 2, "propose": 3, "confidence": 1, "schedule": 1, "verify": 10, "commit": 1}
        inside = {("draft", "drafter"): 2.0, ("propose", "drafter"): 2.0, ("verify", "target"): 8.0}
        return RoundTimes(
            3, verified, 20 * scale, {name: scale * value for name, value in parts.items()},
            {place: scale * value for place, value in inside.items()},
        )  # fmt: skip

    cost = RoundCost(
        3, 1, [], {"plain": [30.0, 10.0, 20.0], "with drafts": [8.0, 10.0, 9.0]},
        {"plain": [10] * 3, "with drafts": [10] * 3}, [5.0, 7.0, 6.0], [times(1), times(3), times(2), times(50, 2)],
    )  # fmt: skip
    cost.stats.accepted, cost.stats.verified = [1, 2, 3], [3, 3, 3]
    assert len(cost.whole_rounds) == 3
    assert (cost.plain_step, cost.verification, cost.drafting) == (6.0, 16.0, 12.0)
    assert cost.accepted_length == 3.0
    assert cost.speedup == pytest.approx(20 / 9)
    assert cost.limit == pytest.approx(3 * 6 / 28)
    assert cost.efficiency == pytest.approx(20 / 9 / (18 / 28))
    assert cost.host_share == pytest.approx(1 - 12 / 20)
    lines = {line["name"]: line for line in cost.lines()}
    assert sum(line["share"] for line in lines.values()) == pytest.approx(1)
    assert lines["verify"]["seconds"] == 20.0
    assert lines["verify"]["share"] == pytest.approx(0.5)
    assert lines["verify"]["forwards"] == [{"name": "target", "seconds": 16.0, "share": pytest.approx(0.4)}]
    assert lines[BETWEEN]["seconds"] == pytest.approx(2.0)


def test_plain_steps_are_those_behind_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, 10.0, 11.0, 13.0])
    monkeypatch.setattr(round_clock.time, "perf_counter", lambda: next(ticks))
    streamer = StepTimes()
    for _ in range(4):  # the prompt and three tokens
        streamer.put(None)
    streamer.end()
    monkeypatch.undo()
    assert streamer.seconds == [1.0, 2.0]


def test_a_run_counts_tokens_and_leaves_clocked_calls_out_of_the_speed() -> None:
    cost = measured()
    assert cost.num_prompts == 2
    assert cost.new_tokens == {"plain": [2 * NEW], "with drafts": [2 * NEW]}
    assert len(cost.plain_steps) == 2 * (NEW - 1)
    assert cost.stats.num_new_tokens == 2 * NEW
    assert len(cost.rounds) == cost.stats.num_rounds  # each prompt once under the clock, once without
    assert 0 < cost.host_share < 1
    assert cost.efficiency == pytest.approx(cost.speedup / cost.limit)
    assert cost.to_dict()["whole_rounds"] == len(cost.whole_rounds)


def test_sampled_rounds_are_measured_after_greedy_texts_agree() -> None:
    cost = measured(temperature=1.0, is_scored=False)
    assert cost.new_tokens["with drafts"] == [2 * NEW]
    assert all(("confidence", "drafter") not in times.forwards for times in cost.rounds)


def lie(monkeypatch: pytest.MonkeyPatch, target: Any, length: int) -> None:
    """Texts with drafts of prompts of this length have another last token."""
    generate = type(target).generate

    def lying(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = generate(self, *args, **kwargs)
        if "assistant_model" in kwargs and kwargs["input_ids"].shape[1] == length:
            output.sequences[0, -1] += 1
        return output

    monkeypatch.setattr(type(target), "generate", lying)


def test_nothing_is_timed_where_texts_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = pair()
    lie(monkeypatch, target, 3)
    with pytest.raises(OutputsDifferError, match=f"prompt 2 at new token {NEW}"):
        measure_round(target, drafter, PROMPTS, max_new_tokens=NEW, repeats=1)


def test_in_bf16_a_prompt_whose_texts_differ_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = (model.to(torch.bfloat16) for model in pair())
    lie(monkeypatch, target, 3)
    cost = measure_round(target, drafter, PROMPTS, max_new_tokens=NEW, repeats=1)
    assert cost.differing == [(1, NEW - 1)]
    assert cost.num_prompts == 1
    assert cost.new_tokens["plain"] == [NEW]
    with pytest.raises(OutputsDifferError):
        measure_round(target, drafter, PROMPTS[1:], max_new_tokens=NEW, repeats=1)


def test_texts_too_short_for_a_whole_round_are_told_of() -> None:
    target, drafter = pair()
    with pytest.raises(ValueError, match="No round verified all 7 drafts"):
        measure_round(target, drafter, PROMPTS, max_new_tokens=4, repeats=1)
