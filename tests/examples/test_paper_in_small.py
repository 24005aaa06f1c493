"""The study runs from one command, keeps what is finished, and judges claims by its own figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli import words
from tests.training import tiny

ROOT = Path(__file__).parents[2]
STUDY = ROOT / "examples" / "paper_in_small"
VARIANTS = ("vanilla-3layers-block7", "none-3layers-block7")


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(STUDY))
    sys.modules.pop("report", None)
    import report

    return report


def result(length: float, accepted: list[int]) -> dict:
    rounds = [[[0.0] * 3, 3, a] for a in accepted]
    one = {"accepted_length": length, "rounds": rounds, "verified": [3] * len(accepted), "accepted": accepted}
    return {"sets": {"a": one, "b": one}, "sweep": [], "parameters": 1000}


def test_claims_follow_the_figures(tmp_path: Path, report) -> None:
    better, worse = result(2.5, [3, 2, 1, 0] * 40), result(2.0, [1, 1, 1, 0] * 40)
    for head, found in (("vanilla", better), ("none", worse)):
        (tmp_path / f"{head}-3layers-block7.json").write_text(json.dumps(found))
    report.write_report(tmp_path)
    page = (tmp_path / "report.md").read_text()
    assert "**holds**: the sequential head raises the accepted length on every domain (a +0.50, b +0.50)" in page
    assert "**holds**: it raises conditional acceptance" in page
    assert "**not measured**: the gap grows with the block" in page
    (tmp_path / "vanilla-3layers-block7.json").write_text(json.dumps(worse))
    report.write_report(tmp_path)
    assert "**does not hold**: the sequential head raises" in (tmp_path / "report.md").read_text()


def test_a_tiny_study_from_the_command_line(tmp_path: Path) -> None:
    target = words.target(tmp_path / "target")
    text = tiny.write_answers(tmp_path / "answers.jsonl", 12)
    features = tmp_path / "features"
    where = ("--target", target, "--data", text, "--features", features)
    assert words.run("train", *where, "--features-only", "--target-layers", "0,1,3", "--device", "cpu")[0] == 0
    command = [
        sys.executable, str(STUDY / "run.py"), "--target", str(target), "--features", str(features),
        "--out", str(tmp_path / "study"), "--steps", "2", "--prompts", "1", "--max-new-tokens", "6", "--rank", "4",
        "--anchors", "4", "--device", "cpu", "--only", *VARIANTS,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    first = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert first.returncode == 0, first.stderr[-3000:]
    assert first.stdout.count("== ") == 2
    again = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=True)
    assert "== " not in again.stdout
    assert "Accepted length" in (tmp_path / "study" / "report.md").read_text()
    found = json.loads((tmp_path / "study" / f"{VARIANTS[0]}.json").read_text())
    assert [row["threshold"] for row in found["sweep"]][:2] == [0.0, 0.2]
