"""`convert` around the bytes: targets, choices, additions, what is said, faults seen elsewhere.

Catches: a table of another target, an embedding factor left out, a field that goes missing without a word, a block
convention or a rotary base that is lost on the way.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from dspark.conversion import WRITERS, VerificationError, convert, open_target
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from dspark import DSparkDrafter
from dspark.hub import read_record
from tests import small
from tests.conftest import golden_root
from tests.conversion import peers, toys


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return toys.saved_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def source(tmp_path) -> Path:
    return toys.saved("vanilla", tmp_path / "source")


def drafts(folder: Path, target: Any = None) -> Any:
    model = toys.loaded(folder)
    return model.draft(torch.tensor([3]), small.states(1, 9, model.config.context_width), target=target)


# --- targets ------------------------------------------------------------------------------------------------------


def test_tables_of_the_target_are_stored_for_deepspec(source, target, tmp_path) -> None:
    with pytest.raises(ValueError, match=r"`has_embed` is False.*`--target`"):
        convert(source, tmp_path / "out", to="deepspec")
    convert(source, tmp_path / "out", to="deepspec", target=target)
    held = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(held["embed_tokens.weight"], small.target().get_input_embeddings().weight)
    assert torch.equal(held["lm_head.weight"], small.target().get_output_embeddings().weight)
    assert torch.equal(drafts(tmp_path / "out").logits, drafts(source, small.target()).logits)


def test_only_the_shards_that_hold_the_tables_are_opened(source, tmp_path) -> None:
    target = tmp_path / "target"
    small.target().save_pretrained(target, max_shard_size="9KB")
    index = json.loads((target / "model.safetensors.index.json").read_text())["weight_map"]
    needed = {index["model.embed_tokens.weight"], index["lm_head.weight"]}
    for shard in set(index.values()) - needed:
        (target / shard).unlink()
    convert(source, tmp_path / "out", to="deepspec", target=target, verify=True)
    next(iter(target.glob(sorted(needed)[0]))).unlink()
    with pytest.raises(OSError, match=r"has no file model-.*which its"):
        convert(source, tmp_path / "two", to="deepspec", target=target)


def test_a_tied_target_lends_one_table_twice(source, tmp_path) -> None:
    tied = small.target("llama", tie_word_embeddings=True)
    tied.save_pretrained(tmp_path / "target")
    embedding, head = open_target(tmp_path / "target").tables()
    assert embedding is head
    convert(source, tmp_path / "out", to="deepspec", target=tmp_path / "target")
    held = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(held["embed_tokens.weight"], held["lm_head.weight"])


def test_what_the_target_multiplies_its_embeddings_by_counts(tmp_path) -> None:
    """A drafter that sees what a Gemma target's own embedding gives is not one that sees the stored rows."""
    source = toys.saved("as the target sees it", tmp_path / "source")
    gemma = small.target("gemma4")
    gemma.save_pretrained(tmp_path / "gemma")
    assert open_target(tmp_path / "gemma").embedding_factor == pytest.approx(small.WIDTH**0.5)
    with pytest.raises(ValueError, match=r"`raw_target_embedding` is False.*`--target`"):
        convert(source, tmp_path / "out", to="vllm")
    with pytest.raises(ValueError, match=r"`embed_scale` is 5\.65685, there embeddings are multiplied by 1"):
        convert(source, tmp_path / "out", to="vllm", target=tmp_path / "gemma")


@pytest.mark.parametrize(("changes", "field"), [
    ({"num_hidden_layers": 5}, "num_target_layers"), ({"vocab_size": 66}, "vocab_size"),
    ({"hidden_size": 48}, "target_hidden_size"),
])  # fmt: skip
def test_another_target_is_refused(changes, field, source, tmp_path) -> None:
    small.target("llama", **changes).save_pretrained(tmp_path / "target")
    with pytest.raises(ValueError, match=rf"made for a target whose `{field}` is .* Name the target it was trained"):
        convert(source, tmp_path / "out", to="vllm", target=tmp_path / "target")


