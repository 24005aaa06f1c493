"""Every example runs on a tiny pair, from its own file, and says what it should.

Catches: an example that no longer runs, that says a text is exact when it is not, or that nobody runs.
"""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.cards import reports

EXAMPLES = Path(__file__).parents[2] / "examples"
SHORT = ("--threads", "1", "--max-new-tokens", "12")
# Tests of their own: they take other options, run long, or need another program.
ELSEWHERE = {"adapt_to_a_domain.py", "serve_with_llama_cpp.py"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Path, Path]:
    return reports.pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def run(pair, monkeypatch, capsys, tmp_path):
    """Runs an example in this process as if from the command line, in an empty folder; gives what it printed."""

    def run(name: str, *words: object) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(str(EXAMPLES))
        models = ["--target", str(pair[0]), "--drafter", str(pair[1])]
        monkeypatch.setattr(sys, "argv", [name, *models, *SHORT, *map(str, words)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    yield run
    sys.modules.pop("models", None)


def test_generate(run) -> None:
    told = run("generate.py", "w1 w2 w3")
    assert "ids equal plain generate: True" in told
    assert re.search(r"12 tokens in \d+ passes", told)


def test_chat_stream(run) -> None:
    told = run("chat_stream.py", "--turn", "w1 w2", "--turn", "w3")
    assert told.count("tokens per pass]") == 2


def test_inspect_a_round(run, pair) -> None:
    """What it says of a round is what `generate` does in its first one."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from dspark import DSparkDrafter

    told = run("inspect_a_round.py", "w1 w2 w3")
    model, tokenizer = (load.from_pretrained(pair[0]) for load in (AutoModelForCausalLM, AutoTokenizer))
    drafter = DSparkDrafter.from_pretrained(pair[1])
    ids = tokenizer("w1 w2 w3", return_tensors="pt").input_ids
    model.generate(ids, assistant_model=drafter, do_sample=False, max_new_tokens=8)
    assert f"the round adds {drafter.last_stats.accepted[0] + 1} tokens" in told
    assert told.count("\n") == 3 + drafter.config.num_draft_tokens


def test_train_tiny(run, tmp_path) -> None:
    told = run("train_tiny.py", "--steps", 2, "--prompts", 4, "--out", tmp_path / "mine")
    assert "accepted length after 2 steps" in told
    assert (tmp_path / "mine" / "model.safetensors").is_file()


def test_calibrate(run) -> None:
    told = run("calibrate.py", "--prompts", 4, "--min-rounds", 4)
    assert "ECE of survival, raw" in told
    assert "survival threshold 0.3" in told


@pytest.mark.parametrize("policy", ["auto", "scheduled"])
def test_batch_with_scheduler(run, policy) -> None:
    told = run("batch_with_scheduler.py", "--policy", policy, "--rows", 3)
    assert "6 texts" in told
    assert "the first text is what it is alone: True" in told


def test_pipeline(run) -> None:
    assert "as plain: True" in run("pipeline.py", "w1 w2")


def test_trainer_callback(run) -> None:
    told = run("trainer_callback.py", "--steps", 12, "--every", 2, "--patience", 1, "--prompts", 4)
    steps = [int(step) for step in re.findall(r"^step (\d+): accepted length", told, re.MULTILINE)]
    stopped = re.search(r"stopped at step (\d+) of 12", told)
    assert steps
    assert stopped is not None
    assert int(stopped[1]) == steps[-1]


@pytest.mark.parametrize("how", [("--to", "dspark"), ("--to", "speculators", "--as-qwen3")], ids=" ".join)
def test_convert_and_serve(run, how) -> None:
    told = run("convert_and_serve.py", *how, "--out", "there")
    assert "accepts the same drafts: True" in told
    assert "serve it: " in told


def test_a_format_that_cannot_hold_the_drafter_is_said(run) -> None:
    with pytest.raises(SystemExit, match=r"not written: .*family"):
        run("convert_and_serve.py", "--to", "speculators", "--out", "there")


def test_every_example_is_run_and_short() -> None:
    mine = Path(__file__).read_text()
    for path in EXAMPLES.glob("*.py"):
        if path.name in ELSEWHERE or path.name == "models.py":
            continue
        assert f'run("{path.name}"' in mine, f"{path.name} is run by no test"
        assert len(path.read_text().splitlines()) <= 80, path.name
        assert '"""' in path.read_text()[:3], f"{path.name} does not say what it shows"
