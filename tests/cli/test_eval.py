"""`dspark eval` on tiny folders, end to end: files, JSON, going on, merging, and bad input before any work."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from dspark import DSparkDrafter
from dspark.cli import app, common
from tests.decoding.pair import new_target
from tests.decoding.words import tokenizer
from tests.evaluation.known import without_times
from tests.scripted import drafter_config

runner = CliRunner()


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal wide enough for unbroken headers, whatever width it had when the console was made."""
    monkeypatch.setattr(common.out, "_width", 200)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A tiny target, two drafters for it, one without confidence, one for another target, and prompt files."""
    root = tmp_path_factory.mktemp("eval")
    target = new_target()
    torch.manual_seed(1)
    drafters = {
        "one": DSparkDrafter(drafter_config(target)),
        "two": DSparkDrafter(drafter_config(target, block_size=3)),
        "headless": DSparkDrafter(drafter_config(target, enable_confidence_head=False)),
        "misfit": DSparkDrafter(drafter_config(target, hidden_size=48)),
    }
    with torch.no_grad():
        drafters["one"].confidence_head.proj.weight.normal_()
    for name, model in {"target": target, **drafters}.items():
        model.save_pretrained(root / name)
    tokenizer().save_pretrained(root / "target")
    (root / "words.jsonl").write_text('{"prompt": "abcabc"}\n{"turns": ["ladle"]}\n{"prompt": "fig"}\n')
    (root / "[red]odd.jsonl").write_text('{"prompt": "abc"}\n')
    (root / "broken.jsonl").write_text('{"prompt": "abc"}\n{"text": "abc"}\n')
    names = ["target", *drafters, "words.jsonl", "broken.jsonl"]
    return {"root": str(root), **{name.partition(".")[0]: str(root / name) for name in names}}


def command(folders: dict[str, str], *more: str, drafters: tuple[str, ...] = ("one",)) -> list[str]:
    named = [part for name in drafters for part in ("--drafter", folders[name])]
    base = ["eval", "--target", folders["target"], *named, "--prompts", folders["words"], "--max-new-tokens", "8"]
    return [*base, "--device", "cpu", *more]


def report_of(args: list[str]) -> dict:
    result = runner.invoke(app, [*args, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_end_to_end_writes_every_file(folders: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "evaluation"
    result = runner.invoke(app, command(folders, "--out", str(out), "--sweep"), env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    for text in (
        "accepted length",
        "Confidence threshold: one, greedy",
        "Where a round's time goes",
        "ids were compared",
        "AUC",
    ):
        assert text in result.output, text
    assert {path.name for path in out.iterdir()} == {
        "rounds.jsonl", "report.json", "report.md", "acceptance.png", "sweep.png", "reliability-one-t0.png",
        "reliability-one-t1.png",
    }  # fmt: skip
    assert all(path.stat().st_size > 200 for path in out.iterdir())
    report = json.loads((out / "report.json").read_text())
    assert report["prompts"] == {"words": 3}
    assert len(report["runs"]) == 2 * 10
    assert report["configuration"]["machine"]["packed"] is True
    assert folders["root"] not in (out / "rounds.jsonl").read_text() + (out / "report.md").read_text()
    greedy = [run["all"] for run in report["runs"] if run["temperature"] == 0]
    assert all(figures["ids"] == {"compared": 3, "equal": 3, "differing": []} for figures in greedy)
    assert greedy[0]["verified_tokens"] > greedy[9]["verified_tokens"]


def test_several_drafters_as_json(folders: dict[str, str]) -> None:
    args = command(folders, "--no-pack", "--temperature", "0", "--limit", "2", drafters=("one", "two"))
    report = report_of(args)
    assert [(run["drafter"], run["all"]["prompts"]) for run in report["runs"]] == [("one", 2), ("two", 2)]
    assert [len(run["all"]["positions"]) for run in report["runs"]] == [6, 3]
    assert report["configuration"]["machine"]["packed"] is False
    assert report["plots"] == []


def test_counts_only(folders: dict[str, str]) -> None:
    report = report_of(command(folders, "--no-speed", "--no-reliability", "--no-pack", "--temperature", "1"))
    (run,) = report["runs"]
    assert (run["all"]["speed"], run["all"]["ids"], report["reliability"]) == (None, None, [])
    assert run["all"]["rounds"] > 0


def test_names_that_look_like_markup_are_shown(folders: dict[str, str]) -> None:
    args = command(
        folders, "--prompts", f"{folders['root']}/[red]odd.jsonl", "--no-speed", "--no-pack", "--limit", "1"
    )
    result = runner.invoke(app, [*args, "--temperature", "0"], env={"COLUMNS": "200"})
    assert "[red]odd" in result.output
    broken = runner.invoke(app, command(folders, "--prompts", folders["broken"]))
    assert "(a list of texts)" in broken.output


def test_a_shipped_set_by_name(folders: dict[str, str]) -> None:
    args = ["eval", "--target", folders["target"], "--drafter", folders["one"], "--set", "mbpp", "--set", "gsm8k"]
    options = ["--limit", "1", "--max-new-tokens", "4", "--no-speed", "--temperature", "0", "--device", "cpu"]
    assert report_of([*args, *options])["prompts"] == {"gsm8k": 1, "mbpp": 1}


def test_going_on_and_merging(folders: dict[str, str], tmp_path: Path) -> None:
    quick = ("--no-speed", "--no-pack", "--temperature", "0", "--temperature", "1")
    whole = report_of(command(folders, *quick, "--out", str(tmp_path / "whole")))
    first = report_of(command(folders, *quick, "--out", str(tmp_path / "parts"), "--limit", "1"))
    assert first["prompts"] == {"words": 1}
    gone_on = report_of(command(folders, *quick, "--out", str(tmp_path / "parts")))
    assert without_times(gone_on["runs"]) == without_times(whole["runs"])
    for part in ("1/2", "2/2"):
        report_of(command(folders, *quick, "--part", part, "--out", str(tmp_path / part[0])))
    merge = ["eval", "--merge", str(tmp_path / "1"), "--merge", str(tmp_path / "2"), "--out", str(tmp_path / "merged")]
    assert without_times(report_of(merge)) == without_times(whole)
    assert (tmp_path / "merged" / "report.md").is_file()
    again = runner.invoke(app, merge)
    assert (again.exit_code, "holds results already" in " ".join(again.output.split())) == (2, True)
    other = runner.invoke(app, command(folders, *quick, "--seed", "4", "--out", str(tmp_path / "whole")))
    assert other.exit_code == 2
    assert "settings.seed: 0 there, 4 now" in " ".join(other.output.split())


def test_ids_that_differ_exit_with_1(folders: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dspark.evaluation.evaluator.first_difference", lambda a, b: 3)
    result = runner.invoke(app, command(folders, "--no-pack", "--temperature", "0"))
    assert result.exit_code == 1, result.output
    assert "Ids differ on some prompts" in " ".join(result.output.split())


def test_without_matplotlib_it_says_so(folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    quick = ("--no-speed", "--no-pack", "--temperature", "0", "--limit", "1")
    result = runner.invoke(app, command(folders, *quick, "--out", str(tmp_path)))
    assert result.exit_code == 0, result.output
    assert "pip install 'dspark[eval]'" in result.output
    assert (tmp_path / "report.md").is_file()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--temperature", "-1"], "`temperatures` must be at least 0"),
        (["--threshold", "2"], "`thresholds` must be in [0, 1]"),
        (["--prompts", "{broken}"], "broken.jsonl, line 2: expected a JSON object"),
        (["--prompts", "{root}/none.jsonl"], "none.jsonl"),
        (["--set", "gsm9k"], "No shipped prompt set 'gsm9k'"),
        (["--part", "3/2"], "`--part` is i/n"),
        (["--template-args", "3"], "--template-args must be a JSON object"),
        (["--template-args", "{{}}", "--raw", "--dtype", "int4"], "--dtype"),
        (["--template-args", '{{"thinking": true}}'], "needs a chat template"),
        (["--drafter", "{misfit}"], "cannot draft for"),
        (["--drafter", "{headless}", "--sweep"], "has no confidence head"),
        (["--drafter", "{target}"], "not a DSpark drafter"),
        (["--drafter", "{one}"], "Each drafter is named once"),
        (["--target", "no/such/folder/here"], "no/such/folder/here"),
    ],
)
def test_bad_input_exits_before_any_work(folders, monkeypatch, args: list[str], words: str) -> None:
    def never(*args, **kwargs):
        raise AssertionError("work was done")

    monkeypatch.setattr("dspark.cli.eval.evaluate", never)
    result = runner.invoke(app, command(folders, *[a.format(**folders) for a in args]))
    assert result.exit_code == 2, result.output
    assert words in " ".join(result.output.split())


def test_what_must_be_named(folders: dict[str, str]) -> None:
    for args, words in (
        (["eval"], "at least one drafter"),
        (["eval", "--drafter", folders["one"]], "Name the target with --target"),
        (["eval", "--merge", folders["root"]], "rounds.jsonl"),
    ):
        result = runner.invoke(app, args)
        assert result.exit_code == 2, result.output
        assert words in " ".join(result.output.split())


def test_help_describes_every_option() -> None:
    result = runner.invoke(app, ["eval", "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 0
    plain = re.sub(r"\x1b\[[0-9;]*m", "", result.output)
    options = {
        "--target",
        "--drafter",
        "--set",
        "--prompts",
        "--temperature",
        "--sweep",
        "--no-speed",
        "--merge",
        "--out",
    }
    assert options <= set(re.findall(r"--[a-z][a-z-]+", plain))
