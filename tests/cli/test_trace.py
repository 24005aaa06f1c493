"""`dspark trace` on a tiny pair: page, file, terminal, side by side, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from dspark import DSparkDrafter
from dspark.cli import app
from dspark.evaluation import chat_ids
from dspark.trace import Trace, load, save
from tests.cli import words
from tests.scripted import drafter_config
from tests.trace import made

runner = CliRunner()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("trace")
    words.target(root / "target")
    target = AutoModelForCausalLM.from_pretrained(root / "target")
    torch.manual_seed(0)
    for name in ("one", "two"):
        DSparkDrafter(drafter_config(target)).save_pretrained(root / name)
    return ["--target", str(root / "target"), "--drafter", str(root / "one")]


def run(*args: object, code: int = 0) -> str:
    result = runner.invoke(app, ["trace", *map(str, args)], env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


def other(models: list[str]) -> str:
    return str(Path(models[-1]).parent / "two")


def plain_ids(models: list[str], prompt: str, count: int) -> list[int]:
    model, tokenizer = (kind.from_pretrained(models[1]) for kind in (AutoModelForCausalLM, AutoTokenizer))
    ids = chat_ids(tokenizer, prompt)
    return model.generate(ids, do_sample=False, max_new_tokens=count)[0, ids.shape[1] :].tolist()


def test_page_file_and_terminal_of_one_run(models: list[str], tmp_path: Path) -> None:
    page, file = tmp_path / "t.html", tmp_path / "t.json.gz"
    text = run(*models, "--prompt", "w1 w2", "--max-new-tokens", 14, "--out", page, "--save", file, "--terminal")
    (trace,) = load(file)
    assert trace.row.token_ids() == plain_ids(models, "w1 w2", 14)
    assert (trace.target, trace.drafter, trace.settings["policy"]) == ("target", "one", "threshold")
    assert "one, policy threshold" in text
    html = page.read_text(encoding="utf-8")
    assert html.startswith("<!doctype html>")
    assert str(tmp_path) not in html  # names, no local paths
    assert str(Path(models[1]).parent) not in html


def test_a_policy_and_a_drafter_side_by_side(models: list[str], tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    common = [*models, "--prompt", "w3", "--max-new-tokens", 10, "--save", file]
    run(*common, "--against", "fixed")
    first, second = load(file)
    assert [t.settings["policy"] for t in (first, second)] == ["threshold", "fixed"]
    assert first.row.token_ids() == second.row.token_ids()
    run(*common, "--against", other(models), "--against-threshold", 0.9)
    first, second = load(file)
    assert [t.drafter for t in (first, second)] == ["one", "two"]
    assert [t.settings["confidence threshold"] for t in (first, second)] == [0.0, 0.9]
    assert first.row.token_ids() == second.row.token_ids()


def test_sampling_is_seeded(models: list[str], tmp_path: Path) -> None:
    texts = []
    for seed in (1, 1, 2):
        args = ["--prompt", "w3", "--max-new-tokens", 20, "--temperature", 1.5, "--seed", seed]
        run(*models, *args, "--save", tmp_path / "t.json")
        (trace,) = load(tmp_path / "t.json")
        texts.append(trace.row.token_ids())
        assert trace.row.rounds[0].draft_probs is not None
    assert texts[0] == texts[1] != texts[2]


def test_files_are_shown_again(tmp_path: Path) -> None:
    for name, seed in (("a.json", 1), ("b.json.gz", 2)):
        save(tmp_path / name, [made.trace(30, seed=seed)])
    sources = ["--from", tmp_path / "a.json", "--from", tmp_path / "b.json.gz"]
    run(*sources, "--out", tmp_path / "t.html", "--save", tmp_path / "both.json")
    assert (tmp_path / "t.html").read_text(encoding="utf-8").count("<article") == 2
    assert load(tmp_path / "both.json") == [made.trace(30, seed=1), made.trace(30, seed=2)]


def test_figures_as_json(tmp_path: Path) -> None:
    trace: Trace = made.trace(30)
    save(tmp_path / "a.json", [trace])
    result = runner.invoke(app, ["trace", "--from", str(tmp_path / "a.json"), "--json"])
    (found,) = json.loads(result.stdout)
    assert (found["drafter"], found["num_tokens"], found["num_rounds"]) == ("some-drafter", 30, len(trace.row.rounds))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("{models}", "--prompt", "w1"), "Say where to show it"),
        (("--terminal",), "Give --target, --drafter and --prompt, or --from FILE"),
        (("{models}", "--terminal"), "Give --target, --drafter and --prompt"),
        (("--from", "no.json", "--terminal"), "no.json"),
        (("--from", "no.json", "--prompt", "x", "--terminal"), "leave out --prompt"),
        (("{models}", "--prompt", "w1", "--out", "no/such/folder.html"), "cannot be written"),
        (("{models}", "--prompt", "w1", "--save", "."), "cannot be written"),
        (("{models}", "--prompt", "w1", "--terminal", "--policy", "best"), "`policy` must be one of"),
        (("{models}", "--prompt", "w1", "--terminal", "--against", "/no/such"), "There is no folder /no/such"),
        (("{models}", "--prompt", "w1", "--terminal", "--against-threshold", "0.5"), "needs --against"),
        (("{models}", "--prompt", "w1", "--terminal", "--dtype", "int4"), "--dtype"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_exits_with_2_and_says_why(models: list[str], args: tuple[str, ...], message: str) -> None:
    given = [part for arg in args for part in (models if arg == "{models}" else [arg])]
    assert message in run(*given, code=2)


def test_a_prompt_without_tokens_is_refused(models: list[str], tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(models[1])
    tokenizer.chat_template = None
    AutoModelForCausalLM.from_pretrained(models[1]).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    text = run("--target", tmp_path, "--drafter", models[-1], "--prompt", "", "--terminal", code=2)
    assert "The prompt has no tokens" in text


def test_help_has_an_example_and_every_option() -> None:
    text = re.sub(r"\x1b\[[0-9;]*m", "", run("--help"))
    assert (
        'dspark trace --target Qwen/Qwen3-4B --drafter my-drafter --prompt "What is 17 times 23?" --out trace.html'
        in text
    )
    for option in ("--from", "--against", "--terminal", "--save", "--out", "--json"):
        assert option in text
