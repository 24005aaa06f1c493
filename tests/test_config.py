"""`DSparkConfig`: rules, defaults, round trips, rotary parameters.

Catches: a field that is misspelt, of another type or out of range and goes through; a message without the field, the
value or the way out; a config that changes when it is written and read; a rotary base that falls back to a default.
"""

from __future__ import annotations

import inspect
import json

import pytest
import torch
from transformers import LlamaConfig, PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from dspark import DSparkConfig, DSparkDrafter

from . import small

DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 1e4}

# (changed fields, what the message must contain)
BROKEN = [
    ({"family": "mamba"}, "`family` must be one of 'qwen3', 'llama', 'gemma4', got 'mamba'"),
    ({"markov_head_type": "gru"}, "`markov_head_type` must be one of .*'rnn', got 'gru'"),
    ({"markov_head_type": ""}, "`markov_head_type` must be one of .*, got ''"),
    *[({field: value}, f"`{field}` must be an integer of at least 1, got {value!r}")
      for field in ("intermediate_size", "num_hidden_layers", "num_attention_heads",
                    "num_key_value_heads", "head_dim", "max_position_embeddings", "block_size")
      for value in (0, -1, 2.0, True, "7")],
    *[({field: value}, f"`{field}` must be an integer of at least 1, or None for .*, got {value!r}")
      for field in ("vocab_size", "draft_vocab_size", "target_hidden_size") for value in (0, 1.5, "8")],
    *[({field: value}, f"`{field}` must be True or False, got {value!r}")
      for field in ("attention_bias", "attention_k_eq_v", "sample_from_anchor", "enable_confidence_head",
                    "confidence_head_with_markov", "confidence_head_bias", "share_embedding", "share_lm_head",
                    "fc_bias", "raw_target_embedding")
      for value in (1, "false")],
    *[({field: value}, f"`{field}` must be a positive number, got {value!r}")
      for field in ("rms_norm_eps", "embed_scale", "logit_scale", "final_logit_softcapping")
      for value in (0.0, -1, float("nan"), "x")],
    *[({field: value}, f"`{field}` must be a number that float32 can hold, got {value!r}")
      for field in ("rms_norm_eps", "logit_scale") for value in (1e-300, 4e-38)],
    ({"rms_norm_eps": 10**400}, "`rms_norm_eps` must be a positive number, got 1000"),
    ({"block_size": 2**40}, "`block_size` must be at most 4096, got 1099511627776"),
    *[({field: 2**40}, f"`{field}` must be at most 2147483647, got 1099511627776")
      for field in ("max_position_embeddings", "vocab_size")],
    ({"initializer_range": -0.1}, "`initializer_range` must be a number of at least 0, got -0.1"),
    ({"attention_dropout": 1.0}, r"`attention_dropout` must be a number in \[0, 1\), got 1.0"),
    ({"hidden_act": "swosh"}, "`hidden_act` must be an activation transformers knows, .*, got 'swosh'"),
    ({"num_attention_heads": 4, "num_key_value_heads": 3},
     r"`num_attention_heads` \(4\) must be a multiple of .*\(3\)"),
    ({"head_dim": 15}, "`head_dim` must be even, .* got 15"),
    ({"attention_k_eq_v": True}, "`attention_k_eq_v` belongs to the family 'gemma4', got family 'qwen3'"),
    ({"target": "Qwen/Qwen3-4B"}, "`target` must be a dict .*, got 'Qwen/Qwen3-4B'"),
    ({"block_size": 1, "sample_from_anchor": False},
     "`block_size` must be at least 2 with `sample_from_anchor=False`, got 1"),
    ({"mask_token_id": None}, "`mask_token_id` is missing. Set it to the id the drafter was trained with"),
    *[({"mask_token_id": value}, rf"`mask_token_id` must be an id of the target's vocabulary, 0\.\.63, got {value!r}")
      for value in (-1, 64, 3.0, True)],
    ({"draft_vocab_size": 65}, r"`draft_vocab_size` must lie in 1\.\.vocab_size \(64\), got 65. Leave it None"),
    ({"target_layer_ids": None}, "`target_layer_ids` is missing. Name the decoder layers"),
    ({"target_layer_ids": []}, "`target_layer_ids` is missing"),
    ({"target_layer_ids": [0, 1.0]}, r"`target_layer_ids` must be a list of integers, got \[0, 1.0\]"),
    ({"target_layer_ids": "02"}, "`target_layer_ids` must be a list of integers, got '02'"),
    ({"target_layer_ids": [2, 0]}, r"`target_layer_ids` must be strictly increasing, got \[2, 0\]"),
    ({"target_layer_ids": [0, 0]}, r"`target_layer_ids` must be strictly increasing, got \[0, 0\]"),
    ({"target_layer_ids": [-2, 0]},
     r"must lie in -1\.\.2 for a target of 4 layers, got \[-2, 0\]. -1 is the embedding"),
    ({"target_layer_ids": [0, 3]}, r"must lie in -1\.\.2 .*, got \[0, 3\].* the last layer is refused"),
    *[({"num_target_layers": value}, f"`num_target_layers` must be the target's number of .*, got {value!r}")
      for value in (0, 4.0)],
    ({"vocab_size": None}, "`vocab_size` is None, and the drafter stores a table over the vocabulary"),
    *[({"attention_windows": value, "window_rule": "abs_all"}, "`attention_windows` must have a positive integer or")
      for value in ([8], [8, 0], [8, True], "8")],
    ({"attention_windows": [8, None]}, r"`attention_windows` \(\[8, None\]\) and `window_rule` \(None\) disagree"),
    ({"window_rule": "abs_all"}, r"`attention_windows` \(None\) and `window_rule` \('abs_all'\) disagree"),
    ({"attention_windows": [8, 8], "window_rule": "left"}, "`window_rule` must be one of 'ctx_from_anchor', .*'left'"),
    *[({"causal_in_block": value}, "`causal_in_block` must have True or False for each of 2 draft layers")
      for value in ([True], [1, 0], True)],
    ({"markov_rank": 0, "markov_head_type": "vanilla"},
     r"`markov_rank` \(0\) and `markov_head_type` \('vanilla'\) disagree"),
    ({"markov_rank": 8, "markov_head_type": "none"},
     r"`markov_rank` \(8\) and .* \('none'\) disagree: rank 0 goes with"),
    *[({"markov_rank": value}, rf"`markov_rank` \({value!r}\) and") for value in (-1, 2.5, "8")],
    ({"markov_rank": 0, "confidence_head_with_markov": True},
     "`confidence_head_with_markov=True` needs both .* got True and 0"),
    ({"enable_confidence_head": False, "confidence_head_with_markov": True}, "needs both .* got False and 6"),
    *[({"confidence_temperatures": value}, "`confidence_temperatures` must be 4 positive numbers, one per draft")
      for value in ([1.0] * 3, [1.0, 1.0, 0.0, 1.0], [1.0, float("nan"), 1.0, 1.0], 1.0)],
    ({"confidence_temperatures": [1.0] * 4, "enable_confidence_head": False},
     "`confidence_temperatures` .* no confidence head"),
    ({"target_hidden_size": 48},
     r"`target_hidden_size` \(48\) differs from `hidden_size` \(32\).*set `share_embedding=False`"),
    ({"draft_vocab_size": 8, "share_lm_head": True},
     "`share_lm_head=True` with `draft_vocab_size` 8.*`share_lm_head=False`"),
    ({"rope_parameters": []}, r"`rope_parameters` must be one flat dict, .*, got \[\]"),
    ({"rope_parameters": {"full_attention": DEFAULT_ROPE}}, "one flat dict, .* take the entry 'full_attention'"),
    ({"rope_parameters": {"rope_type": "default"}}, "must name a positive `rope_theta`, got .*: give the value"),
    ({"rope_parameters": {**DEFAULT_ROPE, "rope_theta": 0}}, "must name a positive `rope_theta`"),
    ({"rope_parameters": {**DEFAULT_ROPE, "rope_type": "spiral"}}, r"must be one of default, .*, got 'spiral'"),
    *[({"rope_parameters": {**DEFAULT_ROPE, "rope_type": kind}}, f"of type '{kind}' must have {missing}, got")
      for kind, missing in (("linear", "factor"), ("dynamic", "factor"), ("yarn", "factor"),
                            ("longrope", "short_factor, long_factor"),
                            ("llama3", "factor, low_freq_factor, high_freq_factor"))],
    *[({"rope_parameters": {**DEFAULT_ROPE, "rope_type": kind, **keys}}, rf"\['{key}'\]` must be {rule}")
      for kind, keys, key, rule in (
          ("yarn", {"factor": "4"}, "factor", "a positive number, got '4'"),
          ("yarn", {"factor": 4.0, "beta_fast": float("nan")}, "beta_fast", "a positive number, got nan"),
          ("linear", {"factor": 0}, "factor", "a positive number, got 0"),
          ("linear", {"factor": 10**400}, "factor", "a positive number, got 1000"),
          ("longrope", {"short_factor": [1.0], "long_factor": [1.0]}, "short_factor", "8 positive numbers"),
          ("longrope", {"short_factor": [1.0] * 8, "long_factor": 3}, "long_factor", "8 positive numbers"),
          ("proportional", {"partial_rotary_factor": 2}, "partial_rotary_factor", r"a number in \(0, 1\], got 2"))],
    ({"rope_parameters": {**DEFAULT_ROPE, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0,
                          "high_freq_factor": 4.0}}, r"\['low_freq_factor'\]` \(4.0\) must be below"),
    ({"rope_parameters": {**DEFAULT_ROPE, "partial_rotary_factor": 0.5}},
     "is 0.5, but draft layers rotate whole heads"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), BROKEN)
