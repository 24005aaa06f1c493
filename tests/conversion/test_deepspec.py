"""Reading DeepSpec's layout: the reference's own folders, and configs that are cut, doubled or contradict themselves.

Catches: a rotary base that falls back to a default, long-context scaling applied where the drafter had none, a field
whose absence changes what tensors mean, a route taken by the file's name, tensors left over or missing.
"""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from dspark.conversion import FORMATS, Checkpoint, deepspec
from safetensors.torch import load_file, save_file
from transformers.models.qwen3.modeling_qwen3 import Qwen3Config, Qwen3RotaryEmbedding

from dspark import DSparkConfig, DSparkDrafter
from dspark.hub import read_config
from tests.conftest import golden_root

DRAFTS = golden_root() / "drafts"
NAMES = sorted(path.name for path in DRAFTS.iterdir())
QWEN = next(name for name in NAMES if name.startswith("qwen3") and "rank0" not in name)
GEMMA = next((name for name in NAMES if name.startswith("gemma4")), None)


def raw(name: str) -> dict:
    return json.loads((DRAFTS / name / "config.json").read_text())


def read(config: dict, **changes) -> DSparkConfig:
    """`...` removes a field."""
    changed = {key: value for key, value in {**config, **changes}.items() if value is not ...}
    return deepspec.read(Checkpoint("some/drafter", changed, None), {}).to_config()


def without_rope(config: dict) -> dict:
    return {
        key: value for key, value in config.items() if key not in ("rope_theta", "rope_scaling", "rope_parameters")
    }


@pytest.mark.parametrize("name", NAMES)
def test_reference_folder_loads_whole(name) -> None:
    stored = load_file(DRAFTS / name / "model.safetensors")
    model = DSparkDrafter.from_pretrained(DRAFTS / name)
    assert set(model.state_dict()) == set(stored)
    assert all(torch.equal(tensor, stored[key]) for key, tensor in model.state_dict().items())
    assert model.dtype is next(iter(stored.values())).dtype
    config, theirs = model.config, raw(name)
    for field in ("vocab_size", "hidden_size", "block_size", "mask_token_id", "target_layer_ids", "num_target_layers",
                  "markov_rank", "enable_confidence_head", "num_hidden_layers", "rms_norm_eps"):  # fmt: skip
        assert getattr(config, field) == theirs[field]
    assert config.sample_from_anchor
    assert config.num_draft_tokens == theirs["block_size"]
    assert not config.share_embedding
    assert not config.share_lm_head
    assert (config.markov_head_type == "none") == (theirs["markov_rank"] == 0)


@pytest.mark.parametrize("name", NAMES)
def test_saved_in_our_format_it_is_the_same_drafter(name, tmp_path) -> None:
    model = DSparkDrafter.from_pretrained(DRAFTS / name)
    model.save_pretrained(tmp_path)
    again = DSparkDrafter.from_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "dspark"
    assert all(
        torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True)
    )
    ours, theirs = (drafter.config.to_dict() for drafter in (model, again))
    for config in (ours, theirs):
        config.pop("_name_or_path", None)
    assert ours == theirs
    assert torch.equal(model.rotary_emb.inv_freq, again.rotary_emb.inv_freq)


def test_drafter_without_a_sequential_head_is_plain_block_arg_max() -> None:
    """The published `dflash_*` folders carry DSpark's architecture with rank 0; the route is by fields."""
    name = next(name for name in NAMES if "rank0" in name)
    model = DSparkDrafter.from_pretrained(DRAFTS / name)
    assert model.markov_head is None
    assert not any("markov" in key for key in model.state_dict())
    out = model.draft(torch.tensor([1]), torch.randn(1, 5, model.config.context_width))
    assert torch.equal(out.logits, out.base_logits)
    assert torch.equal(out.token_ids, out.base_logits.argmax(-1))
    assert out.token_ids.shape[1] == model.config.block_size


def test_route_is_the_architecture_not_the_name(tmp_path) -> None:
    folder = tmp_path / "dflash_something"
    shutil.copytree(DRAFTS / QWEN, folder)
    assert read_config(folder).markov_rank > 0
    for architectures in (["Qwen3ForCausalLM"], [], None):
        path = folder / "config.json"
        path.write_text(json.dumps({**raw(QWEN), "architectures": architectures}))
        with pytest.raises(ValueError, match=r"is not a DSpark drafter that can be read"):
            read_config(folder)
    assert set(FORMATS) >= {"deepspec"}


@pytest.mark.parametrize("field", [
    "block_size", "target_layer_ids", "mask_token_id", "num_target_layers", "markov_rank", "markov_head_type",
    "enable_confidence_head", "confidence_head_with_markov", "vocab_size", "hidden_size", "intermediate_size",
    "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "rms_norm_eps",
])  # fmt: skip
def test_missing_field_is_named(field) -> None:
    config = {**raw(QWEN), "enable_confidence_head": True, "confidence_head_with_markov": True}
    with pytest.raises(ValueError, match=rf"some/drafter .* lacks {field}\. .*restore"):
        read(config, **{field: ...})


def test_rule_of_the_config_names_the_source() -> None:
    with pytest.raises(
        ValueError, match=r"config.json of some/drafter .*is not valid\. `mask_token_id` must be an id"
    ):
        read(raw(QWEN), mask_token_id=10**6)


