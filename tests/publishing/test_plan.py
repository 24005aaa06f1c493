"""What a push would send and what it refuses, each by file and line.

Catches: a home folder, a user name or a token in a public repository; a pickle; a folder no one can load; a plan that
changes what it looks at.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark import DSparkDrafter
from dspark.cards import write_card
from dspark.publishing import code_files, plan_push
from dspark.publishing.findings import private_parts, shortened_paths
from dspark.scheduling import ThroughputCurve
from tests import small
from tests.cards import reports


@pytest.fixture
def folder(tmp_path) -> Path:
    """A drafter's folder with nothing to refuse."""
    place = tmp_path / "my-drafter"
    small.drafter(target={"name": "some/target"}).save_pretrained(place)
    write_card(place, place / "README.md", license="mit")
    return place


def refusals(folder: Path) -> str:
    return "\n".join(plan_push(folder, "me/my-drafter").refusals)


def test_a_clean_folder(folder) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    plan = plan_push(folder, "me/my-drafter")
    assert plan.refusals == plan.left_out == []
    assert [file.path for file in plan.files] == sorted(
        ["README.md", "config.json", "model.safetensors", *code_files()]
    )
    assert plan.size == sum(len(file.read()) for file in plan.files)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_the_shipped_drafter_could_be_pushed() -> None:
    shipped = Path(__file__).parents[2] / "model_cards" / "smollm2-135m-instruct-dspark"
    plan = plan_push(shipped, "owner/name")
    assert plan.refusals == plan.left_out == []
    assert not [file.note for file in plan.files if file.note]


def test_what_is_no_part_of_a_drafter_stays(folder) -> None:
    (folder / "checkpoint-20").mkdir()
    (folder / "checkpoint-20" / "optimizer.pt").write_bytes(b"1")
    (folder / "events.log").write_text("hello")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("/home/me/x")
    (folder / "acceptance.png").write_bytes(b"png")
    plan = plan_push(folder)
    assert plan.left_out == ["checkpoint-20/optimizer.pt", "events.log"]
    assert "acceptance.png" in [file.path for file in plan.files]
    assert not plan.refusals


def test_no_card(folder) -> None:
    (folder / "README.md").unlink()
    assert refusals(folder) == (
        "my-drafter has no card (README.md). Write one: `dspark card my-drafter --report report.json`."
    )


@pytest.mark.parametrize(("text", "words"), [
    ("# Hello\n", "The card names no base_model and no license"),
    ("---\nlicense: mit\n---\n", "The card names no base_model"),
    ("---\nlicense: [\n---\n", "is not YAML"),
])  # fmt: skip
def test_a_card_that_is_none(folder, text, words) -> None:
    (folder / "README.md").write_text(text)
    assert words in refusals(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "draft.pt", "training.pth", "x.pkl", "model.ckpt"])
def test_pickles(folder, name) -> None:
    torch.save({}, folder / name)
    assert f"{name} is a pickle" in refusals(folder)


@pytest.mark.parametrize(("text", "what"), [
    ("trained on /home/ana/data.jsonl", "a local path: /home/ana/data.jsonl"),
    ("see `/root/run/out`", "a local path: /root/run/out"),
    ("(/mnt/disk/a b)", "a local path: /mnt/disk/a"),
    ("C:\\Users\\ana\\data", "a local path"),
    ("~/models/x", "a local path: ~/models/x"),
    ("file:///etc/x", "a local path: file:///etc/x"),
    ("hf_abcdefghijklmnopqrstuv", "a Hugging Face token: hf_abc..."),
    ("ghp_" + "a" * 36, "a GitHub token: ghp_aa..."),
    ("AKIA" + "B" * 16, "an AWS key: AKIABB..."),
    ("-----BEGIN RSA PRIVATE KEY-----", "a private key"),
])  # fmt: skip
def test_private_texts_are_refused_with_their_line(folder, text, what) -> None:
    lines = (folder / "README.md").read_text().splitlines()
    (folder / "README.md").write_text("\n".join([*lines, text]))
    assert f"README.md, line {len(lines) + 1} holds {what}" in refusals(folder)
    (folder / "README.md").write_text("\n".join(lines))
    (folder / "report.json").write_text(json.dumps({"x": text}))
    assert "report.json, line 1 holds" in refusals(folder)


