"""Options of `dspark train` beyond data and shape: evaluation, heads first, several folders, the best drafter.

Catches: options that reach nothing, figures that are not noted, a finished drafter that is not the best one, target
layers that stay in memory for nothing or are gone when decoding needs them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from dspark import DSparkDrafter
from dspark.target import decoder_layers
from dspark.training import run as run_module
from tests.training import tiny

from . import words
from .words import prompt_file, run

SMALL = (
    "--layers", 1, "--block-size", 3, "--rank", 4, "--anchors", 4, "--batch-size", 4, "--log-every", 1,
    "--device", "cpu", "--save-every", 0,
)  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return words.target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def features(target, tmp_path_factory) -> list[Path]:
    """Two folders of features."""
    made = []
    for seed in (1, 2):
        place = tmp_path_factory.mktemp("features")
        text = tiny.write_answers(place / "answers.jsonl", 8, seed=seed)
        where = ("--target", target, "--data", text, "--features", place / "features")
        assert run("train", *where, "--features-only", "--target-layers", "0,1,3", "--device", "cpu")[0] == 0
        made.append(place / "features")
    return made


def logged(notes: dict, name: str) -> list[float]:
    return [entry[name] for entry in notes["log_history"] if name in entry]


def test_evaluation_is_logged_noted_and_decides(target, tmp_path) -> None:
    out = tmp_path / "drafter"
    code, stdout, stderr = run(
        "train", "--target", target, "--data", tiny.write_answers(tmp_path / "a.jsonl", 12), "--out", out, *SMALL,
        "--steps", 4, "--eval-prompts", prompt_file(tmp_path), "--eval-limit", 2, "--eval-new-tokens", 6,
        "--held-out", 3, "--eval-every", 1, "--keep-best", "--json",
    )  # fmt: skip
    assert code == 0, stderr
    assert "padding: " in stderr
    notes = json.loads((out / "training.json").read_text())
    real = logged(notes, "eval_tau")
    assert len(real) == len(logged(notes, "eval_loss")) == 4
    assert notes["held_out"]["sequences"] == len(notes["held_out"]["indices"]) == 3
    assert notes["best"] == {"metric": "eval_tau", "value": max(real), "step": real.index(max(real)) + 1}
    assert json.loads(stdout)["best"] == notes["best"]
    kept = load_file(tmp_path / "drafter-checkpoints" / "best.safetensors")
    saved = DSparkDrafter.from_pretrained(out).state_dict()
    assert all((kept[name] == tensor).all() for name, tensor in saved.items())


def test_several_folders_train_without_the_targets_layers(target, features, tmp_path, monkeypatch) -> None:
    both = [word for folder in features for word in ("--features", folder)]
    where = ("train", "--target", target, *both, *SMALL, "--steps", 3)
    seen = []
    execute = run_module.execute

    def watched(prepared):
        layers = decoder_layers(prepared.trainer.target)
        seen.append(({p.device.type for layer in layers for p in layer.parameters()}, len(prepared.data)))
        return execute(prepared)

    monkeypatch.setattr(run_module, "execute", watched)
    assert run(*where, "--out", tmp_path / "one", "--held-out", 2)[0] == 0
    evaluation = ("--eval-prompts", prompt_file(tmp_path), "--eval-limit", 1, "--eval-new-tokens", 4)
    assert run(*where, "--out", tmp_path / "two", "--held-out", 2, *evaluation)[0] == 0
    assert seen == [({"meta"}, 16), ({"cpu"}, 16)]
    same = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two")]
    assert same[0] == same[1]  # decoding on the way changed nothing
    notes = json.loads((tmp_path / "two" / "training.json").read_text())
    assert notes["data"]["used"] == 16
    assert logged(notes, "eval_tau")


def test_options_reach_the_settings(target, tmp_path) -> None:
    out = tmp_path / "drafter"
    code, _, stderr = run(
        "train", "--target", target, "--data", tiny.write_answers(tmp_path / "a.jsonl", 12), "--out", out, *SMALL,
        "--steps", 3, "--head-only", 1, "--confidence-detach", "--gradient-checkpointing",
        "--schedule", "warmup_stable_decay", "--decay-share", 0.5,
    )  # fmt: skip
    assert code == 0, stderr
    config = json.loads((out / "training.json").read_text())["request"]["config"]
    assert (config["head_only_steps"], config["detach_confidence"], config["decay_share"]) == (1, True, 0.5)
    assert config.get("activation_checkpointing", config.get("gradient_checkpointing")) is True
    assert config["lr_scheduler_type"] == "warmup_stable_decay"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--keep-best",), "`keep_best` needs something to evaluate"),
        (("--held-out", 12), "12 sequences cannot be held out of 12"),
        (("--held-out", -1), "--held-out must be at least 0"),
        (("--eval-prompts", "no.jsonl"), "no.jsonl is not a file"),
        (("--eval-every", -2), "`eval_every` must be at least 0"),
        (("--decay-share", 0.3), "--decay-share belongs to --schedule warmup_stable_decay"),
        (("--head-only", -1), "`head_only_steps` must be at least 0"),
        (("--features", "f", "--features", "g"), "the one folder to write, got 2"),
    ],
)
def test_bad_requests_exit_with_2(target, tmp_path, options, message) -> None:
    path = tiny.write_answers(tmp_path / "a.jsonl", 12)
    where = ("train", "--target", target, "--data", path, "--out", tmp_path / "drafter", "--device", "cpu")
    code, _, stderr = run(*where, *options)
    assert (code, message in stderr) == (2, True), stderr
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]
