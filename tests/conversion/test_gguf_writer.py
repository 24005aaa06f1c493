"""Drafters written for llama.cpp are the drafters they were: same tensors, same drafts, or refused by the field.

Catches: a layer id, window or map off by a convention, a norm that llama.cpp has and the drafter has not, a scale that
the engine does not apply, a table it would take for another, a file left behind by a failure, dtypes llama.cpp does
not read a tensor in.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from dspark.conversion import convert, gguf_writer, open_checkpoint, read_record, unnormed
from safetensors.torch import load_file
from transformers import AutoTokenizer

from dspark import DSparkDrafter
from tests import small
from tests.conversion import toys
from tests.conversion.toys import ROWS

ROUNDED = ("confidence of the hidden state", "llama3 positions")
PLAIN = {"confidence_head_with_markov": False, "confidence_head_bias": False}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
SLIDING = {"attention_windows": [6, None], "window_rule": "per_slot_all"}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "vanilla": ("qwen3", {}),
    "rank 0": ("qwen3", {"markov_rank": 0, "enable_confidence_head": False, "sample_from_anchor": False}),
    "rank 0, anchor drafts": ("qwen3", {"markov_rank": 0, "enable_confidence_head": False}),
    "reduced": ("qwen3", small.STORAGE["reduced"]),
    "own tables": ("qwen3", {**small.STORAGE["own"], "embed_scale": 2.0}),
    "own head": ("qwen3", small.STORAGE["own head"]),
    "no confidence": ("qwen3", {"enable_confidence_head": False}),
    "confidence of the hidden state": ("qwen3", PLAIN),
    "sliding": ("qwen3", SLIDING),
    "causal": ("qwen3", {"causal_in_block": [True, True]}),
    "sliding, inclusive": ("qwen3", {**SLIDING, "window_rule": "abs_all"}),
    "linear positions": ("qwen3", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama3 positions": ("qwen3", {"rope_parameters": LLAMA3}),
    "no norm of queries and keys": ("llama", {}),
    "no norm, own tables": ("llama", {**small.STORAGE["own"], "embed_scale": 2.0}),
    "no norm, rank 0": ("llama", {"markov_rank": 0, "enable_confidence_head": False}),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file with the vocabulary of `small.target()`."""
    path = tmp_path_factory.mktemp("target") / "target.gguf"
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_embedding_length(small.WIDTH)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(small.VOCAB)])
    writer.add_token_types([1] * small.VOCAB)
    writer.add_mask_token_id(5)
    writer.add_chat_template("{{ messages }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def record_of(drafter: DSparkDrafter, folder: Path) -> Any:
    drafter.save_pretrained(folder)
    return read_record(open_checkpoint(folder, json.loads((folder / "config.json").read_text())))


def written(kind: str, folder: Path, target: Path, **how: Any) -> tuple[DSparkDrafter, Path]:
    family, fields = KINDS[kind]
    drafter = small.drafter(family, **fields)
    return drafter, gguf_writer.write(record_of(drafter, folder / "own"), folder / "it.gguf", target=target, **how)


def drafts(drafter: DSparkDrafter, family: str) -> Any:
    return drafter.draft(torch.tensor([7, 11]), small.states(), target=small.target(family))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_back_drafts_the_same(kind: str, tmp_path: Path, target: Path) -> None:
    drafter, path = written(kind, tmp_path, target, dtype="f32")
    again = DSparkDrafter.from_pretrained(path, dtype=torch.float32).eval()
    family = KINDS[kind][0]
    ours, theirs = drafts(drafter, family), drafts(again, family)
    assert torch.equal(ours.token_ids, theirs.token_ids)
    torch.testing.assert_close(ours.logits, theirs.logits, atol=2e-5, rtol=2e-5)
    if ours.confidence_logits is None:
        assert theirs.confidence_logits is None
    else:
        torch.testing.assert_close(ours.confidence_logits, theirs.confidence_logits, atol=2e-5, rtol=2e-5)
    config, fields = again.config, ("block_size", "sample_from_anchor", "mask_token_id", "target_layer_ids")
    assert [getattr(config, name) for name in fields] == [getattr(drafter.config, name) for name in fields]
    assert config.share_embedding == drafter.config.share_embedding


@pytest.mark.parametrize("kind", [kind for kind, (family, _) in KINDS.items() if family == "qwen3"])
def test_tensors_are_the_same(kind: str, tmp_path: Path, target: Path) -> None:
    drafter, path = written(kind, tmp_path, target, dtype="f32")
    again = DSparkDrafter.from_pretrained(path, dtype=torch.float32).state_dict()
    for name, tensor in drafter.state_dict().items():
        if name == "confidence_head.proj.weight":
            assert torch.equal(again[name][:, : tensor.shape[1]], tensor)
            assert not again[name][:, tensor.shape[1] :].any()
        else:
            assert torch.equal(again[name], tensor), name
    assert again.keys() == drafter.state_dict().keys()


def test_norms_that_change_nothing_change_no_draft_of_large_queries(tmp_path: Path, target: Path) -> None:
    """The engine norms queries and keys; sixteen times larger ones keep their size all the same."""
    drafter = small.drafter("llama", rms_norm_eps=1e-5)
    with torch.no_grad():
        for layer in drafter.layers:
            layer.self_attn.q_proj.weight.mul_(16)
    path = gguf_writer.write(record_of(drafter, tmp_path / "own"), tmp_path / "it.gguf", target=target, dtype="f32")
    again = DSparkDrafter.from_pretrained(path, dtype=torch.float32).eval()
    assert again.config.family == "qwen3"
    ours, theirs = drafts(drafter, "llama"), drafts(again, "llama")
    torch.testing.assert_close(ours.logits, theirs.logits, atol=1e-4, rtol=1e-4)
    for layer in again.layers:
        layer.self_attn.q_norm.eps = 1e-5  # a norm that norms
    assert not torch.allclose(drafts(again, "llama").logits, ours.logits, atol=1e-2)


@pytest.mark.parametrize("eps", [1e-5, 1e-6, 9.999999747378752e-06, 0.01])
def test_stream_scale_rounds_nothing(eps: float) -> None:
    scale = unnormed.stream_scale(eps)
    assert float(np.log2(scale)).is_integer()
    assert 1e10 <= eps * scale**2 < 4e10


def tensors_of(path: Path) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def keys_of(path: Path) -> dict[str, Any]:
    return {name: part.contents() for name, part in gguf.GGUFReader(path).fields.items() if "GGUF" not in name}


def test_keys_are_those_of_llama_cpp(tmp_path: Path, target: Path) -> None:
    _, path = written("reduced", tmp_path, target, dtype="bf16")
    found = {key.removeprefix("dflash."): value for key, value in keys_of(path).items() if key.startswith("dflash.")}
    assert found == {
        "block_count": 2, "context_length": 256, "embedding_length": 32, "feed_forward_length": 48,
        "attention.head_count": 2, "attention.head_count_kv": 1, "attention.key_length": 16,
        "attention.value_length": 16, "attention.layer_norm_rms_epsilon": pytest.approx(1e-6),
        "attention.causal": False, "rope.freq_base": 10000.0, "block_size": 4, "sample_from_anchor": True,
        "has_confidence_head": True, "target_layers": [0, 1, 3],
    }  # fmt: skip
    keys = keys_of(path)
    assert keys["general.architecture"] == "dflash"
    assert keys["general.file_type"] == int(gguf.LlamaFileType.MOSTLY_BF16)
    assert keys["tokenizer.ggml.mask_token_id"] == small.MASK
    assert keys["tokenizer.ggml.tokens"] == keys_of(target)["tokenizer.ggml.tokens"]
    assert keys["tokenizer.chat_template"] == "{{ messages }}"
    assert tensors_of(path)["d2t"].data.tolist() == small.DRAFT_IDS


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"])
def test_dtypes(dtype: str, tmp_path: Path, target: Path) -> None:
    drafter, path = written("own tables", tmp_path, target, dtype=dtype)
    tensors = tensors_of(path)
    kinds = {name: tensor.tensor_type.name for name, tensor in tensors.items()}
    assert {kind for name, kind in kinds.items() if tensors[name].data.ndim == 1 or "_norm" in name} == {"F32"}
    assert kinds["blk.0.attn_q.weight"] == dtype.upper()
    is_block = dtype.startswith("q")
    assert kinds["token_embd.weight"] == kinds["output.weight"] == ("Q8_0" if is_block else dtype.upper())
    assert kinds["markov_w1.weight"] == ("F16" if is_block else dtype.upper())  # six columns
    again = DSparkDrafter.from_pretrained(path, dtype=torch.float32).state_dict()
    for name, tensor in drafter.state_dict().items():
        tolerance = 0.12 if "4" in dtype else 0.06 if "5" in dtype else 0.02
        torch.testing.assert_close(again[name], tensor, atol=tolerance * float(tensor.abs().max()), rtol=0)


def test_dtype_of_the_checkpoint_is_kept(tmp_path: Path, target: Path) -> None:
    record = record_of(small.drafter().to(torch.bfloat16), tmp_path / "own")
    path = gguf_writer.write(record, tmp_path / "it.gguf", target=target)
    assert tensors_of(path)["fc.weight"].tensor_type.name == "BF16"


def test_scaled_matrices_do_not_overflow(tmp_path: Path, target: Path) -> None:
    for dtype in ("f16", "q4_0"):
        _, path = written("no norm of queries and keys", tmp_path, target, dtype=dtype)
        kinds = {name: tensor.tensor_type.name for name, tensor in tensors_of(path).items()}
        scaled = ("fc.weight", "blk.0.attn_output.weight", "blk.1.ffn_down.weight")
        assert [kinds[name] for name in scaled] == ["BF16"] * 3
        assert kinds["blk.0.attn_q.weight"] == dtype.upper()
        numbers = [value.float() for value in DSparkDrafter.from_pretrained(path).state_dict().values()]
        assert all(tensor.isfinite().all() for tensor in numbers)


@pytest.mark.parametrize("dtype", ["f16", "q8_0"])
def test_numbers_too_large_for_a_dtype_are_named(dtype: str, tmp_path: Path, target: Path) -> None:
    drafter = small.drafter()
    with torch.no_grad():
        drafter.fc.weight[0, 0] = 7e4
    record = record_of(drafter, tmp_path / "own")
    with pytest.raises(ValueError, match=r"fc\.weight has numbers beyond 65,504"):
        gguf_writer.write(record, tmp_path / "it.gguf", target=target, dtype=dtype)
    gguf_writer.write(record, tmp_path / "it.gguf", target=target, dtype="bf16")


@pytest.mark.parametrize(("family", "fields", "field"), [
    ("qwen3", {"markov_head_type": "gated"}, "markov_head_type"),
    ("qwen3", {"markov_head_type": "rnn"}, "markov_head_type"),
    ("gemma4", {}, "family"),
    ("qwen3", {"hidden_act": "gelu"}, "hidden_act"),
    ("qwen3", {"attention_bias": True}, "attention_bias"),
    ("qwen3", {"fc_bias": True}, "fc_bias"),
    ("qwen3", small.STORAGE["narrow"], "target_hidden_size"),
    ("qwen3", {"logit_scale": 0.5}, "logit_scale"),
    ("qwen3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ("qwen3", {"share_embedding": False}, "has_lm_head"),
    ("qwen3", {"markov_rank": 0}, "enable_confidence_head"),
    ("qwen3", {"causal_in_block": [True, False]}, "causal_in_block"),
    ("qwen3", {**SLIDING, "attention_windows": [6, 8]}, "attention_windows"),
    ("qwen3", {**SLIDING, "window_rule": "ctx_from_anchor"}, "window_rule"),
    ("qwen3", {**SLIDING, "attention_windows": [3, None]}, "attention_windows"),
    ("qwen3", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type"),
    ("qwen3", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "beta_fast": 8,
                                   "original_max_position_embeddings": 64}}, "beta_fast"),
])  # fmt: skip
def test_refused_by_field(family: str, fields: dict[str, Any], field: str, tmp_path: Path, target: Path) -> None:
    record = record_of(small.drafter(family, **fields), tmp_path / "own")
    reason = gguf_writer.refuses(record)
    assert reason is not None
    assert f"`{field}" in reason or f"[{field!r}]" in reason
    with pytest.raises(ValueError, match=field):
        gguf_writer.write(record, tmp_path / "it.gguf", target=target)
    assert not list(tmp_path.glob("*.gguf*"))


def test_scales_of_a_drafter_without_transition_bias_are_written(tmp_path: Path, target: Path) -> None:
    drafter = small.drafter(markov_rank=0, enable_confidence_head=False, logit_scale=0.5, final_logit_softcapping=5.0)
    path = gguf_writer.write(record_of(drafter, tmp_path / "own"), tmp_path / "it.gguf", target=target)
    again = DSparkDrafter.from_pretrained(path, dtype=torch.float32).eval()
    torch.testing.assert_close(drafts(again, "qwen3").logits, drafts(drafter, "qwen3").logits)


def test_what_is_held_in_another_form_is_said(tmp_path: Path) -> None:
    drafter = small.drafter(confidence_temperatures=[1.0, 2.0, 1.0, 1.0])
    assert "temperatures" in gguf_writer.notes(record_of(drafter, tmp_path / "a"))[0]
    assert "norms that change nothing" in gguf_writer.notes(record_of(small.drafter("llama"), tmp_path / "b"))[0]
    assert gguf_writer.notes(record_of(small.drafter(), tmp_path / "c")) == []


def test_command(tmp_path: Path) -> None:
    def command(**fields: Any) -> str:
        record = record_of(small.drafter(**fields), tmp_path / "own")
        return gguf_writer.serve_command(record, "t.gguf", "d.gguf")

    rank0 = {"markov_rank": 0, "enable_confidence_head": False}
    assert command() == "llama-server -m t.gguf -md d.gguf --spec-type draft-dspark --spec-draft-n-max 4"
    assert "draft-dspark --spec-draft-n-max 4" in command(**rank0)
    assert "draft-dflash --spec-draft-n-max 3" in command(**rank0, sample_from_anchor=False)
    assert "draft-dspark --spec-draft-n-max 3" in command(sample_from_anchor=False)


def test_failure_leaves_what_was_there(tmp_path: Path, target: Path) -> None:
    _, path = written("vanilla", tmp_path, target)
    before = path.read_bytes()
    drafter = small.drafter()
    with torch.no_grad():
        drafter.fc.weight[0, 0] = torch.nan
    record = record_of(drafter, tmp_path / "own")
    with pytest.raises(ValueError, match=r"fc\.weight"):
        gguf_writer.write(record, path, target=target)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir() if ".gguf" in entry.name] == ["it.gguf"]


