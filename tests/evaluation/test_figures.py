"""Figures of runs whose counts are known, and of results written by hand.

Catches: tau without the bonus, slots behind a stop or a cut counted as verified, the three per-position rates mixed
up, a speed-up from prompts whose ids differ, an equality claimed of sampled texts.
"""

from __future__ import annotations

import json

import pytest
import torch

from dspark import SpeculationStats
from dspark.evaluation.figures import figures, means, pick, positions
from dspark.evaluation.report import build_report, has_unequal_ids
from dspark.evaluation.results import DraftedRun, PlainRun, PromptResult
from dspark.evaluation.settings import SWEEP, EvaluationSettings
from tests.decoding.pair import BLOCK, target
from tests.evaluation.known import GREEDY, NEW, PROMPTS, all_rounds, oracle, run
from tests.scripted import CYCLE, Oracle


def result(index: int, *, plain: float | None, ours: float, divergence: int | None = None, temperature: float = 0.0):
    """A prompt's result: ten tokens plain in `plain` seconds, ten with the drafter in `ours`."""
    compares = plain is not None and temperature == 0
    stats = SpeculationStats([7], [7], [2], num_new_tokens=10, num_target_passes=2, num_rows=1)
    drafted = DraftedRun("d", 0.0, ours, 10, divergence is None if compares else None, divergence, stats)
    return PromptResult("s", index, temperature, "", 5, None if plain is None else PlainRun(plain, 10), [drafted])


def of(results: list[PromptResult]) -> dict:
    pairs = pick(results, drafter="d", temperature=results[0].temperature, threshold=0.0)
    return figures("s", pairs)


@pytest.mark.parametrize("wrong", [(3,), (None,), (0,), CYCLE])
def test_figures_equal_the_known_counts(wrong) -> None:
    report = build_report(run({"oracle": oracle(wrong)}))
    known = all_rounds(wrong)
    (entry,) = report["runs"]
    found = entry["all"]
    accepted, verified = sum(a for _, _, a in known), sum(v for _, v, _ in known)
    assert found["rounds"] == len(known)
    assert found["drafted_tokens"] == sum(d for d, _, _ in known)
    assert (found["verified_tokens"], found["accepted_tokens"]) == (verified, accepted)
    assert found["accepted_length"] == (accepted + len(known)) / len(known)
    assert found["acceptance_rate"] == accepted / verified
    assert found["verified_per_round"] == verified / len(known)
    assert found["new_tokens"] == 3 * NEW == accepted + len(known) + 3
    assert found["target_passes"] == len(known) + 3
    assert found["tokens_per_pass"] == 3 * NEW / (len(known) + 3)
    for k, row in enumerate(found["positions"]):
        survived = sum(a > k for _, _, a in known)
        assert row["position"] == k + 1
        assert row["survival"] == survived / sum(v > k for _, v, _ in known)
        reached = sum(v > k and a >= k for _, v, a in known)
        assert (row["reached"], row["accepted"]) == (reached, survived)
        assert row["conditional"] == (survived / reached if reached else None)
    assert report["prompts"] == {"first": 2, "second": 1}


def test_three_right_drafts_a_round_by_hand() -> None:
    # 24 tokens: one from the prompt, then rounds of 4 while at least 4 are left (5 rounds), then 2 drafts and a token.
    report = build_report(run({"oracle": oracle((3,))}, prompts={"first": PROMPTS["first"][:1]}))
    (found,) = report["runs"][0]["sets"]
    assert (found["rounds"], found["accepted_tokens"]) == (6, 5 * 3 + 2)
    assert found["accepted_length"] == pytest.approx(23 / 6)
    assert [row["conditional"] for row in found["positions"]] == [1, 1, 1, 0, None, None, None]
    assert [row["verified"] for row in found["positions"]] == [6, 6, 5, 5, 5, 5, 4]


