"""The names and defaults other people build on.

A change here is a change of the package's promise: make it on purpose.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from dataclasses import MISSING, fields

import torch
from transformers import AutoConfig, AutoModel
from transformers.generation import GenerationMixin

import dspark
from dspark import calibration, evaluation
from dspark.decoding.rejection import Verdict, rejection_sample
from dspark.ops import confidence as confidence_op
from dspark.ops import markov_step as markov
from dspark.ops import rejection as rejection_op
from dspark.ops import training_loss as loss_op
from tests.decoding.pair import BLOCK, distinct, oracle, plain, target
from tests.scripted import drafter_config

NAMES = {
    "BatchDecoder",
    "DSparkConfig",
    "DSparkDrafter",
    "DSparkGenerationMixin",
    "DraftOutput",
    "SpeculationConfig",
    "SpeculationStats",
    "__version__",
    "optimize_for_cpu",
}
DEFAULTS = {
    "policy": "threshold",
    "num_assistant_tokens": None,
    "assistant_confidence_threshold": 0.0,
    "survival_threshold": 0.0,
    "record_confidence": False,
    "record_trace": False,
    "throughput_curve": None,
    "candidate_top_k": None,
    "context_window": None,
}


def parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]


def test_names_of_the_package() -> None:
    assert set(dspark.__all__) == NAMES
    assert list(dspark.__all__) == sorted(dspark.__all__)
    for name in NAMES - {"__version__"}:
        assert (getattr(dspark, name).__doc__ or "").strip(), name
    assert dspark.__version__.count(".") == 2


def test_defaults_of_the_settings() -> None:
    assert {field.name: field.default for field in fields(dspark.SpeculationConfig)} == DEFAULTS
    assert not any(field.default_factory is not MISSING for field in fields(dspark.SpeculationConfig))


def test_a_call_with_every_default_drafts_whole_blocks() -> None:
    ids, text = distinct()
    drafter = oracle((None,))
    assert drafter.speculation == dspark.SpeculationConfig()
    assert plain(target(), ids, max_new_tokens=17, assistant_model=drafter)[0].tolist() == text[:23]
    assert drafter.last_stats.verified == [BLOCK, BLOCK]


def test_the_inspection_door() -> None:
    assert parameters(dspark.DSparkDrafter.draft) == [
        "self", "anchor_ids", "target_hidden_states", "target", "do_sample", "generator",
    ]  # fmt: skip
    assert [field.name for field in fields(dspark.DraftOutput)] == [
        "token_ids", "base_logits", "logits", "confidence_logits", "hidden_states", "context_features",
    ]  # fmt: skip
    drafter = dspark.DSparkDrafter(drafter_config(target())).eval()
    states = torch.randn(2, 5, drafter.config.context_width)
    out = drafter.draft(torch.tensor([3, 4]), states, target=target())
    assert out.token_ids.shape == out.confidence_logits.shape == (2, BLOCK)
    assert out.logits.shape == out.base_logits.shape == (2, BLOCK, 128)
    assert out.context_features.shape == (2, 5, 32)


def test_the_rejection_sampler() -> None:
    assert parameters(rejection_sample) == [
        "draft_ids", "draft_probs", "target_probs", "lengths", "draft_token_ids", "uniforms", "generator",
    ]  # fmt: skip
    assert Verdict._fields[:2] == ("num_accepted", "next_ids")


def test_the_training_forward_takes_what_a_trainer_hands_over() -> None:
    names = parameters(dspark.DSparkDrafter.forward)
    assert names[1:5] == ["input_ids", "target_hidden_states", "loss_mask", "target_last_hidden_states"]


def test_the_keys_of_a_summary() -> None:
    assert set(dspark.SpeculationStats().to_dict()) >= {
        "mean_acceptance_length", "draft_acceptance_rate", "acceptance_histogram", "per_step_accepted",
        "per_step_drafted", "num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_new_tokens",
        "num_target_passes", "tokens_per_pass", "survival_rate", "conditional_acceptance", "step_seconds",
        "fallback_reason",
    }  # fmt: skip


def test_calibration() -> None:
    assert parameters(calibration.fit_sequential_temperatures) == [
        "confidence_logits", "accepted_lengths", "verified_lengths", "min_rounds", "num_bins",
    ]  # fmt: skip
    assert parameters(calibration.expected_calibration_error) == ["predicted", "observed", "num_bins"]
    names = {"auc", "fit_confidence_head", "reliability_bins", "position_reliability", "survival"}
    assert names < set(calibration.__all__)


def test_evaluation() -> None:
    assert parameters(evaluation.evaluate) == ["target", "drafters", "prompts", "settings", "log", "progress"]
    assert parameters(evaluation.report_markdown) == ["report", "heading_level"]
    assert [field.name for field in fields(evaluation.EvaluationSettings)] == [
        "temperatures", "thresholds", "max_new_tokens", "seed", "speed", "reliability",
    ]  # fmt: skip


def test_ops() -> None:
    assert parameters(markov.markov_block) == [
        "base_logits", "anchor_ids", "tables", "sampling", "candidate_top_k", "with_law", "implementation",
    ]  # fmt: skip
    assert parameters(markov.markov_step)[1:] == ["previous_ids", *parameters(markov.markov_block)[2:]]
    assert markov.MarkovTables._fields == ("w1", "w2", "draft_token_ids", "forbidden", "features")
    assert markov.GatedFeatures._fields == ("weight", "hidden")
    assert markov.RecurrentFeatures._fields == ("weight", "hidden", "state")
    assert markov.Sampling._fields == ("temperature", "seeds", "offsets", "noise")
    assert markov.MarkovDraw._fields == ("token_ids", "log_probs", "law_logits", "state")
    assert parameters(rejection_op.rejection_sample)[:5] == [
        "draft_ids", "draft_probs", "target_probs", "lengths", "uniforms",
    ]  # fmt: skip
    assert parameters(confidence_op.confidence_scores) == [
        "hidden", "previous_ids", "weights", "temperatures", "implementation",
    ]  # fmt: skip
    assert parameters(loss_op.training_loss) == [
        "logits", "labels", "weights", "target_probs", "terms", "with_gradient", "implementation",
    ]  # fmt: skip


def test_transformers_knows_the_model(tmp_path: object) -> None:
    drafter = dspark.DSparkDrafter(drafter_config(target()))
    drafter.save_pretrained(tmp_path)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), dspark.DSparkConfig)
    assert isinstance(AutoModel.from_pretrained(tmp_path), dspark.DSparkDrafter)
    assert dspark.DSparkConfig.model_type == "dspark"


def test_generate_keeps_its_signature() -> None:
    assert parameters(GenerationMixin.generate)[:3] == ["self", "inputs", "generation_config"]
    assert GenerationMixin.generate.__doc__
    assert GenerationMixin.generate.__name__ == "generate"


def test_a_fresh_interpreter_imports() -> None:
    code = (
        "from dspark import *; DSparkDrafter, SpeculationConfig;"
        "from transformers import GenerationMixin; assert hasattr(GenerationMixin.generate, '_dspark_original');"
        "import dspark.conversion; assert dspark.conversion.FORMATS"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=300)
