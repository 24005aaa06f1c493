"""Pushed to a Hub and loaded from it, by huggingface_hub's and transformers' own clients in a process of their own.

Catches: a repository that its own snippet cannot load, weights of an earlier push left behind, something sent although
something else was refused, a custom generation that needs `dspark` to be imported first.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dspark import DSparkDrafter
from dspark.cards import write_card
from dspark.publishing import code_files, write_code
from tests.cards import reports
from tests.publishing import hub

# Every door to a drafter at a place, against plain decoding; `dspark` is not imported before the first needs it.
DOORS = """
import json, sys
from transformers import AutoModelForCausalLM, AutoTokenizer

def doors(target, place):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(target), AutoTokenizer.from_pretrained(target)
    inputs = tokenizer("w1 w2 w3", return_tensors="pt")
    how = {"do_sample": False, "max_new_tokens": 12}
    plain = model.generate(**inputs, **how).tolist()
    there = {"custom_generate": place, "trust_remote_code": True, "return_dict_in_generate": True}
    outs = [model.generate(**inputs, **how, **there) for _ in range(2)]
    from transformers import AutoModel
    import dspark
    drafters = [AutoModel.from_pretrained(place), dspark.DSparkDrafter.from_pretrained(place)]
    texts = [out.sequences.tolist() for out in outs]
    texts += [model.generate(**inputs, **how, assistant_model=drafter).tolist() for drafter in drafters]
    return {
        "plain": plain, "texts": texts, "rounds": [out.speculation.num_rounds for out in outs],
        "classes": [type(drafter).__name__ for drafter in drafters],
    }

found = {}
"""
# Prints what a folder says where the package is missing.
WITHOUT_PACKAGE = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
try:
    model.generate(torch.tensor([[1, 2]]), custom_generate=sys.argv[2], trust_remote_code=True)
except ImportError as error:
    print(error)
"""
LOCAL = DOORS + "assert 'dspark' not in sys.modules; print(json.dumps(doors(*sys.argv[1:])))"
HUB = (
    DOORS
    + """
target, carded, bare, report, out = sys.argv[1:]
import dspark
from typer.testing import CliRunner
from dspark.cli import app

def command(*words):
    result = CliRunner().invoke(app, ["push", *words])
    return result.exit_code, result.stdout, result.stderr

found["push"] = command(carded, "me/first", "--json")
found["refused"] = command(bare, "me/refused")
drafter = dspark.DSparkDrafter.from_pretrained(carded)
found["again"] = command(carded, "me/second")
about = {"license": "mit"}
drafter.push_to_hub("me/second", about=about, revision="next", private=True, commit_message="one")
drafter.push_to_hub("me/second", reports=[report], about=about, max_shard_size="16KB", tags=["tiny"])
drafter.save_pretrained(out, push_to_hub=True, repo_id="me/third", commit_message="saved")
found["first"], found["second"] = doors(target, "me/first"), doors(target, "me/second")
print(json.dumps(found))
"""
)


class World(NamedTuple):
    """What a process found that pushed and loaded, and the Hub after it."""

    hub: hub.Hub
    found: dict[str, Any]
    drafter: Path


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Path, Path]:
    target, drafter = reports.pair(tmp_path_factory.mktemp("pair"))
    write_code(drafter)
    write_card(drafter, drafter / "README.md", license="mit", repo_id="me/first")
    return target, drafter


@pytest.fixture(scope="module")
def world(pair, tmp_path_factory) -> Any:
    folder = tmp_path_factory.mktemp("world")
    DSparkDrafter.from_pretrained(pair[1]).save_pretrained(folder / "bare")
    (folder / "saved").mkdir()
    write_card(pair[1], folder / "saved" / "README.md", license="mit")
    report = reports.evaluated(*pair, folder / "evaluation", "--temperature", 0, "--no-reliability")
    with hub.running() as there:
        environment = {"HF_ENDPOINT": there.endpoint, "HF_HOME": str(folder), "HF_TOKEN": hub.TOKEN}
        told = python(environment, "-c", HUB, *pair, folder / "bare", report, folder / "saved")
        yield World(there, json.loads(told.splitlines()[-1]), pair[1])


def python(changes: dict[str, str], *words: Any) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1", **changes}
    done = subprocess.run(
        [sys.executable, *map(str, words)], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def assert_all_open(doors: dict[str, Any]) -> None:
    assert doors["texts"] == [doors["plain"]] * 4
    assert min(doors["rounds"]) > 0
    assert doors["classes"] == ["DSparkDrafter"] * 2


def test_a_folder_is_its_repository(world) -> None:
    pushed = world.hub.repositories["me/first"]["main"]
    code, told, _ = world.found["push"]
    assert code == 0
    assert {entry["path"]: entry["bytes"] for entry in json.loads(told)["files"]} == {
        path: len(content) for path, content in pushed.items()
    }
    assert pushed.keys() == {"README.md", "config.json", "model.safetensors", *code_files()}
    for path, content in pushed.items():
        assert content == (world.drafter / path).read_bytes()
    assert world.hub.commits[0]["summary"] == "Upload DSpark drafter"


def test_every_door_opens_from_the_hub(world) -> None:
    assert_all_open(world.found["first"])
    assert_all_open(world.found["second"])


def test_a_drafter_is_pushed_from_memory(world) -> None:
    pushed = world.hub.repositories["me/second"]["main"]
    assert "model.safetensors" not in pushed, "the unsharded weights of the first push would win"
    assert {"model.safetensors.index.json", "report.json", *code_files()} < pushed.keys()
    card = pushed["README.md"].decode()
    assert "- tiny\n" in card
    assert "## Figures" in card
    assert 'from_pretrained("me/second"' in card
    other = world.hub.repositories["me/second"]["next"]
    assert "model.safetensors" in other
    assert "## Figures" not in other["README.md"].decode()
    assert [commit["summary"] for commit in world.hub.commits[1:3]] == ["Upload DSpark drafter", "one"]


def test_saving_can_push(world) -> None:
    assert world.hub.commits[-1]["summary"] == "saved"
    pushed = world.hub.repositories["me/third"]["main"]
    assert pushed["model.safetensors"] == world.hub.repositories["me/first"]["main"]["model.safetensors"]


def test_nothing_is_sent_when_something_is_refused(world) -> None:
    code, _, told = world.found["refused"]
    assert code == 2
    assert "has no card" in told
    assert "me/refused" not in world.hub.repositories


def test_a_local_folder_decodes_in_a_process_that_knows_no_dspark(pair, tmp_path) -> None:
    place = tmp_path / "folder.v1"
    place.symlink_to(pair[1])
    assert_all_open(json.loads(python({"HF_HOME": str(tmp_path)}, "-c", LOCAL, pair[0], place).splitlines()[-1]))


def test_without_the_package_the_one_to_install_is_named(pair, tmp_path) -> None:
    code = "import sys; sys.modules['dspark'] = None\n" + WITHOUT_PACKAGE
    assert "pip install dspark" in python({"HF_HOME": str(tmp_path)}, "-c", code, *pair)
