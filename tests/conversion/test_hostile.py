"""Checkpoints that somebody damaged with care: each is refused in words that name the file, field or tensor.

Catches: a text that counts as True, a key whose second value wins, a shape or a size that is reckoned with before it
is checked, numbers that no layer can hold, choices of the caller that get lost.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from dspark.conversion import convert
from safetensors.torch import load_file, save_file

from dspark import DSparkDrafter
from dspark.hub import read_record
from tests import small
from tests.conversion import peers, toys

SPECULATORS, SPECFORGE, ZLAB = "spec090_dspark_bf16", "sf_dspark_vanilla_confmk", "zlab010_dflash"
GGUF = "gguf_dflash"


def copied(source: Path, to: Path) -> Path:
    shutil.copytree(source, to, copy_function=shutil.copyfile)
    to.chmod(0o755)
    return to


def with_config(source: Path, to: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    folder = copied(source, to)
    raw = json.loads((folder / "config.json").read_text())
    change(raw)
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def with_tensors(source: Path, to: Path, **tensors: torch.Tensor) -> Path:
    folder = copied(source, to)
    file = folder / "model.safetensors"
    save_file({**load_file(file), **{name: tensor.contiguous() for name, tensor in tensors.items()}}, file)
    return folder


def refused(folder: Path, words: str) -> None:
    """The same refusal by loading, by inspecting and by converting."""
    with pytest.raises((ValueError, OSError), match=words):
        DSparkDrafter.from_pretrained(folder)
    with pytest.raises((ValueError, OSError), match=words):
        convert(folder, folder.with_name("out"), to="dspark")
    assert not folder.with_name("out").exists()


# --- JSON ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "words"), [
    ("[" * 200_000, "recursion"), ('{"block_size": ' + "9" * 5000 + "}", "4300 digits"),
    ('{"block_size": 3, "block_size": 4}', "the key 'block_size' is there twice"),
    ('{"name_or_path": "\\ud800"}', "surrogates not allowed"),
])  # fmt: skip
def test_json_that_cannot_be_meant(text: str, words: str, tmp_path) -> None:
    folder = toys.saved("vanilla", tmp_path / "d")
    own = (folder / "config.json").read_text()
    (folder / "config.json").write_text(own.replace("{", text[:-1] + ",", 1) if text.startswith("{") else text)
    refused(folder, rf"config\.json.*{words}.*Correct it, or download or save it again")


def test_an_index_with_a_key_twice(tmp_path) -> None:
    toys.drafter("vanilla").save_pretrained(tmp_path / "d", max_shard_size="20KB")
    index = tmp_path / "d" / "model.safetensors.index.json"
    text = index.read_text()
    assert '"fc.weight"' in text
    index.write_text(text.replace('"fc.weight"', '"fc.weight": "model-00001-of-00001.safetensors", "fc.weight"'))
    refused(tmp_path / "d", r"index\.json.*'fc\.weight' is there twice")


# --- fields -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "change", "words"), [
    (ZLAB, {"is_causal": "false"}, "`is_causal` must be true or false, got 'false'"),
    (ZLAB, {"use_sliding_window": "no"}, "`use_sliding_window` must be true or false"),
    (ZLAB, {"use_sliding_window": True, "sliding_window": "6", "layer_types": None}, "`sliding_window` must be a pos"),
    (ZLAB, {"use_sliding_window": True, "sliding_window": 6, "layer_types": None, "max_window_layers": "1"},
     "`max_window_layers` is '1': which layers slide"),
    (SPECULATORS, {"sliding_window_non_causal": "false"}, "`sliding_window_non_causal` must be true or false"),
    (SPECULATORS, {"sample_from_anchor": 1}, "`sample_from_anchor` must be true or false, got 1"),
    (SPECULATORS, {"draft_vocab_size": 128.0}, r"`draft_vocab_size` must be a positive integer, got 128\.0"),
    (SPECULATORS, {"aux_hidden_state_layer_ids": [True, 3, 5]}, "must be a list of integers"),
    (SPECFORGE, {"draft_vocab_size": "512"}, "`draft_vocab_size` must be a positive integer, got '512'"),
    (SPECFORGE, {"rms_norm_eps": 10**400}, "`rms_norm_eps` must be a positive number, got 1000"),
    (SPECFORGE, {"block_size": 2**40}, "`block_size` must be at most 4096"),
])  # fmt: skip
def test_values_of_another_kind(name: str, change: dict[str, Any], words: str, tmp_path) -> None:
    refused(with_config(peers.folder(name), tmp_path / "d", lambda raw: raw.update(change)), words)


@pytest.mark.parametrize(("change", "words"), [
    ({"quantization_config": True}, "quantization_config"),
    ({"block_size": 2**40}, "`block_size` must be at most 4096"),
    ({"target_layer_ids": [0, 1, 2**40], "num_target_layers": None}, "`target_layer_ids` must lie in"),
])  # fmt: skip
def test_values_of_our_own_format(change: dict[str, Any], words: str, tmp_path) -> None:
    refused(with_config(toys.saved("vanilla", tmp_path / "s"), tmp_path / "d", lambda raw: raw.update(change)), words)


def test_where_one_format_says_two_things(tmp_path) -> None:
    def rotate(raw: dict[str, Any]) -> None:
        parts = [{"rope_type": "default", "rope_theta": theta} for theta in (1e4, 1e6)]
        inner = raw["transformer_layer_config"]
        inner.pop("rope_theta", None)
        inner["rope_parameters"] = dict(zip(("sliding_attention", "full_attention"), parts, strict=True))

    refused(
        with_config(peers.folder(SPECULATORS), tmp_path / "d", rotate), "turns sliding and full layers differently"
    )

    def verifier(raw: dict[str, Any]) -> None:
        raw["speculators_config"]["verifier"]["architectures"] = 3
        raw["speculators_config"]["proposal_methods"] = [{"speculative_tokens": []}]

    assert read_record(with_config(peers.folder(SPECULATORS), tmp_path / "e", verifier)).format == "speculators"


# --- tensors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tensor", "value", "words"), [
    ("fc.weight", torch.tensor(1.0), r"fc\.weight with the shape \[\], and it must have 2 dimensions"),
    ("layers.0.self_attn.q_norm.weight", torch.tensor(1.0), "must have 1 dimension:"),
    ("logit_head.markov_head.markov_w1.weight", torch.zeros(512, 8, dtype=torch.int64), "with different numbers"),
])  # fmt: skip
def test_tensors_of_another_shape_or_kind(tensor: str, value: torch.Tensor, words: str, tmp_path) -> None:
    refused(with_tensors(peers.folder(SPECFORGE), tmp_path / "d", **{tensor: value}), words)


@pytest.mark.parametrize(("tensor", "value", "words"), [
    ("d2t", torch.tensor(3), "d2t must be 128 integers"), ("d2t", torch.zeros(128), "d2t must be 128 integers"),
    ("t2d", torch.tensor(True), "t2d must mark each of the 512 ids"), ("t2d", torch.zeros(512), "t2d must mark each"),
])  # fmt: skip
def test_maps_of_another_shape_or_kind(tensor: str, value: torch.Tensor, words: str, tmp_path) -> None:
    refused(with_tensors(peers.folder(SPECULATORS), tmp_path / "d", **{tensor: value}), words)


@pytest.mark.parametrize(("kind", "tensor", "value", "words"), [
    ("vanilla", "fc.weight", torch.zeros(32, 96, dtype=torch.int8), r"wrong dtypes: fc\.weight is int8"),
    ("vanilla", "fc.weight", torch.zeros(32, 96).to(torch.float8_e4m3fn), r"wrong dtypes: fc\.weight is F8_E4M3"),
    ("vanilla", "fc.weight", torch.full((32, 96), float("nan")), r"NaN or infinite numbers"),
    ("vanilla", "confidence_head.proj.weight", torch.tensor(1.0), r"wrong shapes: confidence_head\.proj\.weight"),
    ("reduced", "draft_token_ids", torch.arange(len(small.DRAFT_IDS)).float(), "draft_token_ids"),
    ("reduced", "draft_token_ids", torch.zeros(len(small.DRAFT_IDS), dtype=torch.int64), "strictly increasing"),
])  # fmt: skip
def test_tensors_of_our_own_format(kind: str, tensor: str, value: torch.Tensor, words: str, tmp_path) -> None:
    folder = with_tensors(toys.saved(kind, tmp_path / "s"), tmp_path / "d", **{tensor: value})
    if not torch.isfinite(value.float()).all():
        with pytest.raises(ValueError, match=words):
            DSparkDrafter.from_pretrained(folder)
        return
    refused(folder, words)


def test_a_message_has_no_end_of_names(tmp_path) -> None:
    source = toys.saved("vanilla", tmp_path / "s")
    folder = with_config(source, tmp_path / "d", lambda raw: raw.update(num_hidden_layers=500))
    with pytest.raises(ValueError, match=r"missing tensors: .* and \d{4} more") as caught:
        convert(folder, tmp_path / "out", to="dspark")
    assert len(str(caught.value)) < 5000


def test_a_path_that_is_no_utf_8_is_named(tmp_path) -> None:
    folder = toys.saved("vanilla", tmp_path / "s").rename(tmp_path / "bad\udcff")
    refused(folder, r"bad\\udcff.* is no UTF-8.*Rename the folder")


# --- pickles, which are read when the caller says so ---------------------------------------------------------------


@pytest.mark.parametrize(("change", "words"), [
    (lambda held: {1: held["fc.weight"]}, "holds no state dict"),
    (lambda held: {**held, "fc.weight": held["fc.weight"].to_sparse()}, r"holds fc\.weight not as plain numbers"),
    (lambda held: {**held, "fc.weight": held["fc.weight"].to("meta")}, r"holds fc\.weight not as plain numbers"),
])  # fmt: skip
def test_pickles_of_other_things(change: Callable[[Any], Any], words: str, tmp_path) -> None:
    folder = copied(peers.folder(SPECFORGE), tmp_path / "d")
    held = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(change(held), folder / "training_state.pt")
    with pytest.raises(ValueError, match=words):
        convert(folder, tmp_path / "out", to="dspark", allow_pickle=True)


def test_damaged_pickles_are_named(tmp_path) -> None:
    folder = copied(peers.folder(SPECFORGE), tmp_path / "d")
    (folder / "model.safetensors").unlink()
    file = folder / "training_state.pt"
    for zipped in (True, False):
        torch.save({"fc.weight": torch.zeros(4, 4)}, file, _use_new_zipfile_serialization=zipped)
        data = file.read_bytes()
        for at in range(0, len(data), max(1, len(data) // 40)):
            file.write_bytes(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
            with pytest.raises((OSError, ValueError), match=r"training_state\.pt|belongs? to another drafter"):
                DSparkDrafter.from_pretrained(folder, allow_pickle=True)


# --- GGUF ---------------------------------------------------------------------------------------------------------

KINDS = gguf.GGUFValueType


def with_keys(to: Path, *, tensors: dict[str, np.ndarray] | None = None, **keys: tuple[Any, Any, Any]) -> Path:
    """The peers' DFlash file with other keys (value, type, type of elements) and tensors."""
    reader = gguf.GGUFReader(peers.folder(GGUF) / "drafter.gguf")
    writer = gguf.GGUFWriter(to, "dflash")
    writer.kv_data[0].clear()
    held = {
        name: (part.contents(), part.types[0], part.types[-1] if part.types[0] == KINDS.ARRAY else None)
        for name, part in reader.fields.items() if not name.startswith("GGUF.")
    }  # fmt: skip
    for name, (value, kind, element) in {**held, **keys}.items():
        writer.add_key_value(name, value, kind, element)
    for tensor in reader.tensors:
        if tensor.name not in (tensors or {}):
            plain = None if tensor.tensor_type.name == "F32" else tensor.tensor_type
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=plain)
    for name, numbers in (tensors or {}).items():
        writer.add_tensor(name, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to


@pytest.mark.parametrize(("keys", "words"), [
    ({"dflash.attention.layer_norm_rms_epsilon": ("x", KINDS.STRING, None)}, "`rms_norm_eps` must be a positive"),
    ({"dflash.rope.freq_base": ("x", KINDS.STRING, None)}, "positive `rope_theta`"),
    ({"dflash.attention.sliding_window": ([1, 2], KINDS.ARRAY, KINDS.INT32)}, "sliding_window` must be a positive"),
    ({"dflash.attention.sliding_window_pattern": (4, KINDS.UINT32, None)}, "must be true or false for each of 2"),
    ({"dflash.attention.causal": (1, KINDS.UINT32, None)}, r"attention\.causal` must be true or false, got 1"),
    ({"tokenizer.ggml.tokens": (1.5, KINDS.FLOAT32, None)}, "must be a list of tokens"),
    ({"general.alignment": (0, KINDS.UINT32, None)}, "cannot be read as a GGUF file"),
])  # fmt: skip
def test_keys_of_another_kind(keys: dict[str, Any], words: str, tmp_path) -> None:
    file = with_keys(tmp_path / "d.gguf", **keys) if "general.alignment" not in keys else tmp_path / "d.gguf"
    if not file.exists():  # the writer itself would divide by it
        data = with_keys(file, **{"general.alignment": (64, KINDS.UINT32, None)}).read_bytes()
        at = data.index(b"general.alignment") + len(b"general.alignment") + 4
        file.write_bytes(data[:at] + bytes(4) + data[at + 4 :])
    refused(file, words)


@pytest.mark.parametrize(("tensors", "words"), [
    ({"d2t": np.zeros(0, np.int64)}, "d2t"), ({"d2t": np.zeros((3, 2), np.int64)}, "d2t must be 3 integers"),
    ({"d2t": np.array([1.0, 2.7], np.float32)}, "d2t must be 2 integers"),
    ({"fc.weight": np.ones((64, 192), np.int8)}, r"wrong dtypes: fc\.weight is int8"),
])  # fmt: skip
def test_gguf_tensors_of_another_kind(tensors: dict[str, Any], words: str, tmp_path) -> None:
    refused(with_keys(tmp_path / "d.gguf", tensors=tensors), words)


# --- choices of the caller ----------------------------------------------------------------------------------------


def test_windows_that_the_caller_decides_are_written(tmp_path) -> None:
    """A layout whose readers do not agree on windows leaves them to the caller; they were lost on the way."""
    source = tmp_path / "source"
    convert(toys.saved("vanilla", tmp_path / "own"), source, to="vllm")
    raw = json.loads((source / "config.json").read_text())
    raw |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "use_sliding_window": True}
    (source / "config.json").write_text(json.dumps(raw))
    choices = {"attention_windows": [5, None], "window_rule": "ctx_from_anchor", "causal_in_block": [True, False]}
    with pytest.raises(ValueError, match="pass `attention_windows`, `window_rule` and `causal_in_block`"):
        convert(source, tmp_path / "out", to="dspark")
    convert(source, tmp_path / "out", to="dspark", fields=choices, verify=True)
    config = DSparkDrafter.from_pretrained(tmp_path / "out").config
    assert {name: getattr(config, name) for name in choices} == choices
    with pytest.raises(ValueError, match="`attention_windows` has windows"):
        convert(source, tmp_path / "two", to="vllm", fields=choices)


