"""The example adapts in one command, measures by real decoding, and calls a loss a loss."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from dspark import DSparkDrafter
from dspark.peft_layers import carries_adapters
from tests.cli import words
from tests.training import tiny

pytest.importorskip("peft")
EXAMPLE = Path(__file__).parents[2] / "examples" / "adapt_to_a_domain.py"


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Path, Path]:
    """A target and a drafter for it."""
    folder = tmp_path_factory.mktemp("pair")
    target = words.target(folder / "target")
    code, _, stderr = words.run(
        "train", "--target", target, "--data", tiny.write_answers(folder / "answers.jsonl", 8), "--out",
        folder / "drafter", "--layers", 1, "--block-size", 3, "--rank", 4, "--anchors", 4, "--steps", 2, "--device",
        "cpu", "--save-every", 0,
    )  # fmt: skip
    assert code == 0, stderr
    return target, folder / "drafter"


def adapted(pair, out: Path, *more) -> str:
    command = [
        sys.executable, EXAMPLE, "--target", pair[0], "--drafter", pair[1], "--out", out, "--prompts", 2,
        "--max-new-tokens", 12, "--steps", 3, "--anchors", 4, "--rank", 2, "--threads", 1, *more,
    ]  # fmt: skip
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_answers_and_prompts_of_one_s_own(pair, tmp_path) -> None:
    answers = tiny.write_answers(tmp_path / "answers.jsonl", 12)
    domain, other = (words.prompt_file(tmp_path, name, 3, offset) for name, offset in (("mine", 0), ("yours", 40)))
    told = adapted(pair, tmp_path / "out", "--data", answers, "--held-out", domain, "--other", other, "gsm8k")
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    names = [f"{name} {place}" for place in ("domain", "elsewhere") for name in ("untouched", "lora", "full")]
    assert list(report) == names
    for tau, verdict in report.values():
        assert 1 <= tau <= 4
        assert verdict in told
    assert carries_adapters(DSparkDrafter.from_pretrained(tmp_path / "out" / "lora"))
    assert not carries_adapters(DSparkDrafter.from_pretrained(tmp_path / "out" / "full"))
    again = adapted(pair, tmp_path / "out", "--data", answers, "--held-out", domain, "--other", other, "gsm8k")
    assert "lora: found in" in again  # an interrupted run goes on after what it trained
    assert "full: found in" in again
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == report


def test_a_made_up_domain_and_stored_features(pair, tmp_path) -> None:
    assert "elsewhere" in adapted(pair, tmp_path / "out", "--other", "mbpp")
    where = ("--target", pair[0], "--data", tmp_path / "out" / "answers.jsonl", "--init", pair[1], "--device", "cpu")
    assert words.run("train", *where, "--features", tmp_path / "features", "--features-only")[0] == 0
    adapted(pair, tmp_path / "again", "--features", tmp_path / "features", "--other", "mbpp")


def test_the_verdict_follows_the_figures() -> None:
    spec = importlib.util.spec_from_file_location("adapt_to_a_domain", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    low, high = [1, 2] * 200, [2, 3] * 200
    assert example.verdict(low, high).startswith("a gain: +1.000")
    assert example.verdict(high, low).startswith("A LOSS: -1.000")
    assert example.verdict(low, [1, 2, 2, 1, 2] * 10).startswith("no change beyond chance: +0.100")
    prompts = example.made_up(104)
    assert len(set(prompts)) == 104
    assert prompts == example.made_up(104)
