"""A card says what the files say: every figure is in a report, what no file says is not there.

Catches: figures typed by hand, a report of another drafter, a damaged report shown as if it were whole, a shipped card
that no longer is what the command writes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard

from dspark import DSparkDrafter
from dspark.cards import TAGS, build_card, read_notes
from dspark.cards.figures import without_empty_columns
from dspark.publishing import code_files
from tests.cards import reports

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "model_cards" / "smollm2-135m-instruct-dspark"


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Path, Path]:
    return reports.pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def evaluation(pair, tmp_path_factory) -> Path:
    return reports.evaluated(*pair, tmp_path_factory.mktemp("evaluation"), "--temperature", "0")


@pytest.fixture(scope="module")
def demo(pair, tmp_path_factory) -> Path:
    return reports.demonstrated(*pair, tmp_path_factory.mktemp("demo") / "demo.json")


def test_the_shipped_card_is_what_the_command_writes() -> None:
    folder = SHIPPED.relative_to(ROOT)
    written = build_card(
        SHIPPED, reports=[SHIPPED / "report.json", SHIPPED / "evaluation.json"], notes=SHIPPED / "notes.md",
        repo_id=folder.as_posix(),
    )  # fmt: skip
    assert (SHIPPED / "README.md").read_text(encoding="utf-8") == written


def test_the_shipped_folder_holds_the_package_s_own_code() -> None:
    for path, content in code_files().items():
        assert (SHIPPED / path).read_bytes() == content


def test_metadata(pair) -> None:
    data = ModelCard(build_card(pair[1], license="mit", tags=["tiny"])).data
    assert data.base_model == "some/target"
    assert data.library_name == "dspark"
    assert data.license == "mit"
    assert data.tags == [*TAGS, "tiny"]


def test_figures_are_those_of_the_reports(pair, evaluation, demo) -> None:
    card = build_card(pair[1], reports=[demo, evaluation])
    told, found = json.loads(demo.read_text()), json.loads((evaluation / "report.json").read_text())
    for one in told["sets"]:
        speeds = f"{one['speedup']:.2f} | {one['speedup_over_stock']:.2f}"
        assert f"| {one['name']} | {one['mean_acceptance_length']:.2f} | {speeds} |" in card
    mean = sum(one["mean_acceptance_length"] for one in told["sets"]) / len(told["sets"])
    assert f"| mean | {mean:.2f} |" in card
    run = found["runs"][0]["all"]
    assert f"| gsm8k | 1 | {run['new_tokens']} | {run['accepted_length']:.2f} |" in card
    assert told["date"] in card
    assert "Ids equal plain `generate` on all 6 prompts" in card


def test_what_no_file_says_is_left_out(pair) -> None:
    card = build_card(pair[1])
    assert "## Figures" not in card
    assert "## Data and recipe" not in card
    assert "## Licence" not in card
    assert not re.search(r"\d\.\d\d", card.replace("2607.05147", ""))


def test_a_sweep_and_the_reliability_are_shown(pair, tmp_path) -> None:
    folder = reports.evaluated(*pair, tmp_path / "sweep", "--temperature", 0, "--threshold", 0, "--threshold", 0.5)
    card = build_card(pair[1], reports=[folder / "report.json"])
    assert "**Confidence threshold** (greedy)" in card
    assert "| 0.5 |" in card
    assert "**Survival as the confidence predicts it" in card


def test_columns_without_a_value_go() -> None:
    assert without_empty_columns(("set", "x", "y"), [["a", "–", "1"], ["b", "", "–"]]) == (
        ["set", "y"], [["a", "1"], ["b", "–"]],
    )  # fmt: skip


def test_counts_alone_show_no_speed(pair, tmp_path) -> None:
    folder = reports.evaluated(*pair, tmp_path / "counts", "--temperature", 0, "--no-speed")
    card = build_card(pair[1], reports=[folder])
    assert "x plain" not in card
    assert "ids equal" not in card
    assert "accepted length" in card


def test_other_weights_are_refused_by_name(pair, evaluation, demo, tmp_path) -> None:
    other = DSparkDrafter.from_pretrained(pair[1])
    other.fc.weight.data.add_(0.1)
    other.save_pretrained(tmp_path / "other")
    for report in (evaluation / "report.json", demo):
        with pytest.raises(ValueError, match=rf"{report.name} is about another drafter.*weights"):
            build_card(tmp_path / "other", reports=[report])


def test_a_report_taken_in_half_precision_is_recognised(pair, tmp_path) -> None:
    folder = reports.evaluated(*pair, tmp_path / "half", "--temperature", 0, "--no-speed", "--dtype", "fp16")
    assert "float16" in build_card(pair[1], reports=[folder])


@pytest.mark.parametrize(("spoil", "words"), [
    (lambda path: path.write_text("{}"), "no report of `dspark eval` or `dspark demo`: its `what` is None"),
    (lambda path: path.write_text("[1]"), "its `what` is None"),
    (lambda path: path.write_text("no json"), "is no report"),
    (lambda path: path.write_bytes(b"\xff\xfe{}"), "is no report"),
    (lambda path: path.write_text(path.read_text()[:400]), "is no report"),
])  # fmt: skip
def test_no_reports_are_refused_by_name(pair, evaluation, tmp_path, spoil, words) -> None:
    path = tmp_path / "mine.json"
    path.write_bytes((evaluation / "report.json").read_bytes())
    spoil(path)
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        build_card(pair[1], reports=[path])
    assert "mine.json" in str(caught.value)


@pytest.mark.parametrize("kind", ["evaluation", "demo"])
def test_every_missing_part_is_refused_not_shown(pair, kind, tmp_path, request) -> None:
    """Whatever is taken out of a report, the card is refused or loses that figure; it is never another error."""
    source = request.getfixturevalue(kind)
    report = json.loads((source / "report.json" if source.is_dir() else source).read_text())
    path, needed = tmp_path / "cut.json", {"what", "versions", "settings", "sets", "drafter"}
    if kind == "evaluation":
        needed = {"what", "configuration", "prompts", "runs", "reliability", "notes"}
    assert needed < report.keys()
    for name in report:
        path.write_text(json.dumps({key: value for key, value in report.items() if key != name}))
        if name in needed:
            with pytest.raises(ValueError, match=r"cut\.json"):
                build_card(pair[1], reports=[path])
        else:
            build_card(pair[1], reports=[path])


def test_numbers_that_are_none_are_refused(pair, demo, tmp_path) -> None:
    report = json.loads(demo.read_text())
    report["sets"][0]["speedup"] = float("nan")
    (tmp_path / "nan.json").write_text(json.dumps(report))
    with pytest.raises(ValueError, match=r"nan\.json is damaged: sets\.0\.speedup is not a finite number"):
        build_card(pair[1], reports=[tmp_path / "nan.json"])


def test_a_drafter_that_trained_here_tells_how(pair, tmp_path) -> None:
    from tests.cli import words
    from tests.training import tiny

    data = tiny.write_answers(tmp_path / "answers.jsonl", 8)
    code, _, told = words.run(
        "train", "--target", pair[0], "--data", data, "--out", tmp_path / "trained", "--init", pair[1], "--anchors", 4,
        "--steps", 2, "--device", "cpu", "--save-every", 0,
    )  # fmt: skip
    assert code == 0, told
    card = build_card(tmp_path / "trained")
    training = json.loads((tmp_path / "trained" / "training.json").read_text())
    assert f"| 8 | {training['data']['supervised_tokens']:,} | 2 | 0.0006 | cosine |" in card
    assert "Loss: 0.1 cross-entropy, 0.9 L1, 1 confidence; 4 anchors per sequence" in card
    assert str(tmp_path) not in card
    (tmp_path / "trained" / "training.json").write_text('{"steps": 1}')
    with pytest.raises(ValueError, match="not what `dspark train` writes"):
        build_card(tmp_path / "trained")


def test_calibrated_and_own_tables_change_the_words(pair, tmp_path) -> None:
    assert "The confidence is not calibrated" in build_card(pair[1])
    drafter = DSparkDrafter.from_pretrained(pair[1], dtype=torch.bfloat16)
    drafter.config.confidence_temperatures = [1.5] * drafter.config.num_draft_tokens
    drafter.save_pretrained(tmp_path / "calibrated")
    card = build_card(tmp_path / "calibrated")
    assert "not calibrated" not in card
    assert "stored parameters in bfloat16" in card
    assert "It borrows the target's embedding and LM head." in card


def test_notes_join_their_sections(pair, tmp_path) -> None:
    (tmp_path / "notes.md").write_text(
        "---\nlicense: mit\ndatasets: [a/b]\n---\n\n## Limits\n\n- Only French.\n\n## Thanks\n\nTo all.\n"
    )
    card = build_card(pair[1], notes=tmp_path / "notes.md")
    limits = card.split("## Limits")[1].split("##")[0].strip().splitlines()
    assert limits[-1] == "- Only French."
    assert "" not in limits
    assert "## Thanks\n\nTo all.\n" in card
    assert ModelCard(card).data.datasets == ["a/b"]


@pytest.mark.parametrize(("text", "words"), [
    ("---\nlicence: mit\n---\n", "may set license.*got licence"),
    ("---\nlicense: [\n---\n", "not YAML"),
    ("hello\n\n## A\n", "before its first"),
    ("## A\n\nx\n\n## A\n\ny\n", "A twice"),
])  # fmt: skip
def test_notes_that_cannot_be_used_are_refused(tmp_path, text, words) -> None:
    (tmp_path / "notes.md").write_text(text)
    with pytest.raises(ValueError, match=words):
        read_notes(tmp_path / "notes.md")


def test_the_command(pair, evaluation, tmp_path) -> None:
    out = tmp_path / "README.md"
    code, _ = reports.run("card", pair[1], "--eval", evaluation, "--license", "mit", "--out", out)
    assert code == 0
    assert out.read_text() == build_card(pair[1], reports=[evaluation], license="mit")
    assert reports.run("card", pair[1], "--license", "mit")[1] == build_card(pair[1], license="mit")
    code, told = reports.run("card", pair[1], "--report", reports.foreign(tmp_path))
    assert code == 2
    assert "foreign.json" in told
    assert reports.run("card", tmp_path / "nothing")[0] == 2
    assert reports.run("card", pair[1], "--out", tmp_path / "no" / "README.md")[0] == 2