def test_a_position_nothing_reached_has_no_conditional_rate() -> None:
    table = positions(SpeculationStats([2, 2], [2, 1], [0, 1]))
    assert table[0] == {"position": 1, "verified": 2, "reached": 2, "accepted": 1, "conditional": 0.5, "survival": 0.5}
    assert table[1] == {"position": 2, "verified": 1, "reached": 0, "accepted": 0, "conditional": None, "survival": 0}


def test_without_prompts_there_are_no_figures() -> None:
    found = figures("s", [])
    assert (found["accepted_length"], found["acceptance_rate"], found["tokens_per_pass"]) == (None, None, None)
    assert (found["positions"], found["ids"], found["speed"]) == ([], None, None)
    assert means([found]) == {"accepted_length": None, "speedup": None, "sets_with_speedup": 0}


def test_prompts_whose_ids_differ_have_no_part_in_the_speedup() -> None:
    found = of([result(0, plain=4.0, ours=2.0), result(1, plain=9.0, ours=1.0, divergence=6)])
    assert found["ids"] == {"compared": 2, "equal": 1, "differing": [{"set": "s", "index": 1, "token": 6}]}
    assert found["speed"]["speedup"] == 2.0
    assert (found["speed"]["prompts"], found["speed"]["basis"]) == (1, "prompts with equal ids")
    assert (found["speed"]["plain_ms_per_token"], found["speed"]["speculative_ms_per_token"]) == (400.0, 200.0)


def test_no_speedup_where_all_ids_differ() -> None:
    found = of([result(0, plain=4.0, ours=2.0, divergence=0)])
    assert found["speed"]["speedup"] is None
    assert means([found])["speedup"] is None


def test_a_sampled_speedup_says_what_it_compares() -> None:
    found = of([result(0, plain=4.0, ours=2.0, temperature=1.0)])
    assert found["ids"] is None
    assert found["speed"]["speedup"] == 2.0
    assert "sampled" in found["speed"]["basis"]


def test_counts_only_have_no_speed() -> None:
    found = of([result(0, plain=None, ours=2.0)])
    assert (found["ids"], found["speed"]) == (None, None)


def test_means_weigh_sets_alike() -> None:
    fast, slow = of([result(0, plain=4.0, ours=1.0)]), of([result(i, plain=2.0, ours=1.0) for i in range(3)])
    assert means([fast, slow])["speedup"] == 3.0
    assert means([fast, slow, of([result(0, plain=None, ours=1.0)])])["sets_with_speedup"] == 2


def test_notes_say_what_equality_can_and_cannot_be() -> None:
    both = EvaluationSettings(temperatures=(0.0, 1.0), max_new_tokens=4)
    report = build_report(run({"oracle": oracle()}, both))
    greedy, sampled = report["runs"]
    assert greedy["all"]["ids"] == {"compared": 3, "equal": 3, "differing": []}
    assert sampled["all"]["ids"] is None
    assert greedy["all"]["speed"]["speedup"] > 0
    assert sampled["all"]["speed"]["speedup"] > 0
    text = " ".join(report["notes"])
    assert "ids were compared" in text
    assert "cannot show" in text
    assert not has_unequal_ids(report)
    counts = build_report(run({"oracle": oracle()}))
    assert counts["runs"][0]["all"]["speed"] is None
    assert "Counts only" in " ".join(counts["notes"])


def test_a_drafter_that_changes_the_text_is_reported(monkeypatch) -> None:
    settings = EvaluationSettings(temperatures=(0.0,), max_new_tokens=6)
    model, real = target(), target().generate

    def broken(ids, **kwargs):
        output = real(ids, **kwargs)
        if kwargs.get("assistant_model") is not None:
            output.sequences[0, ids.shape[1] + 2] += 1
        return output

    monkeypatch.setattr(model, "generate", broken)
    report = build_report(run({"oracle": oracle()}, settings))
    assert has_unequal_ids(report)
    assert report["runs"][0]["all"]["speed"]["speedup"] is None
    assert any("first 0 from new token 2" in note for note in report["notes"])