@pytest.mark.parametrize("how", ["no target", "no vocabulary", "another vocabulary", "dtype"])
def test_what_does_not_fit_is_said(how: str, tmp_path: Path, target: Path) -> None:
    record = record_of(small.drafter(), tmp_path / "own")
    empty = tmp_path / "empty"
    empty.mkdir()
    arguments: dict[str, tuple[dict[str, Any], str]] = {
        "no target": ({}, "Name the target with `--target`"),
        "no vocabulary": ({"target": empty}, "neither a GGUF file nor a tokenizer.json"),
        "another vocabulary": ({"target": target}, "64 tokens, and the drafter was made for a vocabulary of 40"),
        "dtype": ({"target": target, "dtype": "q2_k"}, "got 'q2_k'"),
    }
    if how == "another vocabulary":
        record = record_of(small.drafter(vocab_size=40, mask_token_id=39), tmp_path / "forty")
    kwargs, words = arguments[how]
    with pytest.raises(ValueError, match=words):
        gguf_writer.write(record, tmp_path / "it.gguf", **kwargs)


def test_rows_that_no_token_uses_are_named(tmp_path: Path, target: Path) -> None:
    record = record_of(small.drafter(vocab_size=70), tmp_path / "own")
    keys = keys_of(gguf_writer.write(record, tmp_path / "it.gguf", target=target))
    assert keys["tokenizer.ggml.tokens"][63:66] == ["t63", "[PAD64]", "[PAD65]"]
    assert keys["tokenizer.ggml.token_type"][64:] == [int(gguf.TokenType.UNUSED)] * 6
    assert len(keys["tokenizer.ggml.tokens"]) == 70


