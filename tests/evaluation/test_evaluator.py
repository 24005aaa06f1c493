"""Running, stopping, going on and merging: the report is the one of an undisturbed run.

Catches: a prompt measured twice or lost, results of two configurations mixed, draws that depend on what ran before, a
plain run per drafter, a run that leaves traces.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dspark.evaluation.evaluator import check_drafters, part_of
from dspark.evaluation.report import build_report
from dspark.evaluation.results import ROUNDS_FILE, ResultsLog, merge_results, read_results, write_results
from dspark.evaluation.settings import EvaluationSettings
from tests.decoding.pair import prompt, target
from tests.evaluation.known import GREEDY, PROMPTS, configuration, oracle, run, without_times
from tests.scripted import Hostile
from tests.small import drafter as small_drafter

BOTH = EvaluationSettings(temperatures=(0.0, 1.0), max_new_tokens=10, speed=True)


def calls_of_generate(monkeypatch) -> list[dict]:
    """Arguments of every `generate` from now on."""
    oracle()  # its text comes from plain runs, too
    calls, real = [], target().generate

    def generate(ids, **kwargs):
        calls.append({"width": ids.shape[1], **kwargs})
        return real(ids, **kwargs)

    monkeypatch.setattr(target(), "generate", generate)
    return calls


def stop_after(count: int):
    def progress(done: int, total: int, result) -> None:
        if done == count:
            raise KeyboardInterrupt

    return progress


def test_interrupted_and_gone_on_equals_undisturbed(tmp_path: Path, monkeypatch) -> None:
    whole = build_report(run({"oracle": oracle()}, BOTH, tmp_path / "whole"))
    with pytest.raises(KeyboardInterrupt):
        run({"oracle": oracle()}, BOTH, tmp_path / "parts", progress=stop_after(2))
    with (tmp_path / "parts" / ROUNDS_FILE).open("a") as file:
        file.write('{"set_name":"first","index":1,"temp')  # the process died while writing
    calls = calls_of_generate(monkeypatch)
    gone_on = build_report(run({"oracle": oracle()}, BOTH, tmp_path / "parts"))
    assert without_times(gone_on) == without_times(whole)
    # Two runs of four prompt-temperatures that were missing, and two to warm up.
    assert len(calls) == 2 + 2 * 4
    assert len((tmp_path / "parts" / ROUNDS_FILE).read_text().splitlines()) == 1 + 6


def test_a_finished_evaluation_runs_nothing(tmp_path: Path, monkeypatch) -> None:
    first = run({"oracle": oracle()}, BOTH, tmp_path)
    calls = calls_of_generate(monkeypatch)
    assert build_report(run({"oracle": oracle()}, BOTH, tmp_path)) == build_report(first)
    assert calls == []


def test_the_report_is_read_back_as_it_was(tmp_path: Path) -> None:
    results = run({"oracle": oracle()}, BOTH, tmp_path)
    again = read_results(tmp_path / ROUNDS_FILE)
    assert build_report(again)["runs"] == build_report(results)["runs"]
    assert (again.date, again.configuration) == ("2026-01-02", results.configuration)


def test_two_halves_merge_into_the_whole(tmp_path: Path) -> None:
    whole = build_report(run({"oracle": oracle()}, BOTH, tmp_path / "whole"))
    halves = [tmp_path / "one", tmp_path / "two"]
    for part, folder in enumerate(halves, start=1):
        run({"oracle": oracle()}, BOTH, folder, part=(part, 2))
    merged = merge_results(halves[::-1])
    assert without_times(build_report(merged)) == without_times(whole)
    write_results(merged, tmp_path / "merged")
    assert build_report(read_results(tmp_path / "merged" / ROUNDS_FILE)) == build_report(merged)
    with pytest.raises(ValueError, match="holds results already"):
        write_results(merged, tmp_path / "merged")


def test_parts_are_every_nth_prompt_with_its_place() -> None:
    sets = {"a": [prompt(3, i) for i in range(5)]}
    assert [sorted(part_of(sets, i, 2)["a"]) for i in (1, 2)] == [[0, 2, 4], [1, 3]]
    with pytest.raises(ValueError, match="1 to 2"):
        part_of(sets, 3, 2)


def test_merging_refuses_what_would_count_twice_or_mix(tmp_path: Path) -> None:
    run({"oracle": oracle()}, GREEDY, tmp_path / "a")
    run({"oracle": oracle()}, GREEDY, tmp_path / "b", part=(1, 2))
    other = EvaluationSettings(temperatures=(0.0,), max_new_tokens=5, speed=False)
    run({"oracle": oracle()}, other, tmp_path / "c")
    with pytest.raises(ValueError, match=r"'first', prompt 0, temperature 0.0 .* count twice"):
        merge_results([tmp_path / "a", tmp_path / "b"])
    with pytest.raises(ValueError, match=r"settings.max_new_tokens: 24 there, 5 now"):
        merge_results([tmp_path / "a", tmp_path / "c"])
    with pytest.raises(FileNotFoundError):
        merge_results([tmp_path / "nothing"])
    with pytest.raises(ValueError, match="at least one folder"):
        merge_results([])


def test_another_configuration_is_refused_by_name(tmp_path: Path) -> None:
    run({"oracle": oracle()}, GREEDY, tmp_path)
    other = EvaluationSettings(temperatures=(0.0,), max_new_tokens=5, speed=False, seed=1)
    with pytest.raises(ValueError, match="another configuration") as error:
        ResultsLog(tmp_path, configuration({"oracle": oracle()}, other), "2026-01-02")
    assert "settings.max_new_tokens: 24 there, 5 now" in str(error.value)
    assert "settings.seed: 0 there, 1 now" in str(error.value)
    with pytest.raises(ValueError, match=r"drafters\.oracle\.weights_hash"):
        ResultsLog(tmp_path, configuration({"oracle": Hostile(target())}, GREEDY), "2026-01-02")
    relaid = oracle()
    relaid.config.rms_norm_eps = 1e-3  # same weights, another drafter
    with pytest.raises(ValueError, match=r"drafters\.oracle\.config_hash"):
        ResultsLog(tmp_path, configuration({"oracle": relaid}, GREEDY), "2026-01-02")
    with pytest.raises(ValueError, match=r"machine\.packed: False there, True now"):
        ResultsLog(tmp_path, configuration({"oracle": oracle()}, GREEDY, packed=True), "2026-01-02")


def test_another_prompt_under_the_same_name_is_refused(tmp_path: Path) -> None:
    run({"oracle": oracle()}, GREEDY, tmp_path)
    changed = {**PROMPTS, "second": [prompt(80, 9)]}
    with pytest.raises(ValueError, match=r"'second', prompt 0: .* another prompt"):
        run({"oracle": oracle()}, GREEDY, tmp_path, prompts=changed)


@pytest.mark.parametrize("line", ["no json", '{"set_name": "first"}', "[]", '{"runs": 3, "plain": null}'])
def test_a_foreign_line_is_named(tmp_path: Path, line: str) -> None:
    run({"oracle": oracle()}, GREEDY, tmp_path)
    path = tmp_path / ROUNDS_FILE
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ValueError, match=r"rounds.jsonl, line 5: not a line of `dspark eval`"):
        read_results(path)


def test_an_empty_file_starts_anew(tmp_path: Path) -> None:
    (tmp_path / ROUNDS_FILE).write_text('{"configuration":')
    run({"oracle": oracle()}, GREEDY, tmp_path)
    assert json.loads((tmp_path / ROUNDS_FILE).read_text().splitlines()[0])["date"] == "2026-01-02"
    (tmp_path / "empty").write_text("")
    with pytest.raises(ValueError, match="is empty"):
        read_results(tmp_path / "empty")


def test_drafters_share_plain_runs_and_keep_their_own_figures(monkeypatch) -> None:
    drafters = {"three": oracle((3,)), "none": oracle((0,))}
    calls = calls_of_generate(monkeypatch)
    settings = EvaluationSettings(temperatures=(0.0,), thresholds=(0.0, 0.5), max_new_tokens=13)
    report = build_report(run(drafters, settings))
    plain = [call for call in calls if "assistant_model" not in call]
    assert len(plain) == 3 + 1  # one to warm up
    assert len(calls) - len(plain) == 3 * 4 + 2
    three, _, none, _ = report["runs"]
    assert [entry["drafter"] for entry in report["runs"]] == ["three", "three", "none", "none"]
    assert three["all"]["accepted_length"] == 4.0
    assert none["all"]["accepted_length"] == 1.0
    times = [entry["all"]["speed"]["plain_ms_per_token"] for entry in report["runs"]]
    assert len(set(times)) == 1


def test_the_order_of_runs_turns_from_prompt_to_prompt(monkeypatch) -> None:
    calls = calls_of_generate(monkeypatch)
    settings = EvaluationSettings(temperatures=(0.0,), max_new_tokens=4)
    run({"oracle": oracle()}, settings)
    is_plain = ["assistant_model" not in call for call in calls]
    assert is_plain == [True, False, True, False, False, True, True, False]  # warm-up, prompts 0 and 1, prompt 0


def test_plain_and_drafted_runs_are_asked_for_the_same(monkeypatch) -> None:
    calls = calls_of_generate(monkeypatch)
    run({"oracle": oracle()}, EvaluationSettings(temperatures=(0.7,), max_new_tokens=4), prompts={"a": [prompt()]})
    plain, ours = calls[-2:]
    own = {"assistant_model", "speculation"}
    assert ours.keys() - plain.keys() == own
    assert {k: v for k, v in ours.items() if k not in {*own, "attention_mask"}} == {
        k: v for k, v in plain.items() if k != "attention_mask"
    }
    expected = {"do_sample": True, "temperature": 0.7, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
    assert expected.items() <= plain.items()


def test_sampled_runs_depend_on_nothing_that_ran_before() -> None:
    settings = EvaluationSettings(temperatures=(1.0,), max_new_tokens=10, speed=False)
    drafter = Hostile(target(), seed=2)
    configuration({}, settings)
    torch.manual_seed(11)
    before = torch.get_rng_state()
    whole = run({"hostile": drafter}, settings, prompts={"second": PROMPTS["second"]})
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(12)
    again = run({"hostile": Hostile(target(), seed=2)}, settings, prompts={"second": PROMPTS["second"]})
    assert without_times(build_report(whole)["runs"]) == without_times(build_report(again)["runs"])
    seeds = {settings.seed_of(name, i, t) for name in ("a", "b") for i in (0, 1) for t in (0.0, 1.0)}
    assert len(seeds) == 8


def test_drafters_that_cannot_be_evaluated_are_refused() -> None:
    swept = EvaluationSettings(thresholds=(0.0, 0.3))
    headless = Hostile(target(), enable_confidence_head=False)
    check_drafters(target(), {"headless": headless}, GREEDY)
    with pytest.raises(ValueError, match="'headless' has no confidence head"):
        check_drafters(target(), {"headless": headless}, swept)
    with pytest.raises(ValueError, match="cannot draft for"):
        check_drafters(target(), {"other": small_drafter()}, GREEDY)
    with pytest.raises(ValueError, match="no drafter"):
        check_drafters(target(), {}, GREEDY)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperatures": (-0.1,)}, "`temperatures` must be at least 0"),
        ({"temperatures": (float("nan"),)}, "`temperatures` must be at least 0"),
        ({"temperatures": (float("inf"),)}, "`temperatures` must be at least 0"),
        ({"temperatures": ()}, "at least one value"),
        ({"temperatures": (1.0, 1.0)}, "each value once"),
        ({"thresholds": (1.5,)}, "`thresholds` must be in"),
        ({"max_new_tokens": 0}, "`max_new_tokens` must be at least 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(fields, words) -> None:
    with pytest.raises(ValueError, match=words):
        EvaluationSettings(**fields)


def test_defaults_are_greedy_and_sampled_with_everything_verified() -> None:
    settings = EvaluationSettings()
    assert (settings.temperatures, settings.thresholds) == ((0.0, 1.0), (0.0,))
    assert (settings.max_new_tokens, settings.seed, settings.speed, settings.reliability) == (256, 0, True, True)