def test_a_sweep_verifies_less_and_keeps_the_text() -> None:
    settings = EvaluationSettings(temperatures=(0.0,), thresholds=SWEEP, max_new_tokens=NEW, speed=True)
    report = build_report(run({"oracle": oracle((None,))}, settings))
    assert [entry["threshold"] for entry in report["runs"]] == list(SWEEP)
    per_round = [entry["all"]["verified_per_round"] for entry in report["runs"]]
    assert per_round[0] > per_round[5] > per_round[9]
    assert per_round == sorted(per_round, reverse=True)
    assert all(entry["all"]["ids"]["equal"] == 3 for entry in report["runs"])
    assert all(entry["all"]["acceptance_rate"] in (1.0, None) for entry in report["runs"])
    assert report["runs"][0]["all"]["accepted_length"] > report["runs"][9]["all"]["accepted_length"]


def test_reliability_judges_raw_and_calibrated_survival() -> None:
    fitted = [2.0, 0.5, 1.0, 3.0, 1.0, 1.0, 1.0]
    drafters = {"plain": oracle(CYCLE), "fitted": oracle(CYCLE, confidence_temperatures=fitted)}
    results = run(drafters)
    report = build_report(results)
    plain, calibrated = report["reliability"]
    assert (plain["calibrated"], calibrated["confidence_temperatures"]) == (None, fitted)
    stats = SpeculationStats()
    for entry in results.in_order():
        stats = stats.merge(entry.runs[1].stats)
    for k in range(BLOCK):
        decided = [(logits, a > k) for logits, v, a in stats.scored_rounds() if v > k]
        for name, temperatures in (("raw", [1.0] * BLOCK), ("calibrated", fitted)):
            row = calibrated[name][k]
            scores = [
                float(
                    torch.tensor([x / t for x, t in zip(logits, temperatures, strict=True)]).sigmoid()[: k + 1].prod()
                )
                for logits, _ in decided
            ]
            assert (row["position"], row["num_rounds"]) == (k + 1, len(decided))
            assert row["predicted"] == pytest.approx(sum(scores) / len(scores), abs=1e-4)
            assert row["observed"] == pytest.approx(sum(event for _, event in decided) / len(decided))
            assert sum(b["count"] for b in row["bins"]) == len(decided)
    assert calibrated["raw"] != calibrated["calibrated"]
    json.dumps(report, allow_nan=False)


def test_calibration_is_that_of_the_decoding_temperature() -> None:
    rows = {"0": [2.0] * BLOCK, "1": [0.5] * BLOCK}
    settings = EvaluationSettings(temperatures=(0.0, 0.9), max_new_tokens=8, speed=False)
    report = build_report(run({"oracle": oracle(confidence_temperatures=rows)}, settings))
    assert [entry["confidence_temperatures"] for entry in report["reliability"]] == [rows["0"], rows["1"]]


def test_confidence_is_recorded_at_the_lowest_threshold_only() -> None:
    settings = EvaluationSettings(temperatures=(0.0,), thresholds=(0.0, 0.5), max_new_tokens=8, speed=False)
    results = run({"oracle": oracle()}, settings)
    lowest, other = results.in_order()[0].runs
    assert lowest.stats.confidence_logits
    assert not other.stats.confidence_logits
    silent = EvaluationSettings(temperatures=(0.0,), max_new_tokens=8, speed=False, reliability=False)
    assert build_report(run({"oracle": oracle()}, silent))["reliability"] == []
    drafter = Oracle(target(), [[0] * 120], wrong=(0,), enable_confidence_head=False).eval()
    headless = build_report(run({"headless": drafter}))
    assert (headless["reliability"], headless["runs"][0]["all"]["fallbacks"]) == ([], [])


def test_logits_that_are_not_finite_cost_their_diagram_only() -> None:
    results = run({"oracle": oracle()}, GREEDY)
    results.in_order()[0].runs[0].stats.confidence_logits[0][0] = float("nan")
    report = build_report(results)
    assert report["reliability"][0]["raw"] == []
    assert any("must be finite" in note for note in report["notes"])
