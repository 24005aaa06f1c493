"""Loading drafters of other formats: routes, choices, streaming, files that are not what they should be.

Catches: a format taken for another; a whole checkpoint in memory beside the model; loading arguments that are lost; a
drafter that is another one once it is saved in our own format; a pickle read unasked.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from dspark.conversion import FORMATS, SEMANTIC_FIELDS, Checkpoint, expected_tensors, open_checkpoint, read_record
from safetensors.torch import load_file, save_file

from dspark import DSparkConfig, DSparkDrafter
from dspark.hub import read_config
from dspark.hub import read_record as read_source
from tests import small
from tests.conftest import golden_root
from tests.conversion import peers

DEEPSPEC = sorted((golden_root() / "drafts").iterdir())
FLAT = next(path for path in DEEPSPEC if path.name.startswith("qwen3_vanilla_confmk"))
MUSE, SLIDING, REDUCED = "muse_mixed", "sf_dspark_yarn_sliding", "spec090_dspark_reduced_gated_noanchor"
load = DSparkDrafter.from_pretrained


def copy(folder: Path, to: Path, change: Any = None, **fields: Any) -> Path:
    """A copy with other fields in config.json (`...` removes one) and changed tensors."""
    shutil.copytree(folder, to, copy_function=shutil.copyfile)
    to.chmod(0o755)
    raw = {**json.loads((to / "config.json").read_text()), **fields}
    (to / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if value is not ...}))
    if change is not None:
        tensors = load_file(to / "model.safetensors")
        change(tensors)
        save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


def same(one: DSparkDrafter, other: DSparkDrafter) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


# --- routes -------------------------------------------------------------------------------------------------------


def test_registry_and_record_are_whole() -> None:
    assert all(entry.title for entry in FORMATS.values())
    record = read_source(peers.folder(MUSE))
    assert tuple(record.fields) == SEMANTIC_FIELDS
    assert record.missing == ["embedding", "LM head"]


@pytest.mark.parametrize("path", DEEPSPEC, ids=lambda path: path.name)
def test_expected_tensors_are_the_model_s(path) -> None:
    model = load(path)
    assert expected_tensors(model.config) == {name: tuple(t.shape) for name, t in model.state_dict().items()}


@pytest.mark.parametrize("changes", [
    {"draft_vocab_size": 18}, {"markov_head_type": "gated", "attention_bias": True, "fc_bias": True},
    {"markov_head_type": "rnn", "confidence_head_bias": False}, {"family": "llama", "markov_rank": 0},
    {"family": "gemma4", "share_embedding": False, "share_lm_head": False}, {"enable_confidence_head": False},
])  # fmt: skip
def test_own_folders_make_records_too(tmp_path, changes) -> None:
    model = small.drafter(**changes)
    model.save_pretrained(tmp_path)
    record = read_source(tmp_path)
    assert record.format == "dspark"
    assert expected_tensors(model.config) == {name: tuple(t.shape) for name, t in model.state_dict().items()}
    ours, theirs = model.config.to_dict(), record.to_config().to_dict()
    for config in (ours, theirs):
        config.pop("_name_or_path", None)
        config.pop("transformers_version", None)
    assert {key: theirs[key] for key in ours if key in theirs and key != "architectures"} == {
        key: value for key, value in ours.items() if key in theirs and key != "architectures"
    }


@pytest.mark.parametrize("name", peers.WITH_NUMBERS)
def test_saved_in_our_format_it_is_the_same_drafter(name, tmp_path) -> None:
    model = load(peers.folder(name))
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert same(model, again)
    assert again.dtype is model.dtype
    for field in ("attention_windows", "window_rule", "causal_in_block", "logit_scale", "embed_scale", "vocab_size",
                  "sample_from_anchor", "target_layer_ids", "rope_parameters", "num_target_layers"):  # fmt: skip
        assert getattr(again.config, field) == getattr(model.config, field)


ENGINE = {"dflash_config": {"mask_token_id": 510, "target_layer_ids": [1, 2, 4]}, "sample_from_anchor": True}


def test_flat_layout_of_engines(tmp_path) -> None:
    """What engines are served: DeepSpec's keys, some of them twice, the target's tables left out."""
    drop = ("embed_tokens.weight", "lm_head.weight")
    bare = copy(FLAT, tmp_path / "bare", lambda tensors: [tensors.pop(name) for name in drop], **ENGINE)
    record = read_source(bare)
    assert (record.format, record.missing) == ("flat", ["embedding", "LM head"])
    assert load(bare).config.share_embedding
    for name, start, rule in (("one", 1, False), ("zero", 0, True)):
        told = copy(FLAT, tmp_path / name, **{**ENGINE, "sample_from_anchor": ..., "logits_start": start})
        assert read_config(told).sample_from_anchor is rule
    with pytest.raises(ValueError, match="`sample_from_anchor` True and `logits_start` 1 disagree"):
        read_config(copy(FLAT, tmp_path / "two", **ENGINE, logits_start=1))
    other = {**ENGINE, "dflash_config": {"mask_token_id": 4, "target_layer_ids": [1, 2, 4]}}
    with pytest.raises(ValueError, match=r"`mask_token_id` 510, `dflash_config.mask_token_id` 4 .*disagree"):
        read_config(copy(FLAT, tmp_path / "mask", **other))
    backbone = copy(FLAT, tmp_path / "backbone", **ENGINE, architectures=["Qwen3ForCausalLM"])
    assert same(load(backbone), load(FLAT))


def test_flat_layout_with_windows_asks(tmp_path) -> None:
    raw = json.loads((FLAT / "config.json").read_text())
    layers = raw["num_hidden_layers"]
    fields = {"layer_types": ["sliding_attention"] * layers, "sliding_window": 16, "use_sliding_window": True}
    folder = copy(FLAT, tmp_path / "d", **ENGINE, **fields)
    with pytest.raises(ValueError, match=r"windows \[16.*different ways\. .*`window_rule`"):
        load(folder)
    chosen = {"attention_windows": [16] * layers, "window_rule": "per_slot_all", "causal_in_block": [True] * layers}
    config = load(folder, **chosen).config
    assert {name: getattr(config, name) for name in chosen} == chosen


def test_flat_layout_with_a_reduced_vocabulary(tmp_path) -> None:
    ids = torch.tensor([3, 4, 9, 100, 511])

    def reduce(tensors) -> None:
        tensors["d2t"] = ids - torch.arange(5)
        for name in ("lm_head.weight", "markov_head.markov_w2.weight"):
            tensors[name] = tensors[name][ids].clone()

    folder = copy(FLAT, tmp_path / "d", reduce, **ENGINE, draft_vocab_size=5)
    assert torch.equal(load(folder).draft_token_ids, ids)


def test_old_zlab_layout_with_windows_is_two_drafters(tmp_path) -> None:
    source = peers.folder("zlab010_dflash_swa_noncausal")
    inner = {"mask_token_id": 510, "target_layer_ids": [1, 3, 4]}
    old = copy(source, tmp_path / "d", block_size=8, dflash_config=inner)
    with pytest.raises(ValueError, match=r"older code ignores those, 0\.1\.0 follows them.*`attention_windows=None`"):
        load(old)
    assert load(old, attention_windows=None).config.window_rule is None
    assert load(old, attention_windows=[5, None], window_rule="per_slot_all").config.attention_windows == [5, None]


def test_two_formats_at_once_are_named(monkeypatch) -> None:
    twice = Checkpoint(
        "some/drafter", {"model_type": "muse_glimmer_assistant", "speculators_model_type": "dflash"}, None
    )
    with pytest.raises(ValueError, match=r"some/drafter could be speculators or muse: .*muse_glimmer_assistant"):
        read_record(twice)


@pytest.mark.parametrize(("config", "tensors", "words"), [
    ({"dspark_block_size": 5, "architectures": ["DeepseekV4X"]}, [], "embedded drafter.*dspark_block_size: 5"),
    ({"architectures": ["X"]}, ["mtp.0.main_proj.weight"], r"embedded drafter.*tensor mtp\.0\.main_proj\.weight"),
    ({"architectures": ["K3DSparkModel"]}, [], "latent attention.*architectures: K3DSparkModel"),
    ({"architectures": ["Qwen3DSparkModel"], "attention_sink_bias": True}, [], "sinks"),
    ({"architectures": ["Qwen3DSparkModel"], "rope_is_neox_style": False}, [], "interleaved"),
    ({"architectures": ["Qwen3DSparkModel"]}, ["log_snr_embed.fc1.weight"], "log-SNR"),
    ({"architectures": ["DFlashDraftModel"]}, ["hidden_correction.weight"], "DFly"),
    ({"architectures": ["Qwen3DSparkModel"]}, ["layers.0.self_attn.sinks"], "sinks"),
    ({"architectures": ["Qwen3DSparkModel"], "quantization_config": {"quant_method": "x"}}, [], "quantised"),
])  # fmt: skip
def test_relatives_that_are_other_models_are_refused(config, tensors, words) -> None:
    stored = dict.fromkeys(tensors)
    with pytest.raises(ValueError, match=f"some/drafter cannot be run as a DSpark drafter: .*{words}"):
        read_record(Checkpoint("some/drafter", config, stored))


def test_gated_queries_are_refused(tmp_path) -> None:
    def double(tensors) -> None:
        for name in [name for name in tensors if name.endswith("q_proj.weight")]:
            tensors[name] = torch.cat([tensors[name], tensors[name]])

    with pytest.raises(ValueError, match=r"output gate.*q_proj\.weight has twice the rows"):
        load(copy(FLAT, tmp_path / "d", double))


# --- arguments ----------------------------------------------------------------------------------------------------


def test_dtype_info_subfolder_and_name(tmp_path) -> None:
    shutil.copytree(peers.folder(REDUCED), tmp_path / "repo" / "inner", copy_function=shutil.copyfile)
    model, info = load(tmp_path / "repo", subfolder="inner", output_loading_info=True)
    assert model.dtype is torch.bfloat16
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.name_or_path == str(tmp_path / "repo")
    assert load(peers.folder(REDUCED), dtype=torch.float32).dtype is torch.float32
    assert load(peers.folder(REDUCED), attn_implementation="eager").config._attn_implementation == "eager"
    assert not model.training
    with pytest.raises(TypeError, match="blok_size"):
        load(peers.folder(REDUCED), blok_size=3)


def test_variant_and_shards(tmp_path) -> None:
    folder = copy(peers.folder(SLIDING), tmp_path / "d")
    (folder / "model.safetensors").rename(folder / "model.fp16.safetensors")
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        load(folder)
    assert same(load(folder, variant="fp16"), load(peers.folder(SLIDING)))


def test_cached_revision_loads_offline(tmp_path) -> None:
    """A download cache as huggingface_hub lays it out, with nothing on `main`."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repo = tmp_path / "models--tiny--drafter"
    shutil.copytree(peers.folder(SLIDING), repo / "snapshots" / commit, copy_function=shutil.copyfile)
    (repo / "refs").mkdir()
    (repo / "refs" / "v2").write_text(commit)
    how = {"cache_dir": tmp_path, "local_files_only": True}
    assert same(load("tiny/drafter", revision="v2", **how), load(peers.folder(SLIDING)))
    with pytest.raises(OSError, match=r"tiny/drafter|in the cached files"):
        load("tiny/drafter", **how)