def test_broken_rule_is_named(changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        small.config(**changes)


@pytest.mark.parametrize(
    ("rank", "with_markov", "is_valid"), [(0, False, True), (0, True, False), (6, False, True), (6, True, True)]
)
def test_confidence_head_needs_the_embedding_it_reads(rank, with_markov, is_valid) -> None:
    def build():
        return small.drafter(markov_rank=rank, confidence_head_with_markov=with_markov, share_embedding=False,
                             share_lm_head=False)  # fmt: skip

    if not is_valid:
        with pytest.raises(ValueError, match="confidence_head_with_markov"):
            build()
        return
    out = build().draft(torch.tensor([1, 2]), small.states())
    assert out.confidence_logits.shape == (2, 4)


def test_defaults() -> None:
    """Each default, so that a change of one is a decision (Qwen3-4B's sizes and the reference's recipe)."""
    config = DSparkConfig(mask_token_id=1, target_layer_ids=[0], num_target_layers=2)
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(DSparkConfig.__init__).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    assert defaults == {
        "family": "qwen3", "vocab_size": 151936, "draft_vocab_size": None, "hidden_size": 2560,
        "intermediate_size": 9728, "num_hidden_layers": 5, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": None, "hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False,
        "attention_k_eq_v": False, "attention_dropout": 0.0, "max_position_embeddings": 40960, "rope_parameters": None,
        "initializer_range": 0.02, "final_logit_softcapping": None, "embed_scale": 1.0, "block_size": 7,
        "fc_bias": False, "attention_windows": None, "window_rule": None, "causal_in_block": None, "logit_scale": 1.0,
        "raw_target_embedding": False,
        "sample_from_anchor": True, "mask_token_id": None, "target_layer_ids": None, "num_target_layers": None,
        "target_hidden_size": None, "markov_rank": 256, "markov_head_type": None, "enable_confidence_head": True,
        "confidence_head_with_markov": None, "confidence_head_bias": True, "confidence_temperatures": None,
        "share_embedding": True, "share_lm_head": None, "target": None,
    }  # fmt: skip
    filled = {
        "head_dim": 80, "rope_parameters": DEFAULT_ROPE, "markov_head_type": "vanilla",
        "confidence_head_with_markov": True, "share_lm_head": True,
    }  # fmt: skip
    assert {name: getattr(config, name) for name in defaults if name in filled} == filled
    assert {name: getattr(config, name) for name in defaults if name not in filled} == {
        **{name: value for name, value in defaults.items() if name not in filled},
        "mask_token_id": 1, "target_layer_ids": [0], "num_target_layers": 2,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "filled"),
    [
        ({"markov_rank": 0}, {"markov_head_type": "none", "confidence_head_with_markov": False}),
        ({"enable_confidence_head": False}, {"confidence_head_with_markov": False}),
        ({"draft_vocab_size": 8}, {"share_lm_head": False, "share_embedding": True, "num_logits": 8}),
        ({"sample_from_anchor": False}, {"num_draft_tokens": 3}),
        ({"sample_from_anchor": True}, {"num_draft_tokens": 4, "num_logits": 64, "context_width": 96}),
        ({"block_size": 1}, {"num_draft_tokens": 1}),
    ],
)
def test_open_fields_follow_the_others(changes, filled) -> None:
    config = small.config(**changes)
    assert {name: getattr(config, name) for name in filled} == filled