@pytest.mark.parametrize("text", [
    "https://huggingface.co/some/target/tree/main", "and/or/not", "1.5/1.2/1.1", "see [x](docs/a.md)", "a / b / c",
    "torch.float32", "`dspark eval`, 2026-11-29", "x plain / y plain", "<br/>text</b>", "arXiv 2607.05147",
    "hf_transfer", "gsm8k 2/2, mbpp 2/2", "tokens/s/GPU",
])  # fmt: skip
def test_public_texts_pass(text) -> None:
    assert list(private_parts(text, ["ana"])) == []


def test_user_names_are_found_as_whole_words(folder, monkeypatch) -> None:
    monkeypatch.setattr("getpass.getuser", lambda: "annabel")
    (folder / "report.json").write_text('{"by": "annabel", "of": "annabella"}')
    assert refusals(folder) == "report.json, line 1 holds a user name: annabel. Take it out and push again."
    assert not plan_push(folder, "annabel/my-drafter").refusals  # it is public there


def test_the_training_record_loses_its_folders(folder) -> None:
    told = {"command": ["/home/ana/venv/bin/dspark", "train", "--data", "/home/ana/a b/x.jsonl"], "steps": 3}
    (folder / "training.json").write_text(json.dumps(told))
    plan = plan_push(folder)
    sent = next(file for file in plan.files if file.path == "training.json")
    assert not [reason for reason in plan.refusals if "/home" in reason]
    assert "/home" not in sent.read().decode()
    assert json.loads(sent.read())["command"][0] == "dspark"
    assert sent.note == "local paths shortened to their last part"
    assert json.loads((folder / "training.json").read_text()) == told
    assert shortened_paths(b'{"steps": 3}') is None


def test_a_folder_that_does_not_load(folder) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["fc.weight"]
    save_file(tensors, folder / "model.safetensors")
    assert re.search(r"does not load as a drafter: .*fc\.weight", refusals(folder))


def test_numbers_that_are_not_finite(folder) -> None:
    model = DSparkDrafter.from_pretrained(folder)
    model.fc.weight.data[0, 0] = float("nan")
    model.save_pretrained(folder)
    assert "NaN or infinite numbers in fc.weight" in refusals(folder)


def test_broken_json_and_adapters(folder) -> None:
    (folder / "report.json").write_text("{")
    assert "report.json is not JSON" in refusals(folder)
    (folder / "adapter_config.json").write_text("{}")
    assert "is a PEFT adapter, not a drafter" in refusals(folder)


def test_a_curve_goes_along(folder, tmp_path) -> None:
    curve = ThroughputCurve()
    curve.learn(1, 0.01)
    curve.save(tmp_path / "mine.json")
    plan = plan_push(folder, curve=tmp_path / "mine.json")
    sent = next(file for file in plan.files if file.path == "curve.json")
    assert sent.read() == (tmp_path / "mine.json").read_bytes()
    (tmp_path / "mine.json").write_text("{}")
    with pytest.raises(ValueError, match="curve"):
        plan_push(folder, curve=tmp_path / "mine.json")


def test_the_command_only_looks(folder) -> None:
    code, told = reports.run("push", folder, "me/my-drafter", "--dry-run")
    assert code == 0
    assert "custom_generate/generate.py" in told
    assert "added" in told
    (folder / "README.md").unlink()
    (folder / "x.pkl").write_bytes(b"1")
    code, told = reports.run("push", folder, "me/my-drafter", "--dry-run", "--json")
    assert code == 2
    assert len(json.loads(told)["refused"]) == 2
    assert reports.run("push", folder / "nothing", "me/x", "--dry-run")[0] == 2


def test_a_drafter_with_adapters_is_not_pushed(folder) -> None:
    pytest.importorskip("peft")
    from dspark.training import AdapterShape, adapt

    drafter = DSparkDrafter.from_pretrained(folder)
    adapt(drafter, AdapterShape("lora", 2))
    with pytest.raises(ValueError, match="carries adapters"):
        drafter.push_to_hub("me/x")