@pytest.mark.parametrize("to", ["sglang", "specforge"])
def test_copies_of_the_target_s_tables_are_left_out_where_they_are_borrowed(to, target, tmp_path) -> None:
    source = toys.copies_of_the_target(tmp_path / "source")
    with pytest.raises(ValueError, match=r"`has_embed` is True.*`--target`"):
        convert(source, tmp_path / "out", to=to)
    report = convert(source, tmp_path / "out", to=to, target=target, verify=True)
    assert read_record(tmp_path / "out").missing == ["embedding", "LM head"]
    assert report.warnings == []


def test_a_rounded_copy_is_left_out_with_a_word_and_is_no_equal(target, tmp_path) -> None:
    toys.copies_of_the_target(tmp_path / "exact")
    source = tmp_path / "source"
    convert(tmp_path / "exact", source, to="dspark", dtype="bf16")
    report = convert(source, tmp_path / "out", to="sglang", target=target)
    assert [word for word in report.warnings if "rounded to bfloat16" in word]
    with pytest.raises(VerificationError, match=r"draft logits differ by up to .*, 0 was allowed"):
        convert(source, tmp_path / "two", to="sglang", target=target, verify=True)
    found = convert(source, tmp_path / "two", to="sglang", target=target, verify=True, tolerance=10.0).verification
    assert 0 < found.logits <= 10


def test_gemma_4_goes_where_deepspec_s_layout_is_read(tmp_path) -> None:
    source = golden_root() / "drafts" / "gemma4_vanilla_confmk"
    if not source.is_dir():
        pytest.skip("not in the shipped subset")
    for to in ("deepspec", "vllm", "mlx-dspark"):
        report = convert(source, tmp_path / to, to=to, verify=True)
        assert report.verification.logits == 0
        assert bool(report.warnings) == (to == "vllm")
    for to in ("speculators", "specforge", "sglang", "tensorrt-llm", "muse"):
        with pytest.raises(ValueError, match=r"`family` is 'gemma4'.*`final_logit_softcapping` is 30"):
            convert(source, tmp_path / to, to=to)


# --- choices and additions ----------------------------------------------------------------------------------------


def test_fields_the_source_leaves_open_are_decided_by_the_caller(tmp_path) -> None:
    if "zlab_old_dflash" not in peers.ALL and not (peers.ROOT / "corrupt" / "anchor_contradiction").is_dir():
        pytest.skip("not in the shipped subset")
    source = peers.ROOT / "corrupt" / "anchor_contradiction"
    with pytest.raises(ValueError, match="sample_from_anchor"):
        convert(source, tmp_path / "out", to="vllm")
    convert(source, tmp_path / "out", to="vllm", fields={"sample_from_anchor": False}, verify=True)
    assert read_record(tmp_path / "out")["sample_from_anchor"] is False


def test_dtype(source, tmp_path) -> None:
    convert(source, tmp_path / "out", to="vllm", dtype="bf16", verify=True)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    with pytest.raises(ValueError, match="`dtype` must be one of fp32, bf16, fp16"):
        convert(source, tmp_path / "two", to="vllm", dtype="int8")


@pytest.mark.parametrize(("kind", "to"), [
    ("rank 0", "vllm"), ("rank 0", "sglang"), ("rank 0, confidence", "tensorrt-llm"), ("no confidence bias", "sglang"),
    ("rank 0, confidence, silent anchor", "vllm"), ("no confidence bias", "deepspec"),
])  # fmt: skip
def test_zeros_let_an_engine_run_it_and_change_nothing(kind, to, target, tmp_path) -> None:
    source = toys.saved(kind, tmp_path / "source")
    with pytest.raises(ValueError, match="`--fill-zeros`"):
        convert(source, tmp_path / "out", to=to, target=target)
    report = convert(source, tmp_path / "out", to=to, target=target, fill_zeros=True, verify=True)
    assert report.verification.logits == 0
    record = read_record(tmp_path / "out")
    assert record["markov_rank"] > 0
    assert record["confidence_head_bias"] == record["enable_confidence_head"]


def test_zeros_are_not_added_where_none_are_needed(target, tmp_path) -> None:
    convert(toys.saved("rank 0", tmp_path / "source"), tmp_path / "out", to="deepspec", target=target, fill_zeros=True)
    assert read_record(tmp_path / "out")["markov_rank"] == 0


