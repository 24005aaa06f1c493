"""Adapter folders: where the drafter is looked for, what is refused and how it is told, what another base means.

Catches: an adapter put on a drafter with another vocabulary map, a pickle that is opened, a foreign or damaged file
that loads in part, a message that names neither file nor tensor, a drafter left half changed.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

peft = pytest.importorskip("peft")

from dspark import DSparkConfig, DSparkDrafter  # noqa: E402
from dspark.peft_layers import carries_adapters  # noqa: E402
from tests.golden import common  # noqa: E402
from tests.peft.wrapped import KINDS, VOCAB, base_folder, drafts, same_drafts, shaken  # noqa: E402
from tests.training import tiny  # noqa: E402

load = DSparkDrafter.from_pretrained
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture
def base(tmp_path) -> Path:
    return base_folder(tmp_path / "base", tiny.llama(), draft_vocab=VOCAB)


@pytest.fixture
def folder(base) -> Path:
    """An adapter with a note of its base."""
    return written(base, base.parent / "adapter")


def written(base, folder, config=None, *, by_peft: bool = False) -> Path:
    model = shaken(peft.get_peft_model(load(base), config or KINDS["lora"]()), seed=1)
    (model if by_peft else model.get_base_model()).save_pretrained(folder)
    return folder


def edit_config(folder: Path, **changes) -> None:
    path = folder / CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_tensors(folder: Path, change) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


# --- another base ---------------------------------------------------------------------------------------------------


def refused_by(base, folder, message: str) -> None:
    """Both ways of loading onto a given drafter refuse, and ours changes nothing."""
    with pytest.raises(ValueError, match=message):
        peft.PeftModel.from_pretrained(load(base), folder)
    drafter = load(base)
    names = drafter.state_dict().keys()
    with pytest.raises(ValueError, match=message):
        drafter.load_adapter(folder)
    assert drafter.state_dict().keys() == names


def test_another_map_of_the_same_size_is_refused(base, folder, tmp_path) -> None:
    other = base_folder(tmp_path / "other", tiny.llama(), draft_vocab=[2, *range(6, 92, 2)])
    note = json.loads((folder / CONFIG).read_text())["auto_mapping"]
    assert note["draft_vocab_hash"] == load(base).config.target["draft_vocab_hash"]
    refused_by(other, folder, r"draft_vocab_hash is \w{16} here, and was \w{16} on the drafter it was trained on")
    refused_by(base_folder(tmp_path / "whole", tiny.llama()), folder, "draft_vocab_hash is None here")
    shutil.rmtree(base)
    shutil.copytree(other, base)  # the map was made anew under the same name
    with pytest.raises(ValueError, match="draft_vocab_hash"):
        load(folder)


def test_a_map_is_compared_without_a_note_too_while_the_base_is_there(base, tmp_path) -> None:
    """PEFT's own save has no place for a note."""
    folder = written(base, tmp_path / "plain", by_peft=True)
    assert "draft_vocab_hash" not in json.loads((folder / CONFIG).read_text())["auto_mapping"]
    other = base_folder(tmp_path / "other", tiny.llama(), draft_vocab=[2, *range(6, 92, 2)])
    refused_by(other, folder, "draft_vocab_hash is")
    assert carries_adapters(load(folder))
    shutil.rmtree(base)
    assert carries_adapters(peft.PeftModel.from_pretrained(load(other), folder))  # nothing left to compare with


def test_other_weights_warn(base, folder, caplog) -> None:
    for change, expected in ((0.0, 0), (0.1, 1)):
        drafter = load(base)
        with torch.no_grad():
            drafter.fc.weight.add_(change)
        drafter.load_adapter(folder)
        assert caplog.text.count("on a drafter with other weights") == expected


