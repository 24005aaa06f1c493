"""`dspark train --peft`: an adapter's folder that loads like a drafter, exact resuming, early refusals.

Catches: a folder without the drafter's place or the note of it, a resumed run that starts afresh, a drafter to start
from that is changed, options that are silently without effect.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

pytest.importorskip("peft")

from dspark import DSparkDrafter
from dspark.peft_layers import carries_adapters
from tests.training import tiny

from . import words
from .words import run


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return words.target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def base(target, tmp_path_factory) -> Path:
    """A drafter to start from."""
    folder = tmp_path_factory.mktemp("base")
    code, _, stderr = run(
        "train", "--target", target, "--data", tiny.write_answers(folder / "answers.jsonl", 8), "--out",
        folder / "drafter", "--layers", 1, "--block-size", 3, "--rank", 4, "--anchors", 4, "--steps", 2, "--device",
        "cpu", "--draft-vocab-size", 40, "--save-every", 0,
    )  # fmt: skip
    assert code == 0, stderr
    return folder / "drafter"


def command(target, base, folder, name: str, *more):
    return (
        "train", "--target", target, "--data", tiny.write_answers(folder / "answers.jsonl", 12), "--init", base,
        "--out", folder / name, "--anchors", 4, "--batch-size", 4, "--steps", 6, "--save-every", 2, "--keep", 3,
        "--device", "cpu", "--lr", 1e-2, "--log-every", 2, *more,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["lora", "dora", "ia3"])
def test_an_adapter_is_trained_that_loads_like_a_drafter(target, base, tmp_path, kind) -> None:
    before = (base / "model.safetensors").read_bytes()
    options = () if kind == "ia3" else ("--peft-rank", 4, "--peft-alpha", 8)
    code, stdout, stderr = run(*command(target, base, tmp_path, "adapter", "--peft", kind, *options, "--json"))
    assert code == 0, stderr
    assert "M trained)" in stderr
    assert "tau" in stderr
    assert json.loads(stdout)["steps"] == 6
    names = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors", "training.json"}
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)
    assert {"draft_vocab_hash", "drafter_hash"} < config["auto_mapping"].keys()
    told = json.loads((tmp_path / "adapter" / "training.json").read_text())
    assert (told["request"]["adapter"]["kind"], told["request"]["start_from"]) == (kind, str(base))
    assert told["request"]["adapter"]["rank"] == (None if kind == "ia3" else 4)
    drafter = DSparkDrafter.from_pretrained(tmp_path / "adapter")
    assert carries_adapters(drafter)
    untouched = DSparkDrafter.from_pretrained(base)
    assert not torch.equal(drafter.markov_head.markov_w2.weight, untouched.markov_head.markov_w2.weight)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    ids, greedy = torch.tensor([[4, 10, 11, 5]]), {"do_sample": False, "max_new_tokens": 8}
    assert torch.equal(model.generate(ids, assistant_model=drafter, **greedy), model.generate(ids, **greedy))
    assert (base / "model.safetensors").read_bytes() == before


def test_resumed_command_equals_uninterrupted_one(target, base, tmp_path) -> None:
    peft = ("--peft", "lora", "--peft-rank", 4, "--peft-targets", "q_proj, fc")
    assert run(*command(target, base, tmp_path, "whole", *peft))[0] == 0
    assert run(*command(target, base, tmp_path, "cut", *peft))[0] == 0
    checkpoints = tmp_path / "cut-checkpoints"
    for step in (4, 6):
        for path in sorted((checkpoints / f"checkpoint-{step}").iterdir()):
            path.unlink()
        (checkpoints / f"checkpoint-{step}").rmdir()
    again = ("--resume", "--overwrite")
    code, _, stderr = run(*command(target, base, tmp_path, "cut", *again))
    assert (code, "adapter was {'kind': 'lora'" in stderr) == (2, True)
    code, _, stderr = run(*command(target, base, tmp_path, "cut", *again, *peft[:3], 8, *peft[4:]))
    assert (code, "adapter was" in stderr) == (2, True)
    code, _, stderr = run(*command(target, base, tmp_path, "cut", *again, *peft))
    assert code == 0, stderr
    one, other = ((tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("whole", "cut"))
    assert one == other
    assert json.loads((tmp_path / "cut" / "training.json").read_text())["resumed_from"].endswith("checkpoint-2")


def test_the_best_adapter_is_kept(target, base, tmp_path) -> None:
    more = ("--peft", "lora", "--peft-rank", 4, "--held-out", 4, "--keep-best", "--eval-every", 2)
    code, stdout, stderr = run(*command(target, base, tmp_path, "adapter", *more, "--json"))
    assert code == 0, stderr
    assert json.loads(stdout)["best"]["step"] in (2, 4, 6)
    assert carries_adapters(DSparkDrafter.from_pretrained(tmp_path / "adapter"))


def test_stored_features_train_an_adapter(target, base, tmp_path) -> None:
    more = ("--peft", "ia3", "--features", tmp_path / "features")
    assert run(*command(target, base, tmp_path, "adapter", *more))[0] == 0
    assert carries_adapters(DSparkDrafter.from_pretrained(tmp_path / "adapter"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--init", "target", "--peft", "lora"), "name its folder or Hub id with --init"),
        (("--peft", "vera"), "must be one of lora, dora, ia3"),
        (("--peft", "ia3", "--peft-rank", "4"), "neither rank nor alpha"),
        (("--peft", "lora", "--peft-rank", "0"), "must be at least 1"),
        (("--peft-rank", "4"), "--peft-rank belongs to --peft"),
        (("--peft-targets", "fc"), "--peft-targets belongs to --peft"),
        (("--peft", "lora", "--peft-targets", "z_proj"), "Adapter target 'z_proj'"),
        (("--peft", "lora", "--peft-targets", "markov_w2"), "trains its heads whole already"),
        (("--peft", "lora", "--layers", "2"), "leave out --layers"),
    ],
)
def test_bad_requests_exit_with_2(target, base, tmp_path, options, message) -> None:
    code, _, stderr = run(*command(target, base, tmp_path, "adapter", *options))
    assert (code, message in stderr) == (2, True), stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["answers.jsonl"]


def test_an_adapter_is_no_drafter_to_start_from(target, base, tmp_path) -> None:
    assert run(*command(target, base, tmp_path, "adapter", "--peft", "ia3"))[0] == 0
    for more in ((), ("--peft", "ia3")):
        code, _, stderr = run(*command(target, tmp_path / "adapter", tmp_path, "next", *more))
        assert (code, "Merge it" in stderr) == (2, True), stderr
    drafter = DSparkDrafter.from_pretrained(tmp_path / "adapter").merge_and_unload()
    drafter.save_pretrained(tmp_path / "merged")
    assert run(*command(target, tmp_path / "merged", tmp_path, "next", "--peft", "ia3"))[0] == 0


def test_without_peft_it_says_how_to_get_it(target, base, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    code, _, stderr = run(*command(target, base, tmp_path, "adapter", "--peft", "lora"))
    assert (code, "pip install 'dspark[peft]'" in stderr) == (2, True)