@pytest.mark.parametrize("to", ["vllm", "speculators", "deepspec", "mlx-dspark"])
def test_llama_like_layers_as_qwen3_s(to, target, tmp_path) -> None:
    source = toys.saved("llama", tmp_path / "source")
    with pytest.raises(ValueError, match=r"`family` is 'llama'.*`--as-qwen3`"):
        convert(source, tmp_path / "out", to=to, target=target)
    with pytest.raises(ValueError, match=r"scaled, it has to be stored: name the target"):
        convert(source, tmp_path / "out", to=to, as_qwen3=True)
    report = convert(source, tmp_path / "out", to=to, target=target, as_qwen3=True, verify=True, tolerance=1e-3)
    assert report.verification.tokens_equal
    assert any("up to rounding" in warning for warning in report.warnings)


def test_llama_like_layers_cannot_go_where_the_embedding_is_the_target_s(target, tmp_path) -> None:
    source = toys.saved("llama", tmp_path / "source")
    with pytest.raises(ValueError, match=r"`has_embed` is True, and it always uses the target's"):
        convert(source, tmp_path / "out", to="sglang", target=target, as_qwen3=True)


# --- what is said -------------------------------------------------------------------------------------------------


def test_temperatures_go_to_sglang_in_files_and_elsewhere_are_said_to_be_lost(target, tmp_path) -> None:
    source = toys.saved("temperatures", tmp_path / "source")
    rows = toys.KINDS["temperatures"]["confidence_temperatures"]
    report = convert(source, tmp_path / "out", to="sglang", target=target)
    for name, key in (("confidence_sts_t0.json", "0"), ("confidence_sts_t1.json", "1")):
        assert json.loads((tmp_path / "out" / name).read_text())["temperatures"] == rows[key]
        assert name in [entry.name for entry in report.files]
    assert f"--speculative-dspark-confidence-sts-path {tmp_path}/out/confidence_sts_t0.json" in report.serve_command
    report = convert(source, tmp_path / "two", to="vllm", target=target)
    assert report.not_kept["confidence_temperatures"] == (rows, None)
    assert any("no confidence temperatures" in warning for warning in report.warnings)


def test_commands(source, target, tmp_path) -> None:
    """The commands of the engines, with the number of drafts each wants to hear."""
    out = str(tmp_path / "a b")

    def command(kind: str, to: str) -> str:
        place = toys.saved(kind, tmp_path / kind)
        return convert(place, out, to=to, target=target, overwrite=True).serve_command

    model = json.dumps(out)
    assert command("vanilla", "vllm") == (
        f"vllm serve {target} --speculative-config "
        f'\'{{"method":"dspark","model":{model},"num_speculative_tokens":4}}\''
    )
    assert '"num_speculative_tokens":3' in command("vanilla, silent anchor", "vllm")
    assert '"method":"dflash"' in command("dflash", "vllm")
    assert command("gated", "speculators").startswith("dspark generate")
    assert command("rnn", "sglang") == (
        f"python -m sglang.launch_server --model-path {target} --speculative-algorithm DSPARK "
        f"--speculative-draft-model-path '{out}' --speculative-dspark-block-size 4"
    )
    assert command("no confidence", "sglang").startswith("SGLANG_RAGGED_VERIFY_MODE=static python")
    assert "--speculative-algorithm DFLASH" in command("dflash", "sglang")
    assert command("vanilla", "mlx-dspark") == (
        f"mlx-dspark serve --model {target} --drafter '{out}' --mode dspark --max-draft 4"
    )
    assert "--extra_llm_api_options" in command("vanilla", "tensorrt-llm")
    settings = (tmp_path / "a b" / "tensorrt_llm.yaml").read_text()
    assert settings.splitlines() == [
        "speculative_config:", "  decoding_type: DSpark", "  max_draft_len: 4", f"  speculative_model: {model}",
    ]  # fmt: skip
    assert "speculation_type=" in command("dflash", "muse")
    assert "TARGET" in convert(tmp_path / "dflash", out, to="muse", overwrite=True).serve_command


def test_the_report_is_json(source, target, tmp_path) -> None:
    report = convert(source, tmp_path / "out", to="vllm", target=target, verify=True).to_dict()
    assert json.loads(json.dumps(report)) == report
    assert {entry["name"] for entry in report["files"]} == set(os.listdir(tmp_path / "out"))
    assert report["verification"] == {
        "logits": 0.0, "confidence": 0.0, "tokens_equal": True, "tolerance": 0.0, "dtype": "float32",
    }  # fmt: skip


