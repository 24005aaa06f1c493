"""`dspark bench round` and `dspark bench peers` end to end on tiny folders.

Catches: figures on stdout that are no JSON, figures of outputs that differ, a peer that is not the drafter given, a
wrong input that is found late or not at all.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from dspark import DSparkDrafter
from dspark.evaluation import peers as peers_module
from dspark.stats import STEPS
from tests.cli.test_bench import files, run  # noqa: F401 - a fixture
from tests.cli.test_commands import pair  # noqa: F401 - a fixture
from tests.scripted import drafter_config

NEW = 24
PEERS = """
def plain(target, tokenizer, input_ids, max_new_tokens):
    assert tokenizer.eos_token == "<eos>"
    return target.generate(input_ids, do_sample=False, max_new_tokens=max_new_tokens)

def liar(*args):
    ids = plain(*args)
    ids[0, -1] += 1
    return ids

answer = 42
"""


@pytest.fixture
def options(pair: dict[str, str], files: list[Path]) -> list[Any]:  # noqa: F811
    return [
        "--target", pair["target"], "--drafter", pair["drafter"], "--device", "cpu", "--prompts", files[0],
        "--prompts", files[1], "--max-new-tokens", NEW, "--repeats", 1, "--threads", torch.get_num_threads(),
    ]  # fmt: skip


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a module in the working directory."""
    name = f"peers_of_{os.getpid()}_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(PEERS)
    monkeypatch.chdir(tmp_path)
    return name


def test_round_in_json_and_in_a_file(options: list[Any], tmp_path: Path) -> None:
    code, stdout, stderr = run("round", *options, "--limit", 3, "--json", "--out", tmp_path / "round.json")
    assert code == 0, stderr
    found = json.loads(stdout)
    assert json.loads((tmp_path / "round.json").read_text()) == found
    assert (found["block"], found["prompts"], found["differing"]) == (7, 3, [])
    assert [line["name"] for line in found["lines"]] == [*STEPS, "between steps"]
    assert sum(line["share"] for line in found["lines"]) == pytest.approx(1)
    assert found["new_tokens"] == {"plain": [3 * NEW], "with drafts": [3 * NEW]}
    limit = found["accepted_length"] * found["plain_step"] / (found["verification"] + found["drafting"])
    assert found["limit"] == pytest.approx(limit)
    assert found["efficiency"] == pytest.approx(found["speedup"] / limit)
    assert found["about"]["machine"]["packed"] is True
    paths = {path["what"]: path for path in found["paths"]}
    assert paths["the target's linear layers"]["path"].startswith("packed")
    assert paths["the target's attention"]["reason"] == "2 query heads share a key head"
    assert paths["the sequential head"]["path"] == "vanilla, slot by slot"
    assert paths["dtype"] == {"what": "dtype", "path": "float32", "reason": "fp32 on a CPU, else bf16"}
    assert paths["threads"]["reason"] == "--threads"


