"""`dspark inspect` on checkpoints of every format: decisions with their sources, and refusals with exit code 2.

Catches: a setting shown without where it is from; a refusal that goes through or exits with 0; JSON that is none.
"""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from dspark.cli import app, common
from tests import small
from tests.conversion import peers

runner = CliRunner()


def facts(source) -> dict:
    result = runner.invoke(app, ["inspect", str(source), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("name", ["gguf_dflash", "muse_mixed", "sf_dspark_yarn_sliding", "zlab010_dflash_scaled",
                                  "spec090_dspark_reduced_gated_noanchor"])  # fmt: skip
def test_every_setting_has_its_source(name) -> None:
    found, truth = facts(peers.folder(name)), peers.expected(name)["canonical"]
    for key in ("block_size", "sample_from_anchor", "target_layer_ids", "mask_token_id", "markov_rank", "embed_scale"):
        assert found[key] == truth[key]
        assert found["read_from"][key]
    assert found["num_draft_tokens"] == truth["gamma"]
    assert found["borrows_from_target"] == [
        part for part, key in (("embedding", "has_embed"), ("LM head", "has_lm_head")) if not truth[key]
    ]
    assert found["bytes"]["bf16"] == 2 * found["parameters"]
    assert found["fits_target"]["hidden_size"] == 64


def test_what_is_not_used_is_said() -> None:
    ignored = facts(peers.folder("sf_dspark_legacy_prefix"))["ignored"]
    assert ignored["logit_head.markov_head.markov_w1.weight"] == "a copy of markov_head.markov_w1.weight"


def test_note_of_the_target_is_readable(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(common.out, "_width", 200)  # the console was made with the terminal's own
    note = {"name": "some/target", "model_type": "qwen3", "hidden_size": 32, "layer_hashes": {"a": "1"}}
    small.drafter(target=note).save_pretrained(tmp_path)
    shown = runner.invoke(app, ["inspect", str(tmp_path)]).output
    assert "name some/target; model type qwen3; hidden size 32; 1 hashes of its weights" in " ".join(shown.split())
    assert "layer_hashes" not in shown
    assert "config.json: block_size" in shown


@pytest.mark.parametrize(("path", "words"), [
    ("spec090_xpress/checkpoint", "XPress"), ("corrupt/anchor_contradiction", "sample_from_anchor"),
    ("corrupt/pickle_sentinel", "pytorch_model.bin"), ("corrupt/gguf_absurd_counts", "drafter.gguf"),
    ("corrupt/index_path_traversal", "../outside.safetensors"),
    ("corrupt/safetensors_overlapping", "model.safetensors"),
])  # fmt: skip
def test_refusals_exit_with_2(path, words) -> None:
    for how in ([], ["--json"]):
        result = runner.invoke(app, ["inspect", str(peers.ROOT / path), *how])
        assert result.exit_code == 2
        assert words in " ".join(result.output.split())
    assert words in json.loads(result.stdout)["refused"]


def test_numbers_that_are_not_finite_are_found(tmp_path) -> None:
    model = small.drafter()
    model.fc.weight.data[0, 0] = float("nan")
    model.save_pretrained(tmp_path)
    result = runner.invoke(app, ["inspect", str(tmp_path)])
    assert result.exit_code == 2
    assert "NaN or infinite numbers in fc.weight" in " ".join(result.output.split())