def test_config_class_reads_foreign_configs() -> None:
    assert DSparkConfig.get_config_dict(peers.folder(SLIDING))[0]["window_rule"] == "per_slot_ctx"
    assert DSparkConfig.from_pretrained(peers.folder(SLIDING)).attention_windows == [6, None]


# --- other files --------------------------------------------------------------------------------------------------


def test_gguf_by_file_by_folder_and_by_name(tmp_path) -> None:
    file = peers.folder("gguf_dflash") / "drafter.gguf"
    assert same(load(file), load(peers.folder("gguf_dflash")))
    for name in ("one.gguf", "two.gguf"):
        shutil.copyfile(file, tmp_path / name)
    with pytest.raises(ValueError, match=r"several GGUF files: one\.gguf, two\.gguf\. Name one with `gguf_file`"):
        load(tmp_path)
    assert same(load(tmp_path, gguf_file="two.gguf"), load(file))
    with pytest.raises(OSError, match=r"no file three\.gguf"):
        load(tmp_path, gguf_file="three.gguf")


def test_gguf_without_its_package_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match="needs the package `gguf`: pip install gguf"):
        load(peers.folder("gguf_dflash"))


def test_quantised_gguf_is_dequantised(tmp_path) -> None:
    source = gguf.GGUFReader(str(peers.folder("gguf_dflash") / "drafter.gguf"))
    writer = gguf.GGUFWriter(str(tmp_path / "q8.gguf"), "dflash")
    for name, field in source.fields.items():
        if not name.startswith(("GGUF.", "general.architecture")):
            kinds = field.types
            writer.add_key_value(name, field.contents(), kinds[0], *([kinds[1]] if len(kinds) > 1 else []))
    exact = load(peers.folder("gguf_dflash"), dtype=torch.float32).state_dict()
    for part in source.tensors:
        numbers = gguf.quants.dequantize(part.data, part.tensor_type)
        kind = gguf.GGMLQuantizationType.Q8_0 if numbers.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(part.name, gguf.quants.quantize(numbers, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = load(tmp_path, dtype=torch.float32)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, exact[name], atol=0.02, rtol=0.02)
    assert read_source(tmp_path).tensors["fc.weight"].transform == "dequantised from Q8_0"


def test_training_state_is_read_only_when_allowed(tmp_path) -> None:
    """A SpecForge training checkpoint: the weights under `draft_state_dict` of a pickle, wrapped names and all."""
    folder = copy(peers.folder(SLIDING), tmp_path / "d")
    tensors = load_file(folder / "model.safetensors")
    state = {f"_orig_mod.{name}": tensor for name, tensor in tensors.items()}
    torch.save({"draft_state_dict": state, "epoch": 3}, folder / "training_state.pt")
    assert same(load(folder), load(peers.folder(SLIDING)))  # safetensors first
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"training_state\.pt: a pickle, which can run code.*`allow_pickle=True`"):
        load(folder)
    assert same(load(folder, allow_pickle=True), load(peers.folder(SLIDING)))