def test_round_in_a_table(options: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPARK_OPS", "torch")
    code, stdout, stderr = run("round", *options, "--limit", 1, "--no-score", "--temperature", 1)
    assert code == 0, stderr
    for text in ("T = 1", "target's forward", "verification, T(8)", "efficiency", "ops: torch (the environment"):
        assert text in stdout
    assert "…" not in stdout


def test_round_whose_ids_differ_exits_1(options: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaForCausalLM

    generate = LlamaForCausalLM.generate

    def lying(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = generate(self, *args, **kwargs)
        if "assistant_model" in kwargs:
            output.sequences[0, -1] += 1
        return output

    monkeypatch.setattr(LlamaForCausalLM, "generate", lying)
    code, stdout, stderr = run("round", *options, "--limit", 1, "--json")
    assert (code, stdout) == (1, "")
    assert f"nothing was timed: prompt 1 at new token {NEW}" in stderr


def test_peers(options: list[Any], module: str, tmp_path: Path) -> None:
    ways = ("--peer", f"{module}:plain", "--peer", f"{module}:liar", "--policy", "fixed", "--policy", "auto")
    code, stdout, stderr = run("peers", *options, *ways, "--json", "--out", tmp_path / "report")
    assert code == 0, stderr
    found = json.loads(stdout)
    assert json.loads((tmp_path / "report" / "peers.json").read_text()) == found
    assert "| prompt lookup |" in (tmp_path / "report" / "peers.md").read_text()
    cells = {(cell["set"], cell["way"]): cell for cell in found["cells"]}
    names = ["plain", "prompt lookup", "fixed", "auto", f"{module}:plain", f"{module}:liar"]
    assert list(cells) == [(name, way) for name in ("chat", "code") for way in names]
    for (_, way), cell in cells.items():
        assert cell["prompts"] == 2
        if way == f"{module}:liar":
            assert (cell["outputs"], cell["over_plain"], cell["tokens_per_second"]) == ("differs", None, None)
            assert cell["differing"][0] == {"prompt": 0, "new_token": NEW - 1}
        else:
            assert (cell["outputs"], cell["new_tokens"]) == ("equal", 2 * NEW)
            assert cell["over_plain"] > 0
    code, stdout, _ = run("peers", *options, "--policy", "fixed", "--prompt-lookup", 0, "--limit", 1)
    assert code == 0
    assert "prompt lookup" not in stdout
    assert "1.00 (1.00, 1.00)" in stdout


def test_transformers_own_dflash_runs_the_same_drafter(options: list[Any], tmp_path: Path) -> None:
    folder = options[1]
    # All logits alike: the first token is written and, of a block, drafted each time, so both accept whole blocks.
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.nn.init.zeros_(target.lm_head.weight)
    target.config.update({"eos_token_id": 5, "pad_token_id": 6})
    target.generation_config = GenerationConfig(eos_token_id=5, pad_token_id=6)
    target.save_pretrained(tmp_path / "target")
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "target")
    fields = {"markov_rank": 0, "markov_head_type": "none", "enable_confidence_head": False, "block_size": 6}
    DSparkDrafter(drafter_config(target, sample_from_anchor=False, **fields)).save_pretrained(tmp_path / "dflash")
    chosen = ["--target", tmp_path / "target", "--policy", "fixed", "--prompt-lookup", 0, "--json"]
    code, stdout, stderr = run("peers", *options, *chosen, "--dflash", tmp_path / "dflash")
    assert code == 0, stderr
    per_pass = {cell["way"]: cell["tokens_per_pass"] for cell in json.loads(stdout)["cells"] if cell["set"] == "chat"}
    assert per_pass["plain"] == 1.0
    # The prompt's pass, then passes of 5 drafts and a token of the target's own.
    assert per_pass["transformers DFlash"] == per_pass["fixed, DFlash's drafter"] == NEW / (1 + -(-(NEW - 1) // 6))


def test_a_policy_whose_ids_differ_exits_1(options: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    behind = peers_module._behind
    calls = []

    def lying(ids: Any, result: Any) -> list[int]:
        calls.append(0)
        found = behind(ids, result)
        return found[:-1] if len(calls) == 2 else found  # the second way's first text

    monkeypatch.setattr(peers_module, "_behind", lying)
    code, stdout, _ = run("peers", *options, "--limit", 1, "--policy", "fixed", "--prompt-lookup", 0)
    assert code == 1
    assert f"chat, fixed: differs from plain generate in 1 of 1 prompts; prompt 1 at new token {NEW}." in stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("round", "--out", "no-such-folder/x.json"), "cannot be written"),
        (("round", "--max-new-tokens", 4), "No round verified all 7 drafts"),
        (("round", "--prompts", "no.jsonl"), "no.jsonl"),
        (("peers", "--policy", "greedy"), "`policy` must be one of"),
        (("peers", "--curve", "no.json"), "There is no curve file no.json"),
        (("peers", "--peer", "nothing"), "--peer is written module:function, got 'nothing'"),
        (("peers", "--peer", "no_such_module:f"), "no_such_module cannot be imported"),
        (("peers", "--peer", "{module}:none"), "has no function 'none'"),
        (("peers", "--peer", "{module}:answer"), "has no function 'answer'"),
        (("peers", "--dflash", "{drafter}"), "`sample_from_anchor`"),
        (("peers", "--dflash", "no/such/folder"), "no/such/folder"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_bad_input_exits_2(options: list[Any], module: str, words: tuple[Any, ...], message: str) -> None:
    filled = [str(word).format(module=module, drafter=options[3]) for word in words[1:]]
    code, _, stderr = run(words[0], *options, *filled)
    assert code == 2
    assert message in stderr


def test_transformers_without_dflash_is_told_of(options: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "MADE_FOR_DFLASH", "no_such_option")
    code, _, stderr = run("peers", *options, "--dflash", "anything")
    assert code == 2
    assert "has no DFlash generator" in stderr