def test_caller_s_containers_are_copied() -> None:
    rope, taps = {"rope_theta": 5e4}, [0, 2]
    config = small.config(rope_parameters=rope, target_layer_ids=taps)
    config.target_layer_ids.append(1)
    assert rope == {"rope_theta": 5e4}
    assert taps == [0, 2]
    assert config.rope_parameters == {"rope_theta": 5e4, "rope_type": "default"}


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma4"])
def test_written_and_read_it_is_the_same(family, tmp_path) -> None:
    config = small.config(
        family, dtype=torch.bfloat16, confidence_temperatures=[1.0, 0.9, 1.1, 2], target={"name": "a target"}
    )
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["dtype"] == "bfloat16"
    assert written["model_type"] == "dspark"
    again = DSparkConfig.from_pretrained(tmp_path)
    assert again.dtype is torch.bfloat16
    assert again.to_dict() == config.to_dict()
    for copy in (DSparkConfig(**config.to_dict()), DSparkConfig.from_dict(json.loads(config.to_json_string()))):
        assert {**copy.to_dict(), "_name_or_path": ""} == {**config.to_dict(), "_name_or_path": ""}


def test_unknown_field_in_a_file_is_named_and_left_out(tmp_path, caplog) -> None:
    small.config().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    common = {
        "architectures": ["DSparkDrafter"],
        "transformers_version": "9.9",
        "dtype": "float16",
        "use_cache": False,
    }
    path.write_text(json.dumps({**json.loads(path.read_text()), **common, "draft_window": 5, "zeta": 1}))
    with caplog.at_level("WARNING", logger="dspark"):
        config = DSparkConfig.from_pretrained(tmp_path)
    (record,) = caplog.records
    assert "draft_window, zeta" in record.message
    assert "update dspark" in record.message
    assert not hasattr(config, "draft_window")
    assert config.dtype is torch.float16
    assert config.architectures == ["DSparkDrafter"]


