"""The command line on a tiny pair: outputs, JSON, exit codes, and help that names every option."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from dspark import DSparkDrafter
from dspark.cli import app
from dspark.context_cache import ContextCache
from dspark.scheduling import ThroughputCurve
from tests.scripted import drafter_config

runner = CliRunner()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of a tiny Llama with a byte-level tokenizer and a drafter that fits it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    root = tmp_path_factory.mktemp("pair")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(["<eos>", *alphabet])}, merges=[]))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>", pad_token="<eos>")
    torch.manual_seed(0)
    target = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=3,
            num_attention_heads=2, num_key_value_heads=1, head_dim=16, eos_token_id=0, bos_token_id=0, pad_token_id=0,
        )
    )  # fmt: skip
    drafter = DSparkDrafter(drafter_config(target))
    for model, name in ((target, "target"), (drafter, "drafter")):
        model.save_pretrained(root / name)
    tokenizer.save_pretrained(root / "target")
    return {"target": str(root / "target"), "drafter": str(root / "drafter")}


def test_generate_streams_and_reports(pair: dict[str, str]) -> None:
    args = ["generate", "hello", "--target", pair["target"], "--drafter", pair["drafter"], "--max-new-tokens", "12"]
    result = runner.invoke(app, args)
    assert result.exit_code == 0, result.output
    assert "accepted length" in result.output


def test_generate_json_equals_plain_text(pair: dict[str, str]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    args = ["generate", "hello", "--target", pair["target"], "--drafter", pair["drafter"], "--max-new-tokens", "12",
            "--json", "--no-pack"]  # fmt: skip
    result = runner.invoke(app, args)
    value = json.loads(result.stdout)
    model = AutoModelForCausalLM.from_pretrained(pair["target"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(pair["target"])
    ids = tokenizer("hello", return_tensors="pt").input_ids
    plain = model.generate(ids, do_sample=False, max_new_tokens=12)
    assert value["text"] == tokenizer.decode(plain[0, ids.shape[1] :], skip_special_tokens=True)
    assert value["speculative_decoding"]["num_new_tokens"] == plain.shape[1] - ids.shape[1]


def test_the_context_window_is_the_drafters(pair: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    models = ["--target", pair["target"], "--drafter", pair["drafter"], "--max-new-tokens", "12", "--threads", "1"]
    args = ["generate", "a longer prompt than the window", *models, "--json"]
    whole = json.loads(runner.invoke(app, args).stdout)
    caches, extend = set(), ContextCache.extend

    def spy(cache: ContextCache, *more: Any) -> Any:
        caches.add(cache.window)
        return extend(cache, *more)

    monkeypatch.setattr(ContextCache, "extend", spy)
    found = json.loads(runner.invoke(app, [*args, "--context-window", "3"]).stdout)
    assert found["text"] == whole["text"]
    assert caches == {3}
    caches.clear()
    shown = ["trace", "--prompt", args[1], *models, "--terminal", "--context-window", "5"]
    assert runner.invoke(app, shown).exit_code == 0
    assert caches == {5}
    assert runner.invoke(app, [*args, "--context-window", "0"]).exit_code == 2


def test_a_curve_is_for_policies_that_look_at_one(pair: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "curve.json"
    curve = ThroughputCurve()
    for tokens in (1, 8):
        curve.learn(tokens, 1.0 if tokens == 1 else 100.0)  # a pass over drafts never pays
    curve.save(path)
    models = ["--target", pair["target"], "--drafter", pair["drafter"], "--max-new-tokens", "12", "--threads", "1"]
    args = ["generate", "hello", *models, "--json"]
    result = runner.invoke(app, [*args, "--curve", str(path), "--policy", "scheduled"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["speculative_decoding"]["num_draft_tokens"] == 0
    for more, words in (
        (["--curve", str(path)], "--policy is threshold. Add --policy scheduled"),
        (["--curve", str(tmp_path / "none.json"), "--policy", "auto"], "`dspark profile --target ... --drafter"),
    ):
        result = runner.invoke(app, [*args, *more])
        assert result.exit_code == 2
        assert words in " ".join(result.output.split())


@pytest.mark.parametrize("config", ["[1, 2]", "{"])
def test_a_target_s_config_that_is_no_object_is_bad_input(pair: dict[str, str], tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    result = runner.invoke(app, ["generate", "x", "--target", str(tmp_path), "--drafter", pair["drafter"]])
    assert result.exit_code == 2, result.output
    assert str(tmp_path) in "".join(result.output.split())


@pytest.mark.parametrize(
    "command",
    [
        ["generate", "x"],
        ["trace", "--prompt", "x", "--json"],
        ["doctor"],
        ["eval"],
        ["profile"],
        ["bench", "round"],
        ["demo"],
    ],
    ids=lambda command: command[0],
)
def test_the_small_drafter_is_read_before_the_target(command: list[str], tmp_path: Path) -> None:
    """Both are wrong: the drafter is what is said, before minutes of reading a large target."""
    target, drafter = tmp_path / "target", tmp_path / "drafter"
    for folder in (target, drafter):
        folder.mkdir()
        (folder / "config.json").write_text("{")
    if command == ["profile"]:
        command = [*command, "--out", str(tmp_path / "curve.json")]
    result = runner.invoke(app, [*command, "--target", str(target), "--drafter", str(drafter)])
    assert result.exit_code == 2, result.output
    said = "".join(result.output.split())
    assert str(drafter) in said
    assert str(target) not in said


@pytest.mark.parametrize("command", ["generate", "trace", "doctor", "eval", "calibrate", "profile", "data", "train"])
def test_threads_and_packing_are_options_everywhere(command: str) -> None:
    result = runner.invoke(app, [command, "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert {"--threads", "--target"} <= set(re.findall(r"--[a-z][a-z-]+", result.output))
    assert re.search(r"--no-pack\b", result.output)


def demo_args(pair: dict[str, str]) -> list[str]:
    models = ["--target", pair["target"], "--drafter", pair["drafter"]]
    return ["demo", *models, "--prompts", "1", "--max-new-tokens", "6", "--threads", "1"]


def test_demo_json_compares_every_set(pair: dict[str, str]) -> None:
    result = runner.invoke(app, [*demo_args(pair), "--json"])
    assert result.exit_code == 0, result.output
    sets = json.loads(result.stdout)["sets"]
    assert [s["name"] for s in sets] == ["gsm8k", "math500", "humaneval", "mbpp", "mt-bench", "arena-hard-v2"]
    assert all(s["equal"] == s["prompts"] == 1 for s in sets)


def test_demo_refuses_a_pair_that_does_not_fit_and_options_that_say_nothing(
    pair: dict[str, str], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    other = DSparkDrafter(drafter_config(AutoModelForCausalLM.from_pretrained(pair["target"]), vocab_size=300))
    other.save_pretrained(tmp_path / "other")
    wrong = {
        "300": ["--drafter", str(tmp_path / "other")],
        "Leave one of them out": ["--quick", "--json"],
        "give --target too": ["--gguf-file", "x.gguf"],
    }
    for message, more in wrong.items():
        args = [*demo_args(pair), *more]
        if "--gguf-file" in more:
            args[args.index("--target") : args.index("--target") + 2] = []
        result = runner.invoke(app, args)
        assert result.exit_code == 2, result.output
        assert message in " ".join(result.stderr.split())


def test_demo_streams_and_prints_tables(pair: dict[str, str]) -> None:
    result = runner.invoke(app, demo_args(pair))
    assert result.exit_code == 0, result.output
    for text in ("equal to plain generate", "Where a round's time goes", "gsm8k"):
        assert text in result.output
    assert "…" not in result.output  # nothing is cut off in 80 columns


def test_doctor_names_what_is_wrong(pair: dict[str, str]) -> None:
    """A random drafter of which much is expected: no setting is to blame."""
    models = ["--target", pair["target"], "--drafter", pair["drafter"]]
    args = ["doctor", *models, "--limit", "1", "--max-new-tokens", "8", "--expect", "7.5"]
    result = runner.invoke(app, [*args, "--json"])
    assert result.exit_code == 1, result.output
    found = json.loads(result.stdout)
    assert "own report says 7.50" in found["verdict"]
    assert {suspect["name"] for suspect in found["suspects"]} >= {"anchor convention (slot 0 ignored)"}
    shown = runner.invoke(app, args)
    assert shown.output.index("7.50") < shown.output.index("changed")
    assert "…" not in shown.output
    missing = runner.invoke(app, [*args, "--prompts", "no/such.jsonl"])
    assert missing.exit_code == 2


def test_inspect_reads_settings_without_weights(pair: dict[str, str]) -> None:
    facts = json.loads(runner.invoke(app, ["inspect", pair["drafter"], "--json"]).stdout)
    assert facts["block_size"] == 7
    assert facts["borrows_from_target"] == ["embedding", "LM head"]
    assert facts["tensors"] > 10
    shown = runner.invoke(app, ["inspect", pair["drafter"]]).output
    assert "block_size" in shown
    assert "…" not in shown


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["inspect", "{target}"], "not a DSpark drafter"),
        (["inspect", "no/such/folder/here"], "error"),
        (["data", "--target", "{target}", "--out", "x.jsonl"], "give --prompts FILE, or --self-prompts N"),
        (
            ["data", "--target", "{target}", "--out", "x.jsonl", "--template-args", "{{"],
            "--template-args must be a JSON object",
        ),
        (["inspect", "/no/such/folder"], "There is no folder /no/such/folder"),
        (["generate", "x", "--target", "/nope", "--drafter", "{drafter}"], "There is no folder /nope"),
        (
            ["generate", "x", "--target", "{drafter}", "--drafter", "{drafter}"],
            "drafter is a drafter. --target names the",
        ),
        (["generate", "x", "--target", "no/such", "--drafter", "{drafter}"], "There is no folder no/such here"),
        (["generate", "", "--target", "{target}", "--drafter", "{drafter}"], "The prompt has no tokens"),
        (["generate", "x", "--target", "{target}", "--drafter", "{drafter}", "--device", "foo"], "--device must be"),
        (["doctor", "--target", "{target}", "--drafter", "{drafter}", "--device", "cuda:99"], "--device is"),
        (["generate", "x", "--target", "{target}", "--drafter", "{target}"], "not a DSpark drafter"),
        (["generate", "x", "--target", "{target}", "--drafter", "{drafter}", "--dtype", "int4"], "--dtype"),
    ],
)
def test_bad_input_exits_with_2_and_says_why(pair: dict[str, str], args: list[str], words: str) -> None:
    result = runner.invoke(app, [a.format(**pair) for a in args])
    assert result.exit_code == 2, result.output
    assert words in " ".join(result.output.split())


def test_a_folder_with_a_gguf_file_says_how_to_name_it(pair: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "some.gguf").touch()
    file = str(tmp_path / "some.gguf")
    for target, gguf, words in (
        (str(tmp_path), [], "some.gguf: name it with --gguf-file"),
        (str(tmp_path), ["--gguf-file", "sone.gguf"], "has no file 'sone.gguf' (--gguf-file). There are: some.gguf."),
        (pair["target"], ["--gguf-file", "some.gguf"], "It holds no GGUF file: leave --gguf-file out."),
        (file, [], f"Name its folder with --target {tmp_path} and a GGUF file in it with --gguf-file some.gguf."),
    ):
        result = runner.invoke(app, ["generate", "x", "--target", target, "--drafter", pair["drafter"], *gguf])
        assert result.exit_code == 2
        assert words in " ".join(result.output.split())


def test_the_package_runs_as_a_module() -> None:
    run = subprocess.run([sys.executable, "-m", "dspark", "--help"], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert "calibrate" in run.stdout


def test_help_shows_the_form_of_a_prompt_file() -> None:
    for command in ("data", "eval", "doctor"):
        result = runner.invoke(app, [command, "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
        assert re.search(r'\{"turns": \[', " ".join(result.output.split())), command


@pytest.mark.parametrize("command", ["demo", "generate", "inspect", "doctor", "data", "train", "card", "push"])
def test_help_describes_every_option(command: str) -> None:
    result = runner.invoke(app, [command, "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 0
    plain = re.sub(r"\x1b\[[0-9;]*m", "", result.output)
    options = set(re.findall(r"--[a-z][a-z-]+", plain))
    assert "--help" in options
    assert len(plain.split()) > 40