def test_pickle_with_code_does_not_run_even_when_allowed() -> None:
    if "pickle_sentinel" in peers.CORRUPT:
        with pytest.raises(OSError, match=r"pytorch_model\.bin cannot be read as plain tensors"):
            load(peers.ROOT / "corrupt" / "pickle_sentinel", allow_pickle=True)


def test_own_index_may_not_leave_its_folder(tmp_path) -> None:
    small.drafter().save_pretrained(tmp_path / "d", max_shard_size="8KB")
    index = tmp_path / "d" / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    raw["weight_map"]["fc.weight"] = "../outside.safetensors"
    index.write_text(json.dumps(raw))
    shutil.copyfile(next((tmp_path / "d").glob("model-*")), tmp_path / "outside.safetensors")
    with pytest.raises(ValueError, match=r"sends tensors to '\.\./outside\.safetensors'.*nothing was opened"):
        load(tmp_path / "d")


@pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"fc.weight": 3}}'])
def test_damaged_index_is_named(tmp_path, index) -> None:
    folder = copy(peers.folder(SLIDING), tmp_path / "d")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises((OSError, ValueError), match=r"model\.safetensors\.index\.json"):
        load(folder)


def test_integers_in_place_of_weights_are_refused(tmp_path) -> None:
    def spoil(tensors) -> None:
        tensors["fc.weight"] = torch.zeros(tensors["fc.weight"].shape, dtype=torch.int8)

    with pytest.raises(ValueError, match=r"wrong dtypes: fc\.weight is int8"):
        load(copy(peers.folder(SLIDING), tmp_path / "d", spoil))


def test_tensors_are_read_one_at_a_time(monkeypatch) -> None:
    """Headers only until transformers asks for a tensor; none is kept by the record."""
    checkpoint = open_checkpoint(
        peers.folder(SLIDING), json.loads((peers.folder(SLIDING) / "config.json").read_text())
    )
    record = read_record(checkpoint)
    tensor = record.tensors["fc.weight"]
    assert tensor[...] is not tensor[...]
    assert tensor.file == "model.safetensors"
    assert (tensor.dtype, tensor.num_bytes) == ("bfloat16", 64 * 192 * 2)
