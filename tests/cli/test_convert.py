"""`dspark convert`: what it prints, JSON, exit codes.

Catches: a refusal or a failed comparison that exits with 0, a bar or a message in the JSON, an option that is lost.
"""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace

import pytest
from dspark.conversion import WRITERS
from typer.testing import CliRunner

from dspark.cli import app, common
from dspark.hub import read_record
from tests.conversion import peers, toys

runner = CliRunner()


def run(*words: object) -> tuple[int, str]:
    result = runner.invoke(app, ["convert", *map(str, words)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.fixture
def source(tmp_path):
    return toys.saved("temperatures", tmp_path / "source")


def test_it_says_what_it_did_and_how_to_serve_it(source, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(common.out, "_width", 300)
    target = toys.saved_target(tmp_path / "target")
    code, shown = run(source, tmp_path / "out", "--to", "vllm", "--target", target, "--verify")
    assert code == 0
    flat = " ".join(shown.split())
    for words in ("markov_head_type", "vanilla", "model.safetensors", "config.json", "sha256",
                  "not kept: confidence_temperatures", "warning: The format holds no confidence temperatures",
                  "verified: largest difference of draft logits 0, of confidence logits 0",
                  f"vllm serve {target} --speculative-config"):  # fmt: skip
        assert words in flat
    assert "writing" not in flat  # no bar where nobody watches


def test_json_is_all_there_is(source, tmp_path) -> None:
    result = runner.invoke(app, ["convert", str(source), str(tmp_path / "out"), "--to", "speculators", "--json"])
    facts = json.loads(result.stdout)
    assert facts["written_as"] == "speculators"
    assert {entry["name"] for entry in facts["files"]} == set(os.listdir(tmp_path / "out"))
    assert len(facts["files"][0]["sha256"]) == 64


def test_options_arrive(source, tmp_path) -> None:
    how = ["--dtype", "bf16", "--max-shard-size", "20KB", "--overwrite"]
    for _ in range(2):
        code, _ = run(source, tmp_path / "out", "--to", "dspark", *how)
        assert code == 0
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert read_record(tmp_path / "out")["dtype"] == "bfloat16"
    if (peers.ROOT / "corrupt" / "anchor_contradiction").is_dir():
        place = peers.ROOT / "corrupt" / "anchor_contradiction"
        assert run(place, tmp_path / "two", "--to", "vllm", "--set", "sample_from_anchor=false")[0] == 0
        assert read_record(tmp_path / "two")["sample_from_anchor"] is False


@pytest.mark.parametrize(("words", "message"), [
    (["--to", "muse"], "`sample_from_anchor`"), (["--to", "tgi"], "must be one of dspark"),
    (["--to", "vllm", "--set", "x"], "NAME=JSON"), (["--to", "vllm", "--max-shard-size", "big"], "5GB"),
    (["--to", "deepspec"], "--target"), (["--to", "vllm", "--max-shard-size", "9" * 400 + "GB"], "5GB"),
    (["--to", "vllm", "--set", "vocab_size=" + "9" * 5000], "takes JSON of a usual size"),
    (["--to", "vllm", "--set", "bogus=1"], "`bogus` is no field"),
])  # fmt: skip
def test_bad_input_exits_with_2(words, message, source, tmp_path) -> None:
    code, shown = run(source, tmp_path / "out", *words)
    assert code == 2
    assert message in " ".join(shown.split())
    assert os.listdir(tmp_path) == ["source"]


@pytest.mark.parametrize("name", ["br[/x]acket", "\u5b57 \U0001f986", "new\nline", "$(x) 'y' %s{}"])
def test_any_name_can_be_shown(name, source, tmp_path) -> None:
    """What looks like markup, a command or a pattern is a name here."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    folder = source.rename(tmp_path / name)
    assert run(folder, tmp_path / f"out {name}", "--to", "vllm")[0] == 0
    assert read_record(tmp_path / f"out {name}").format == "flat"
    result = runner.invoke(app, ["inspect", str(folder)])
    assert result.exit_code == 0
    assert result.exception is None


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_ended_from_outside_it_leaves_nothing(number, code, source, tmp_path, monkeypatch) -> None:
    def halfway(record, folder, how):
        folder.mkdir()
        (folder / "config.json").write_text("half")
        os.kill(os.getpid(), number)
        time.sleep(30)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setitem(WRITERS, "vllm", replace(WRITERS["vllm"], write=halfway))
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    try:
        assert run(source, tmp_path / "out", "--to", "vllm")[0] == code
    finally:
        signal.signal(signal.SIGINT, inherited)
    assert os.listdir(tmp_path) == ["source"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_another_drafter_exits_with_1(tmp_path) -> None:
    toys.copies_of_the_target(tmp_path / "exact")
    target = toys.saved_target(tmp_path / "target")
    assert run(tmp_path / "exact", tmp_path / "source", "--to", "dspark", "--dtype", "bf16")[0] == 0
    code, shown = run(tmp_path / "source", tmp_path / "out", "--to", "sglang", "--target", target, "--verify")
    assert code == 1
    assert "draft logits differ by up to" in " ".join(shown.split())
    assert not (tmp_path / "out").exists()


def test_help_has_an_example() -> None:
    shown = runner.invoke(app, ["convert", "--help"], env={"COLUMNS": "200"}).output
    assert "Example: dspark convert" in shown
    assert "Exit codes: 0 written, 1" in shown