# --- where the drafter is -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["working directory", "adapter's folder", "beside it"])
def test_relative_paths(base, folder, tmp_path, monkeypatch, place) -> None:
    expected = drafts(load(folder), tiny.llama())
    name = {"working directory": "deep/base", "adapter's folder": "inside/base", "beside it": "base"}[place]
    parent = {"working directory": tmp_path, "adapter's folder": folder, "beside it": tmp_path}[place]
    if place != "beside it":
        (parent / name).parent.mkdir()
        base.rename(parent / name)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path if place == "working directory" else tmp_path / "elsewhere")
    edit_config(folder, base_model_name_or_path=name)
    for source in (folder, str(folder)):
        assert same_drafts(drafts(load(source), tiny.llama()), expected)


def test_arguments_reach_drafter_and_adapter(base, tmp_path) -> None:
    written(base, tmp_path / "all" / "first")
    drafter, info = load(
        tmp_path / "all", subfolder="first", adapter_name="mine", dtype=torch.bfloat16, block_size=3,
        attn_implementation="eager", output_loading_info=True,
    )  # fmt: skip
    assert (drafter.active_adapters(), drafter.config.block_size) == (["mine"], 3)
    assert {parameter.dtype for parameter in drafter.parameters()} == {torch.bfloat16}
    assert not info["missing_keys"]


def test_an_adapter_of_a_drafter_in_another_format(tmp_path) -> None:
    """PEFT reads the base's config by its class when it saves."""
    base = common.golden_root() / "drafts" / common.names("vectors")[0]
    for by_peft in (True, False):
        folder = written(base, tmp_path / str(by_peft), peft.LoraConfig(r=2, target_modules=["fc"]), by_peft=by_peft)
        drafter = load(folder)
        assert carries_adapters(drafter)
        assert drafter.merge_and_unload().state_dict().keys() == load(base).state_dict().keys()
    ours, theirs = DSparkConfig.from_pretrained(base).to_dict(), load(base).config.to_dict()
    assert all(ours[name] == theirs[name] for name in ours.keys() - {"_name_or_path", "architectures", "dtype"})


# --- what is wrong with a folder ------------------------------------------------------------------------------------


def drop_base(folder, base) -> None:
    shutil.rmtree(base)


def only_pickle(folder, base) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "adapter_model.bin")
    (folder / WEIGHTS).unlink()


def cut_short(folder, base) -> None:
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:-50])


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (drop_base, OSError, r"The drafter of the adapter .*adapter is '.*base' .* cannot be loaded"),
        (lambda f, b: edit_config(f, base_model_name_or_path=None), ValueError, "does not say which drafter"),
        (lambda f, b: edit_config(f, base_model_name_or_path=str(f)), ValueError, "names its own folder"),
        (only_pickle, OSError, "only adapter_model.bin, a pickle, which can run code"),
        (lambda f, b: (f / WEIGHTS).unlink(), OSError, "has no adapter_model.safetensors"),
        (cut_short, OSError, "damaged or was cut short"),
        (lambda f, b: (f / CONFIG).write_text("{"), ValueError, "adapter_config.json of .* is not valid"),
        (lambda f, b: edit_config(f, peft_type="MAGIC"), ValueError, "not valid .*MAGIC"),
        (lambda f, b: edit_config(f, peft_type="PROMPT_TUNING"), ValueError, "does not fit|not valid"),
    ],
)
def test_damaged_folders(base, folder, spoil, error, message) -> None:
    spoil(folder, base)
    with pytest.raises(error, match=message):
        load(folder)


