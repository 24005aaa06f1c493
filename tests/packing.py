"""Tiny models for the tests of `optimize_for_cpu`: tied and untied heads, biases, a family without `nn.Linear`."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from dspark import DSparkDrafter
from tests.scripted import drafter_config

CLOSE = {"atol": 1e-5, "rtol": 1e-5}  # fp32 sums of at most 48 terms of order one in another order
_SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
_GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
TARGETS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**_GROUPED, "tie_word_embeddings": False}),
    "llama tied": ("LlamaForCausalLM", "LlamaConfig", {**_GROUPED, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {"num_key_value_heads": 2, "tie_word_embeddings": False}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**_GROUPED, "tie_word_embeddings": False}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**_GROUPED, "tie_word_embeddings": True}),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {"tie_word_embeddings": False}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"tie_word_embeddings": True}),
}
IDS = torch.arange(1, 13).view(2, 6)


def target(kind: str = "llama", **changes: Any) -> PreTrainedModel:
    model_name, config_name, fields = TARGETS[kind]
    config = getattr(transformers, config_name)(**{**_SIZES, **fields, **changes})
    torch.manual_seed(0)
    model = getattr(transformers, model_name)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8.0)  # varied texts
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model


def drafter_of(model: PreTrainedModel, **fields: Any) -> DSparkDrafter:
    torch.manual_seed(1)
    return DSparkDrafter(drafter_config(model, **{"markov_rank": 4, **fields})).eval()


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same(model: nn.Module, before: dict[str, torch.Tensor]) -> None:
    after = model.state_dict()
    assert list(after) == list(before)
    for name, tensor in before.items():
        assert type(after[name]) is torch.Tensor
        assert torch.equal(after[name], tensor), name


def greedy(model: PreTrainedModel, count: int = 8) -> list[list[int]]:
    return model.generate(IDS, do_sample=False, max_new_tokens=count).tolist()