@pytest.mark.parametrize(("fields", "words"), [
    ({"bogus": 1}, "`bogus` is no field"), ({"checkpoint": 1}, "`checkpoint` is no field"),
    ({"sample_from_anchr": True}, "Did you mean `sample_from_anchor`"), ({"draft_vocab": 3}, "`draft_vocab` is no"),
    ({"attention_windows": 3}, "`attention_windows` must have"), ({"block_size": "7"}, "`block_size` must be"),
    ({"draft_vocab_size": 5}, "`draft_vocab_size`"),
])  # fmt: skip
@pytest.mark.parametrize("name", [None, SPECFORGE])
def test_choices_that_cannot_be_are_named(name: str | None, fields: dict[str, Any], words: str, tmp_path) -> None:
    source = toys.saved("vanilla", tmp_path / "s") if name is None else peers.folder(name)
    with pytest.raises(ValueError, match=words):
        convert(source, tmp_path / "out", to="dspark", fields=fields)
    assert not (tmp_path / "out").exists()


def test_a_drafter_named_as_the_target_is_told_so(tmp_path) -> None:
    source = toys.saved("vanilla", tmp_path / "source")
    with pytest.raises(ValueError, match=r"cannot be used as the target: no causal LM.*Name the model") as caught:
        convert(source, tmp_path / "out", to="deepspec", target=source)
    assert len(str(caught.value)) < 600


def test_a_vocabulary_that_no_memory_holds_is_not_verified(tmp_path) -> None:
    source = toys.saved("dflash", tmp_path / "source")
    folder = with_config(source, tmp_path / "d", lambda raw: raw.update(vocab_size=2**31 - 1))
    with pytest.raises(ValueError, match=r"`vocab_size`.*too large\. Name the target"):
        convert(folder, tmp_path / "out", to="dspark", verify=True)
    assert not (tmp_path / "out").exists()