def rename(tensors, old: str, new: str) -> None:
    for name in [name for name in tensors if old in name]:
        tensors[name.replace(old, new)] = tensors.pop(name)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: [t.pop(name) for name in list(t) if "markov_head" in name],
         r"missing tensors: markov_head\.markov_w1\.weight, markov_head\.markov_w2\.weight"),
        (lambda t: t.update({"base_model.model.extra.lora_A.weight": torch.zeros(2)}), "unexpected tensors: extra"),
        (lambda t: t.update({"base_model.model.fc.lora_A.weight": torch.zeros(4, 3)}),
         r"wrong shapes: fc\.lora_A\.weight is \(4, 3\), here \(4, 96\)"),
        (lambda t: rename(t, "layers.", "model.layers."),
         r"missing tensors: .* and \d+ more; unexpected tensors: model"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_named(base, folder, change, named) -> None:
    edit_tensors(folder, change)
    drafter = load(base)
    with pytest.raises(ValueError, match=rf"adapter does not fit DSparkDrafter .*{named}.*nothing was loaded"):
        drafter.load_adapter(folder)
    assert not carries_adapters(drafter)
    with pytest.raises(ValueError, match=named):
        load(folder)


def test_adapters_of_other_models_are_refused(base, tmp_path) -> None:
    target = tiny.llama()
    target.save_pretrained(tmp_path / "target")
    for task in (None, "CAUSAL_LM"):
        target = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type=task)
        peft.get_peft_model(target, config).save_pretrained(tmp_path / "foreign")
        with pytest.raises(ValueError, match=r"not (on )?a DSpark drafter"):
            load(tmp_path / "foreign")
        with pytest.raises(ValueError, match=r"not on a DSpark drafter|missing tensors.*unexpected tensors: model"):
            load(base).load_adapter(tmp_path / "foreign")


def test_adapters_are_not_stacked_or_renamed_over(base, folder, tmp_path) -> None:
    drafter = load(folder)
    with pytest.raises(ValueError, match="has an adapter 'default' already"):
        drafter.load_adapter(folder)
    with pytest.raises(ValueError, match="has an adapter 'default' already"):
        drafter.add_adapter(KINDS["ia3"]())
    with pytest.raises(OSError, match=r"has no adapter_config\.json"):
        drafter.load_adapter(base, "other")
    second = shutil.copytree(folder, tmp_path / "second")
    edit_config(second, base_model_name_or_path=str(folder))
    with pytest.raises(ValueError, match=r"which is an adapter itself\. Merge"):
        load(second)
    shutil.copytree(folder, base, dirs_exist_ok=True)
    with pytest.raises(ValueError, match="a drafter and an adapter in one folder"):
        load(base)


def test_without_peft_it_says_how_to_get_it(folder, monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(ImportError, match=r"pip install 'dspark\[peft\]'"):
        load(folder)


def test_targets_by_pattern_load_too(base, tmp_path) -> None:
    pattern = peft.LoraConfig(r=2, target_modules=r"fc|layers\.\d+\.mlp\.\w+_proj")
    folder = written(base, tmp_path / "pattern", pattern)
    assert sum("lora_A" in name for name in load(folder).state_dict()) == 7


def test_cached_repositories_load_offline(base, folder, tmp_path) -> None:
    """A download cache as huggingface_hub lays it out; the drafter is on a branch that the adapter names."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    for name, source, branch in (("drafter", base, "v2"), ("adapter", folder, "main")):
        repo = tmp_path / "cache" / f"models--tiny--{name}"
        inner = "" if name == "drafter" else "code"
        shutil.copytree(source, repo / "snapshots" / commit / inner, dirs_exist_ok=True)
        (repo / "refs").mkdir()
        (repo / "refs" / branch).write_text(commit)
    expected = drafts(load(folder), tiny.llama())
    stored = tmp_path / "cache" / "models--tiny--adapter" / "snapshots" / commit / "code"
    edit_config(stored, base_model_name_or_path="tiny/drafter", revision="v2")
    how = {"cache_dir": tmp_path / "cache", "local_files_only": True}
    assert same_drafts(drafts(load("tiny/adapter", subfolder="code", **how), tiny.llama()), expected)
    edit_config(stored, revision=None)
    with pytest.raises(OSError, match=r"drafter of the adapter tiny/adapter is 'tiny/drafter'"):
        load("tiny/adapter", subfolder="code", **how)
    with pytest.raises(OSError, match="in the cached files"):
        load("tiny/adapter", **how)
