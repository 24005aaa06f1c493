"""Tiny random targets of every supported family, and the table of what a drafter does for each.

`SUPPORT` is the single source: the tests of `decoding/test_targets.py` are generated from it, cell by cell, and
`python -m tests.zoo` prints it as the Markdown table of the README. Weights are scaled up so that texts are varied: a
model that repeats one token agrees with anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import PreTrainedModel

VOCAB = 96
WINDOW = 8  # of every sliding-window layer: far shorter than the texts
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_HYBRID = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
_LINEAR = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
_DELTA = {
    "layer_types": _LINEAR,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "head_dim": 16,
}


@dataclass(frozen=True)
class Target:
    """How to build one tiny target.

    Attributes:
        model: Class in `transformers`.
        config: Its config class.
        fields: Differences to the common sizes.
        scale: Factor on all matrices.
        attention: Attention implementations it has.
        nested: Names of sub-configs that take the sizes instead of the top (multimodal models).
        since: First transformers that has it.
        image_inputs: Makes the image part of a prompt (see `prompt_inputs`), for models that look at one.
    """

    model: str
    config: str
    fields: dict[str, Any] = field(default_factory=dict)
    scale: float = 20.0
    attention: tuple[str, ...] = ("eager", "sdpa")
    text_config: str | None = None
    top: dict[str, Any] = field(default_factory=dict)
    since: str = "5.15"

    @property
    def absent(self) -> str | None:
        """Why this transformers cannot build it, or None."""
        if hasattr(transformers, self.model):
            return None
        return f"{self.model} is not in transformers {transformers.__version__}"

TARGETS: dict[str, Target] = {
    "Llama": Target("LlamaForCausalLM", "LlamaConfig", {"head_dim": 8}),
    "Qwen2": Target("Qwen2ForCausalLM", "Qwen2Config"),
    "Qwen3": Target("Qwen3ForCausalLM", "Qwen3Config", {"head_dim": 8}),
    "Mistral": Target("MistralForCausalLM", "MistralConfig", {"head_dim": 8, "sliding_window": WINDOW}),
    "Gemma 2": Target("Gemma2ForCausalLM", "Gemma2Config", {"head_dim": 8, "sliding_window": WINDOW, "layer_types": _HYBRID, "query_pre_attn_scalar": 8}),
    "Gemma 3": Target("Gemma3ForCausalLM", "Gemma3TextConfig", {"head_dim": 8, "sliding_window": WINDOW, "layer_types": _HYBRID, "query_pre_attn_scalar": 8}),
    "Gemma 4": Target("Gemma4ForCausalLM", "Gemma4TextConfig", {"head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 1, "sliding_window": WINDOW, "layer_types": _HYBRID, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": VOCAB, "num_kv_shared_layers": 0}),
    "Gemma 4 shared": Target("Gemma4ForCausalLM", "Gemma4TextConfig", {"head_dim": 8, "global_head_dim": 16, "num_hidden_layers": 6, "sliding_window": WINDOW, "layer_types": _HYBRID + _HYBRID[:2], "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": VOCAB, "num_kv_shared_layers": 2}),
    "Phi-3": Target("Phi3ForCausalLM", "Phi3Config"),
    "Phi-4": Target("Phi3ForCausalLM", "Phi3Config", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}, "partial_rotary_factor": 0.75, "hidden_size": 64}),
    "OLMo": Target("OlmoForCausalLM", "OlmoConfig"),
    "OLMo 2": Target("Olmo2ForCausalLM", "Olmo2Config"),
    "GPT-OSS": Target("GptOssForCausalLM", "GptOssConfig", {"head_dim": 8, "sliding_window": WINDOW, "layer_types": _HYBRID, **_MOE}, attention=("eager",)),
    "Qwen3-MoE": Target("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {"head_dim": 8, **_MOE}),
    "Mixtral": Target("MixtralForCausalLM", "MixtralConfig", {"head_dim": 8, **_MOE, "sliding_window": None}),
    "Qwen3-Next": Target("Qwen3NextForCausalLM", "Qwen3NextConfig", {**_DELTA, **_MOE, "shared_expert_intermediate_size": 16}, scale=3.0),
    "Qwen3.5": Target("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", {**_DELTA}, scale=3.0),
    "OLMo hybrid": Target("OlmoHybridForCausalLM", "OlmoHybridConfig", {**_DELTA}, scale=3.0),
    "LFM2": Target("Lfm2ForCausalLM", "Lfm2Config", {"layer_types": ["conv", "full_attention"]*2}, scale=3.0),
    "Falcon-H1": Target("FalconH1ForCausalLM", "FalconH1Config", {"head_dim": 8, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 16}, scale=3.0),
    "Jamba": Target("JambaForCausalLM", "JambaConfig", {"use_mamba_kernels": False, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 2, "num_experts_per_tok": 1, "mamba_d_state": 4, "mamba_dt_rank": 4}, scale=3.0),
    "Mamba": Target("MambaForCausalLM", "MambaConfig", {"state_size": 4, "time_step_rank": 4}, attention=("eager",), scale=3.0),
    "Mamba 2": Target("Mamba2ForCausalLM", "Mamba2Config", {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 16}, attention=("eager",), scale=3.0),
    "RecurrentGemma": Target("RecurrentGemmaForCausalLM", "RecurrentGemmaConfig", {"attention_window_size": WINDOW, "lru_width": 32, "head_dim": 8}, attention=("eager",), scale=3.0),
    "RWKV": Target("RwkvForCausalLM", "RwkvConfig", {"attention_hidden_size": 32}, attention=("eager",), scale=3.0),
    "GPT-NeoX": Target("GPTNeoXForCausalLM", "GPTNeoXConfig"),
    "GPT-2": Target("GPT2LMHeadModel", "GPT2Config", {"n_inner": 48}),
    "Bloom": Target("BloomForCausalLM", "BloomConfig", attention=("eager",), scale=3.0),
    "MPT": Target("MptForCausalLM", "MptConfig", attention=("eager",), scale=3.0),
    "Falcon": Target("FalconForCausalLM", "FalconConfig", {"alibi": True}, scale=3.0),
}


@lru_cache
def build(name: str, attention: str = "sdpa", dtype: torch.dtype = torch.float32, **changes) -> PreTrainedModel:
    spec = TARGETS[name]
    config_class = getattr(transformers, spec.config)
    config = config_class(**{**_SIZES, **spec.fields, **changes})
    torch.manual_seed(0)
    model = getattr(transformers, spec.model)._from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for n, p in model.named_parameters():
            if p.dim() >= 2: p.mul_(3.0 if "emb" in n or "wte" in n or "wpe" in n else spec.scale)
    model.generation_config = transformers.GenerationConfig(pad_token_id=0, eos_token_id=None)
    return model.to(dtype)