# --- rotary parameters ----------------------------------------------------------------------------------------------

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
GOOD = {
    "flat": ({"rope_theta": 12345.0}, {"rope_type": "default", "rope_theta": 12345.0}),
    "nested": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 12345.0}},
        {"rope_type": "default", "rope_theta": 12345.0},
    ),
    "nested without a type": ({"rope_parameters": {"rope_theta": 7.0}}, {"rope_type": "default", "rope_theta": 7.0}),
    "both agreeing": (
        {"rope_theta": 9.0, "rope_parameters": {"rope_type": "default", "rope_theta": 9.0}},
        {"rope_type": "default", "rope_theta": 9.0},
    ),
    "nulls": (
        {"rope_theta": 9.0, "rope_scaling": None, "rope_parameters": None},
        {"rope_type": "default", "rope_theta": 9.0},
    ),
    "scaling, transformers 4": (
        {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
        {**YARN, "rope_theta": 1e6},
    ),
    "scaling, transformers 5": ({"rope_parameters": {**YARN, "rope_theta": 1e6}}, {**YARN, "rope_theta": 1e6}),
    "the target's image positions": (
        {"rope_parameters": {"rope_theta": 1e6, "mrope_section": [4, 2, 2], "partial_rotary_factor": 0.5}},
        {"rope_type": "default", "rope_theta": 1e6},
    ),
}


@pytest.mark.parametrize("kind", GOOD)
def test_rotary_parameters_of_both_key_styles(kind) -> None:
    keys, expected = GOOD[kind]
    config = read(without_rope(raw(QWEN)), **keys)
    assert config.rope_parameters == expected
    theirs = Qwen3Config(head_dim=config.head_dim, max_position_embeddings=config.max_position_embeddings,
                         rope_parameters=dict(expected))  # fmt: skip
    assert torch.equal(DSparkDrafter(config).rotary_emb.inv_freq, Qwen3RotaryEmbedding(theirs).inv_freq)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "no `rope_theta`, neither flat nor under `rope_parameters`"),
        ({"rope_parameters": {"rope_type": "default"}}, "no `rope_theta`"),
        ({"rope_scaling": YARN}, "no `rope_theta`"),
        ({"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e7}}, r"1000000\.0.*disagree|disagree.*1000000\.0"),
        (
            {"rope_theta": 1e6, "rope_scaling": YARN, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            "`rope_parameters` gives .*'default'.* other keys .*'yarn'.*disagree",
        ),
        (
            {"rope_scaling": YARN, "rope_parameters": {**YARN, "factor": 2.0, "rope_theta": 1e6}},
            "`rope_parameters` gives .*'factor': 2.0.*'factor': 4.0.*disagree",
        ),
        ({"rope_theta": 1e6, "rope_scaling": {"type": "spiral"}}, "must be one of default, .* got 'spiral'"),
    ],
)
def test_rotary_parameters_that_say_nothing_or_two_things(keys, message) -> None:
    with pytest.raises(ValueError, match=message) as error:
        read(without_rope(raw(QWEN)), **keys)
    assert "some/drafter" in str(error.value)


# --- Gemma 4 --------------------------------------------------------------------------------------------------------

needs_gemma = pytest.mark.skipif(GEMMA is None, reason="the shipped subset has no Gemma 4 draft")


@needs_gemma
def test_gemma_takes_the_global_layers() -> None:
    theirs = raw(GEMMA)
    config = read(theirs)
    assert config.family == "gemma4"
    assert config.head_dim == theirs["global_head_dim"]
    assert config.num_key_value_heads == theirs["num_global_key_value_heads"]
    assert config.rope_parameters == theirs["rope_parameters"]["full_attention"]
    assert config.attention_k_eq_v
    assert config.final_logit_softcapping == theirs["final_logit_softcapping"]
    assert config.embed_scale == theirs["hidden_size"] ** 0.5
    plain = read(theirs, attention_k_eq_v=False, num_global_key_value_heads=...)
    assert (plain.attention_k_eq_v, plain.num_key_value_heads) == (False, theirs["num_key_value_heads"])


@needs_gemma
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"enable_moe_block": True}, "have no enable moe block, but the config sets enable_moe_block=True"),
        ({"hidden_size_per_layer_input": 4}, "sets hidden_size_per_layer_input=4"),
        ({"global_head_dim": ...}, "lacks global_head_dim"),
        ({"num_global_key_value_heads": ...}, "lacks num_global_key_value_heads"),
        ({"rope_parameters": {"sliding_attention": {}}}, "`rope_parameters` has no entry for 'full_attention'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "proportional"}}}, "must name a positive `rope_theta`"),
    ],
)
def test_gemma_that_cannot_be_read(changes, message) -> None:
    with pytest.raises(ValueError, match=message) as error:
        read(raw(GEMMA), **changes)
    assert "some/drafter" in str(error.value)


# --- overrides ------------------------------------------------------------------------------------------------------


def test_stripped_folder_can_borrow_from_the_target(tmp_path) -> None:
    """Without its copies of the target's tables the folder says what is missing, and loads when told to borrow."""
    shutil.copytree(DRAFTS / QWEN, tmp_path / "d")
    tensors = load_file(tmp_path / "d" / "model.safetensors")
    kept = {key: value for key, value in tensors.items() if key not in ("embed_tokens.weight", "lm_head.weight")}
    save_file(kept, tmp_path / "d" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"missing tensors: embed_tokens\.weight, lm_head\.weight"):
        DSparkDrafter.from_pretrained(tmp_path / "d")
    model = DSparkDrafter.from_pretrained(tmp_path / "d", share_embedding=True, share_lm_head=True)
    assert set(model.state_dict()) == set(kept)
    with pytest.raises(ValueError, match=r"unexpected tensors: embed_tokens\.weight, lm_head\.weight"):
        DSparkDrafter.from_pretrained(DRAFTS / QWEN, share_embedding=True, share_lm_head=True)
