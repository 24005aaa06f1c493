"""`dspark bench` end to end on tiny folders: traces are recorded, a server is simulated, batches are run and checked.

Catches: a command that fails only after it has measured, figures on stdout that are no JSON, a wrong input that is
found late or not at all.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from dspark import DSparkDrafter
from dspark.cli import app
from dspark.scheduling import ThroughputCurve
from dspark.simulation import load_traces
from tests.cli.test_commands import pair  # noqa: F401 - a fixture
from tests.scripted import drafter_config

NEW = 12


def run(*words: Any) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["bench", *map(str, words)], env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, " ".join(result.stderr.split())


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two prompt files."""
    root = tmp_path_factory.mktemp("prompts")
    for name, texts in (("chat", ("hello there", "how are you")), ("code", ("def f(x):", "import this"))):
        (root / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return [root / "chat.jsonl", root / "code.jsonl"]


@pytest.fixture
def models(pair: dict[str, str], files: list[Path]) -> list[Any]:  # noqa: F811
    return [
        "--target", pair["target"], "--drafter", pair["drafter"], "--device", "cpu", "--dtype", "fp32",
        "--prompts", files[0], "--prompts", files[1], "--max-new-tokens", NEW,
    ]  # fmt: skip


@pytest.fixture
def curve(tmp_path: Path) -> Path:
    made = ThroughputCurve()
    for tokens in (1, 8, 64, 512):
        made.learn(tokens, 0.01 + 1e-4 * tokens)
    for rows in (1, 4):
        made.learn_draft(rows, 7, 0.002)
    made.save(tmp_path / "curve.json")
    return tmp_path / "curve.json"


def test_record_then_frontier(models: list[Any], curve: Path, tmp_path: Path) -> None:
    traces = tmp_path / "traces.safetensors"
    code, _, stderr = run("record", *models, "--out", traces)
    assert code == 0, stderr
    assert "chat: 2 texts, accepted length" in stderr
    recorded = load_traces(traces)
    assert [(trace.domain, trace.num_texts) for trace in recorded] == [("chat", 2), ("code", 2)]
    assert all(trace.num_drafts == 7 for trace in recorded)

    loads = ("--load", 1, "--load", 4, "--requests-per-row", 3)
    code, stdout, stderr = run("frontier", "--traces", traces, "--mixed", *loads, "--out", tmp_path / "report")
    assert code == 0, stderr
    for text in ("chat + code: throughput by rows", "chat: throughput that keeps a share", "mtp-1", "auto "):
        assert text in " ".join(stdout.split())
    report = json.loads((tmp_path / "report" / "frontier.json").read_text())
    assert len(report["points"]) == 3 * 2 * 7
    assert report["about"]["curve"] == "gpu"
    assert report["about"]["texts"] == {"chat": 2, "code": 2, "chat + code": 4}
    assert (tmp_path / "report" / "frontier.md").is_file()

    chosen = ("--policy", "fixed", "--policy", "plain", "--curve", curve, "--json")
    code, stdout, stderr = run("frontier", "--traces", traces, *loads, *chosen)
    assert code == 0, stderr
    shown = json.loads(stdout)
    assert {point["policy"] for point in shown["points"]} == {"plain", "fixed"}
    assert shown["about"]["curve"] == "curve.json"
    again = json.loads(run("frontier", "--traces", traces, *loads, *chosen)[1])
    assert again["points"] == shown["points"]


def test_frontier_without_matplotlib_says_so(
    models: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dspark.evaluation import frontier_report
    from dspark.evaluation.plots import MISSING, PlotLibraryError

    def missing() -> Any:
        raise PlotLibraryError(MISSING)

    monkeypatch.setattr(frontier_report, "subplots", missing)
    assert run("record", *models, "--limit", 1, "--out", tmp_path / "t.safetensors")[0] == 0
    options = ("--load", 1, "--requests-per-row", 2, "--policy", "plain", "--out", tmp_path / "report")
    code, _, stderr = run("frontier", "--traces", tmp_path / "t.safetensors", *options)
    assert code == 0, stderr
    assert "pip install 'dspark[eval]'" in stderr
    assert sorted(path.name for path in (tmp_path / "report").iterdir()) == ["frontier.json", "frontier.md"]


def test_batches(models: list[Any]) -> None:
    sizes = ("--size", 1, "--size", 3, "--repeats", 1)
    code, stdout, stderr = run("batches", *models, *sizes, "--policy", "fixed", "--policy", "auto", "--json")
    assert code == 0, stderr
    cells = json.loads(stdout)
    assert [(cell["way"], cell["batch_size"]) for cell in cells] == [
        (way, size) for size in (1, 3) for way in ("plain", "fixed", "auto")
    ]
    assert all(cell["ids_equal"] and cell["tokens_per_second"] > 0 for cell in cells)
    assert cells[0]["accepted_length"] is None
    assert cells[1]["accepted_length"] >= 1
    code, stdout, _ = run("batches", *models, *sizes, "--policy", "fixed")
    assert code == 0
    assert "(1.00)" in stdout
    assert "2/2" in stdout


def test_batches_whose_ids_differ_exit_1(models: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from dspark.evaluation import batches

    generate, calls = batches._generate, []

    def lying(target: Any, inputs: Any, call: dict[str, Any]) -> Any:
        output = generate(target, inputs, call)
        calls.append(call)
        if "assistant_model" in call:
            output.sequences[0, -1] += 1
        return output

    monkeypatch.setattr(batches, "_generate", lying)
    code, stdout, _ = run("batches", *models, "--size", 1, "--repeats", 1, "--policy", "fixed")
    assert calls
    assert code == 1
    assert "0/1" in stdout


def test_check(models: list[Any], curve: Path) -> None:
    sizes = ("--size", 1, "--size", 2, "--repeats", 1)
    code, stdout, stderr = run("check", *models, "--curve", curve, *sizes, "--json")
    assert code == 0, stderr
    found = json.loads(stdout)
    assert [entry["batch_size"] for entry in found] == [1, 2]
    for entry in found:
        assert entry["ratio"] == pytest.approx(entry["predicted"] / entry["measured"])
        assert entry["predicted"] >= 0.01 * NEW / 8
        assert entry["measured"] > 0
    code, stdout, stderr = run("check", *models, "--size", 2, "--repeats", 1, "--json")
    assert code == 0, stderr
    assert json.loads(stdout)[0]["predicted"] > 0
    code, stdout, stderr = run("check", *models, "--curve", "gpu", "--size", 1, "--repeats", 1)
    assert code == 0
    assert "The curve was measured on something else (device: a made accelerator in the curve, cpu now" in stderr
    assert "ratio" in stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("frontier", "--traces", "{traces}", "--policy", "greedy"), "--policy must be one of plain, mtp-1, fixed"),
        (("frontier", "--traces", "{traces}", "--curve", "no.json"), "There is no curve file no.json"),
        (("frontier", "--traces", "{traces}", "--curve", "{traces}"), "cannot be used"),
        (("frontier", "--traces", "no.safetensors"), "no.safetensors is no trace file"),
        (("frontier", "--traces", "{curve}"), "is no trace file"),
        (("batches", "{models}", "--policy", "greedy"), "`policy` must be one of"),
        (("batches", "{models}", "--curve", "no.json"), "There is no curve file no.json"),
        (("batches", "{models}", "--dtype", "int4"), "`--dtype` must be one of"),
        (("check", "{models}", "--curve", "no.json"), "There is no curve file no.json"),
        (("record", "{models}", "--out", "x", "--prompts", "no.jsonl"), "no.jsonl"),
        (("record", "{models}", "--out", "no-such-folder/x"), "cannot be written"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_exits_2(
    models: list[Any], curve: Path, tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    traces = tmp_path / "traces.safetensors"
    if "{traces}" in words:
        assert run("record", *models, "--limit", 1, "--out", traces)[0] == 0
    filled: list[Any] = []
    for word in words:
        filled += models if word == "{models}" else [word.format(traces=traces, curve=curve)]
    code, _, stderr = run(*filled)
    assert code == 2
    assert message in stderr


def test_a_drafter_without_a_confidence_head_exits_2(models: list[Any], pair: dict[str, str], tmp_path: Path) -> None:  # noqa: F811
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(pair["target"], dtype=torch.float32)
    DSparkDrafter(drafter_config(target, enable_confidence_head=False)).save_pretrained(tmp_path / "headless")
    options = [*models, "--drafter", tmp_path / "headless"]
    for words in (("record", "--out", tmp_path / "t"), ("check", "--curve", "gpu", "--size", 1)):
        code, _, stderr = run(words[0], *options, *words[1:])
        assert code == 2
        assert "no confidence head" in stderr
    assert not (tmp_path / "t").exists()