def test_unknown_formats_and_options_are_named(source, tmp_path) -> None:
    with pytest.raises(ValueError, match=r"`to` must be one of dspark, .*vllm.*, got 'tgi'"):
        convert(source, tmp_path / "out", to="tgi")
    with pytest.raises(TypeError, match="verfy"):
        convert(source, tmp_path / "out", to="vllm", verfy=True)


# --- faults seen elsewhere ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "formats"), [
    ("vanilla", ("deepspec", "speculators", "specforge", "vllm")), ("vanilla, silent anchor", ("speculators", "vllm")),
])  # fmt: skip
def test_two_block_conventions_of_one_drafter(kind, formats, target, tmp_path) -> None:
    """The same proposals from each format, and others where the convention is misread."""
    source = toys.saved(kind, tmp_path / "source")
    expected = drafts(source, small.target())
    for to in formats:
        convert(source, tmp_path / to, to=to, target=target)
        assert torch.equal(drafts(tmp_path / to, small.target()).token_ids, expected.token_ids)
    other = toys.KINDS[kind].get("sample_from_anchor", True) is False
    misread = DSparkDrafter.from_pretrained(tmp_path / "vllm", sample_from_anchor=other)
    states = small.states(1, 9, misread.config.context_width)
    assert misread.draft(torch.tensor([3]), states, target=small.target()).token_ids.shape != expected.token_ids.shape


@pytest.mark.parametrize("to", [name for name in WRITERS if not WRITERS[name].suffix and name != "dspark"])
@pytest.mark.parametrize("kind", ["vanilla", "yarn", "dflash"])
def test_the_rotary_base_is_in_every_spelling(kind, to, target, tmp_path) -> None:
    """transformers makes the same frequencies of each config, whichever key it looks at."""
    source = toys.saved(kind, tmp_path / "source")
    try:
        convert(source, tmp_path / "out", to=to, target=target)
    except ValueError:
        return
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    raw = raw.get("transformer_layer_config", raw)
    expected = toys.drafter(kind).rotary_emb.inv_freq
    without = {key: value for key, value in raw.items() if key not in ("rope_theta", "rope_scaling")}
    fields = [without] if to == "muse" else [
        raw, without, {key: value for key, value in raw.items() if key != "rope_parameters"},
    ]  # fmt: skip
    for one in fields:
        config = Qwen3Config(**{key: value for key, value in one.items() if key not in ("architectures", "dtype")})
        torch.testing.assert_close(Qwen3RotaryEmbedding(config).inv_freq, expected)


def test_a_muse_folder_is_one_to_transformers(target, tmp_path) -> None:
    from transformers import AutoModel

    convert(toys.saved("windows both ways, dflash", tmp_path / "source"), tmp_path / "out", to="muse", target=target)
    assert AutoConfig.from_pretrained(tmp_path / "out").layer_types == ["sliding_attention", "full_attention"]
    _, info = AutoModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def test_own_tables_that_differ_from_the_target_s_are_the_ones_used(target, tmp_path) -> None:
    source = toys.saved("own tables", tmp_path / "source")
    for to in ("vllm", "speculators", "mlx-dspark", "tensorrt-llm"):
        convert(source, tmp_path / to, to=to, target=target)
        assert read_record(tmp_path / to).missing == []
        assert torch.equal(drafts(tmp_path / to, small.target()).logits, drafts(source).logits)
    with pytest.raises(ValueError, match=r"`has_embed` is True, and it always uses the target's embedding"):
        convert(source, tmp_path / "sglang", to="sglang", target=target)


def test_quantised_or_biased_tables_of_a_target_are_refused(source, tmp_path) -> None:
    target = toys.saved_target(tmp_path / "target")
    tensors = load_file(target / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int8)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lm_head\.weight of the target .* is stored as int8"):
        convert(source, tmp_path / "out", to="deepspec", target=target)
    del tensors["lm_head.weight"]
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"stores no tensor for its LM head, lm_head\.weight, and does not tie it"):
        convert(source, tmp_path / "out", to="deepspec", target=target)
    shutil.rmtree(target)
    with pytest.raises(OSError, match="target"):
        convert(source, tmp_path / "out", to="deepspec", target=target)
