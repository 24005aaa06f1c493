"""The report's files: Markdown from the JSON alone, plots that are there, nothing private in it.

Catches: a table that needs more than the JSON, a plot that is empty or needs a display, a local path or a missing
setting in a report, a crash without matplotlib.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dspark.evaluation.markdown import report_markdown
from dspark.evaluation.plots import write_plots
from dspark.evaluation.prompt_sets import Prompting, chat_ids, gather_prompts, read_prompts, sample_prompts
from dspark.evaluation.provenance import differences, public_name
from dspark.evaluation.report import build_report
from dspark.evaluation.report_files import write_report
from dspark.evaluation.rows import NONE, facts, number, percent, set_rows
from dspark.evaluation.settings import EvaluationSettings
from tests.decoding.words import tokenizer
from tests.evaluation.known import GREEDY, configuration, oracle, run
from tests.scripted import CYCLE


@pytest.fixture(scope="module")
def report() -> dict:
    """Two drafters, two temperatures, five thresholds, one drafter calibrated."""
    settings = EvaluationSettings(thresholds=(0.0, 0.2, 0.4, 0.6, 0.8), max_new_tokens=12)
    fitted = oracle((0, 2), confidence_temperatures=[2.0] * 7)
    return build_report(run({"right|left": oracle(CYCLE), "fitted": fitted}, settings))


def test_markdown_is_made_from_the_json_alone(report: dict, tmp_path: Path) -> None:
    assert write_report(report, tmp_path) is None
    read = json.loads((tmp_path / "report.json").read_text())
    text = report_markdown(read)
    assert text == (tmp_path / "report.md").read_text()
    assert text == report_markdown(report)
    for title in ("# Evaluation", "## Per set", "## Acceptance per draft position", "## Confidence threshold",
                  "## Reliability", "## Where a round's time goes", "## Taken with", "## Plots"):  # fmt: skip
        assert title in text, title
    for name in read["plots"]:
        assert f"]({name})" in text
    assert number(read["runs"][0]["all"]["accepted_length"]) in text
    assert percent(read["reliability"][0]["raw"][0]["ece"]) in text


def test_every_markdown_table_is_square(report: dict) -> None:
    blocks = [block for block in report_markdown(report).split("\n\n") if block.startswith("|")]
    assert len(blocks) > 10
    for block in blocks:
        widths = {line.replace("\\|", "").count("|") for line in block.strip().split("\n")}
        assert len(widths) == 1, block


def test_headings_go_down_inside_a_card(report: dict) -> None:
    lines = report_markdown(report, heading_level=2).split("\n")
    assert {line.split(" ")[0] for line in lines if line.startswith("#")} == {"##", "###"}


def test_a_report_without_anything_renders() -> None:
    report = build_report(run({"oracle": oracle()}, GREEDY, prompts={"first": []}))
    text = report_markdown(report)
    assert "## Per set" not in text
    assert "## Taken with" in text
    assert set_rows(report["runs"][0]) == []


def test_a_figure_of_nothing_is_a_dash() -> None:
    assert number(None) == percent(None) == NONE
    assert (number(1.234), percent(0.1234)) == ("1.23", "12.3%")


def test_plots_are_written_and_not_empty(report: dict, tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    names = write_plots(report, tmp_path)
    assert names == [
        "acceptance.png", "sweep.png", "reliability-right-left-t0.png", "reliability-right-left-t1.png",
        "reliability-fitted-t0.png", "reliability-fitted-t1.png",
    ]  # fmt: skip
    for name in names:
        pixels = image.imread(tmp_path / name)[..., :3]
        assert pixels.shape[0] > 300, name
        assert 0.005 < (pixels.min(axis=-1) < 0.5).mean() < 0.5, name  # ink on paper
        assert abs(pixels[..., 0] - pixels[..., 2]).max() < 0.01, name  # greys: readable in black and white


def test_without_matplotlib_everything_else_is_written(report: dict, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    problem = write_report(report, tmp_path)
    assert "dspark[eval]" in problem
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.json", "report.md"]
    assert json.loads((tmp_path / "report.json").read_text())["plots"] == []


def test_importing_the_evaluation_needs_no_matplotlib() -> None:
    code = "import sys; import dspark.cli, dspark.evaluation.plots; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_a_report_names_what_it_was_taken_with(report: dict) -> None:
    shown = facts(report)
    assert shown["date"] == "2026-01-02"
    for name in ("target", "target hashes", "drafter fitted", "chat template", "thinking", "temperatures", "device",
                 "dtype", "threads", "packed", "versions"):  # fmt: skip
        assert shown[name], name
    assert (shown["dtype"], shown["packed"], shown["chat template"]) == ("float32", "no", "none")
    assert "block 7" in shown["drafter fitted"]
    assert "calibrated" in shown["drafter fitted"]
    assert "torch" in shown["versions"]
    assert report["prompts"] == {"first": 2, "second": 1}


def test_prompting_is_noted() -> None:
    own = tokenizer()
    template = own.chat_template
    try:
        own.chat_template = "{% if enable_thinking %}l{% endif %}{{ messages[0].content }}"
        default = configuration({}, GREEDY)["prompting"]
        off = configuration({}, GREEDY, prompting=Prompting(template_args={"enable_thinking": False}))["prompting"]
        raw = configuration({}, GREEDY, prompting=Prompting(raw=True))["prompting"]
        on = chat_ids(own, "abc", Prompting(template_args={"enable_thinking": True}))
        assert on.tolist() != chat_ids(own, "abc").tolist() == chat_ids(own, "abc", Prompting(raw=True)).tolist()
    finally:
        own.chat_template = template
    assert default["thinking"] == "the template's default"
    assert off["thinking"] == "enable_thinking=False"
    assert (raw["thinking"], raw["chat_template_hash"]) == ("no template", None)
    assert default["chat_template_hash"] == off["chat_template_hash"] is not None


def test_names_are_public(tmp_path: Path) -> None:
    (tmp_path / "my-drafter").mkdir()
    assert public_name(tmp_path / "my-drafter") == "my-drafter"
    assert public_name("org/name") == "org/name"
    assert str(tmp_path) not in json.dumps(configuration({"oracle": oracle()}, GREEDY))


def test_differences_name_the_entry() -> None:
    assert differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}, "d": 0}) == [
        "a.c: 2 there, 3 now", "d: None there, 0 now",
    ]  # fmt: skip
    assert differences({"a": [1]}, {"a": [1]}) == []


def test_prompt_sets_come_from_names_and_files(tmp_path: Path) -> None:
    own = tmp_path / "own.jsonl"
    own.write_text(
        '{"prompt": "one\u2028line"}\n\n{"turns": ["two", "never"]}\n{"prompt": "three"}\n', encoding="utf-8"
    )
    assert gather_prompts([], [own], limit=2) == {"own": ["one\u2028line", "two"]}
    assert list(gather_prompts(["mbpp"], [own], limit=1)) == ["mbpp", "own"]
    assert len(gather_prompts([], [], limit=1)) == 6
    assert len(sample_prompts("gsm8k")) == 10
    with pytest.raises(ValueError, match="No shipped prompt set 'gsm9k'"):
        gather_prompts(["gsm9k"], [])
    with pytest.raises(ValueError, match="'own' is given twice"):
        gather_prompts([], [own, own])
    (tmp_path / "none.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="has no prompt"):
        gather_prompts([], [tmp_path / "none.jsonl"])
    with pytest.raises(FileNotFoundError):
        gather_prompts([], [tmp_path / "missing.jsonl"])


@pytest.mark.parametrize(
    "line",
    ["no json", "[]", "3", '"text"', "{}", '{"turns": []}', '{"turns": [5]}', '{"prompt": ""}', '{"prompt": 7}'],
)
def test_a_malformed_prompt_names_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n\n{line}\n')
    with pytest.raises(ValueError, match=r"bad.jsonl, line 3: expected a JSON object"):
        read_prompts(path)
    assert read_prompts(path, limit=1) == ["fine"]