@pytest.mark.parametrize(
    ("field", "hint"),
    [("blok_size", "Did you mean `block_size`"), ("rope_theta", "It goes into `rope_parameters`"),
     ("rope_scaling", "It goes into `rope_parameters`"), ("zzz", "no field `zzz`")],
)  # fmt: skip
def test_unknown_argument_is_refused(field, hint) -> None:
    with pytest.raises(TypeError, match=f"no field `{field}`.*{hint}|{hint}"):
        small.config(**{field: 3})


def test_another_model_s_config_is_refused(tmp_path) -> None:
    LlamaConfig(num_hidden_layers=2).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"model_type 'llama', not of 'dspark'.*DSparkDrafter.from_pretrained"):
        DSparkConfig.from_pretrained(tmp_path)


ROPES = {
    "default": {"rope_theta": 3e5},
    "linear": {"rope_theta": 1e4, "factor": 4.0},
    "dynamic": {"rope_theta": 1e4, "factor": 2.0},
    "yarn": {"rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {
        "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "longrope": {
        "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "proportional": {"rope_theta": 1e6, "partial_rotary_factor": 0.25},
}  # fmt: skip


@pytest.mark.parametrize("kind", ROPES)
def test_rotary_tables_are_transformers_own(kind, tmp_path) -> None:
    rope = {"rope_type": kind, **ROPES[kind]}
    model = small.drafter(rope_parameters=rope)
    model.save_pretrained(tmp_path)
    own = LlamaConfig(
        hidden_size=32, num_attention_heads=2, head_dim=16, max_position_embeddings=256, rope_parameters=rope
    )
    theirs = LlamaRotaryEmbedding(own)
    x, positions = torch.zeros(1), torch.arange(300)[None]  # longer than the table: dynamic types recompute theirs
    for drafter in (model, DSparkDrafter.from_pretrained(tmp_path)):
        assert torch.equal(drafter.rotary_emb.inv_freq, theirs.inv_freq)
        assert drafter.rotary_emb.attention_scaling == theirs.attention_scaling
        expected = LlamaRotaryEmbedding(own)(x, positions)
        for ours, other in zip(drafter.rotary_emb(x, positions), expected, strict=True):
            assert torch.equal(ours, other)


def test_fields_of_the_base_class_do_not_shadow_ours() -> None:
    ours = set(inspect.signature(DSparkConfig.__init__).parameters)
    assert not ours & set(PreTrainedConfig.__dataclass_fields__)
