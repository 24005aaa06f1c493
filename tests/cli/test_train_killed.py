"""A `dspark train` process that is killed outright, and the command that goes on with its run.

Catches: checkpoints that lack something the run needs, a checkpoint that was half written being taken for the last.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training import tiny

from . import words
from .words import run

# Kills itself, as the system would: nothing is flushed, closed or tidied.
KILLED = """
import os, signal, sys
from dspark.training.trainer import DSparkTrainer
from tests.cli.words import app

def dies(name):
    whole = getattr(DSparkTrainer, name)
    def method(self, *args, **kwargs):
        if self.state.global_step == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(self, *args, **kwargs)
    setattr(DSparkTrainer, name, method)

dies(sys.argv[1])
app(sys.argv[3:])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A target, text for it, and the drafter of a run that nobody killed."""
    path = tmp_path_factory.mktemp("killed")
    (path / "target").mkdir()
    words.target(path / "target")
    tiny.write_answers(path / "answers.jsonl", 12)
    assert run(*command(path, "whole"))[0] == 0
    return path


def command(folder: Path, name: str) -> tuple:
    return (
        "train", "--target", folder / "target", "--data", folder / "answers.jsonl", "--out", folder / name,
        "--layers", 1, "--block-size", 3, "--rank", 4, "--anchors", 4, "--batch-size", 2, "--accumulation", 2,
        "--device", "cpu", "--steps", 7, "--save-every", 2, "--held-out", 2, "--eval-every", 3, "--head-only", 3,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("method", "step", "whole_checkpoint"),
    [("training_step", 5, 4), ("_save_optimizer_and_scheduler", 4, 2)],
    ids=["in a step", "in a checkpoint"],
)
def test_resumed_run_ends_with_the_same_weights(folder, method, step, whole_checkpoint) -> None:
    name = f"killed-{method}"
    words_of_it = [str(word) for word in command(folder, name)]
    root = Path(__file__).parents[2]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = [sys.executable, "-c", KILLED, method, str(step), *words_of_it]
    died = subprocess.run(process, cwd=root, env=environment, capture_output=True, text=True, timeout=600)
    assert died.returncode == -signal.SIGKILL, died.stderr[-2000:]
    assert not (folder / name).exists()
    assert (folder / f"{name}-checkpoints" / "checkpoint-4").is_dir()
    code, _, stderr = run(*command(folder, name), "--resume")
    assert code == 0, stderr
    notes = (folder / name / "training.json").read_text()
    assert f"checkpoint-{whole_checkpoint}" in notes
    weights = [(folder / which / "model.safetensors").read_bytes() for which in ("whole", name)]
    assert weights[0] == weights[1]