def test_factor_and_sections_of_the_target(tmp_path: Path) -> None:
    path = tmp_path / "target.gguf"
    writer = gguf.GGUFWriter(path, "gemma4")
    writer.add_embedding_length(64)
    writer.add_rope_dimension_sections([4, 2, 2, 0])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(small.VOCAB)])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    shared = record_of(small.drafter(), tmp_path / "own")
    keys = keys_of(gguf_writer.write(shared, tmp_path / "it.gguf", target=path))
    assert keys["dflash.embedding_scale"] == 8.0  # the engine takes rows as they are stored
    assert keys["dflash.rope.dimension_sections"] == [8, 0, 0, 0]
    own = record_of(small.drafter(**small.STORAGE["own"]), tmp_path / "other")
    assert "dflash.embedding_scale" not in keys_of(gguf_writer.write(own, tmp_path / "it.gguf", target=path))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target's folder: config and a byte-level BPE tokenizer of fewer tokens than rows."""
    return toys.saved_target_with_tokenizer(tmp_path_factory.mktemp("target"))


def test_vocabulary_of_a_tokenizer(tmp_path: Path, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    record = record_of(small.drafter(vocab_size=ROWS), tmp_path / "own")
    keys = keys_of(gguf_writer.write(record, tmp_path / "it.gguf", target=folder))
    tokens = keys["tokenizer.ggml.tokens"]
    assert tokens[: len(tokenizer)] == tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    assert tokens[len(tokenizer) :] == [f"[PAD{i}]" for i in range(len(tokenizer), ROWS)]
    assert keys["tokenizer.ggml.token_type"][0] == int(gguf.TokenType.CONTROL)
    assert keys["tokenizer.ggml.eos_token_id"] == 0
    assert keys["tokenizer.ggml.merges"][0].count(" ") == 1


@pytest.mark.parametrize("kind", KINDS)
def test_conversion_finds_the_same_drafter(kind: str, tmp_path: Path, folder: Path) -> None:
    family, fields = KINDS[kind]
    small.drafter(family, vocab_size=ROWS, **fields).save_pretrained(tmp_path / "own")
    report = convert(
        tmp_path / "own", tmp_path / "it.gguf", to="gguf-dflash", target=folder, verify=True,
        tolerance=1e-4 if kind in ROUNDED or family == "llama" else 0.0,
    )  # fmt: skip
    assert report.verification is not None
    assert report.verification.tokens_equal
    assert set(report.not_kept) <= {"num_target_layers", "target", "confidence_temperatures"}
    assert [entry.name for entry in report.files] == ["it.gguf"]
    assert f"-md {tmp_path / 'it.gguf'}" in report.serve_command


def test_embedding_without_head_gets_the_head_of_the_target(tmp_path: Path, folder: Path) -> None:
    small.drafter(vocab_size=ROWS, share_embedding=False).save_pretrained(tmp_path / "own")
    convert(tmp_path / "own", tmp_path / "it.gguf", to="gguf-dflash", target=folder, verify=True)
    stored = load_file(folder / "model.safetensors")["lm_head.weight"]
    assert np.array_equal(tensors_of(tmp_path / "it.gguf")["output.weight"].data, stored.numpy())
