"""Small targets and drafters of every kind, with weights so far from their initial values that each one matters."""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import torch
import transformers
from transformers import PreTrainedModel

from dspark import DSparkConfig, DSparkDrafter

VOCAB, WIDTH, LAYERS, MASK = 64, 32, 4, 63
TAPS = [-1, 0, 2]
DRAFT_IDS = [0, 3, 4, 9, 10, 17, 20, 22, 31, 33, 38, 40, 47, 50, 51, 58, 60, 61]  # sorted, not contiguous

_TARGETS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {"head_dim": 16}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {"head_dim": 16}),
    "gemma4": (
        "Gemma4ForCausalLM", "Gemma4TextConfig",
        {"head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
         "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8,
         "hidden_size_per_layer_input": 0, "final_logit_softcapping": 5.0, "num_kv_shared_layers": 0},
    ),
}  # fmt: skip


@lru_cache
def target(family: str = "qwen3", **changes: Any) -> PreTrainedModel:
    """A target of four layers and 64 tokens; the same object each time."""
    model_class, config_class, fields = _TARGETS[family]
    sizes = {
        "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": LAYERS,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256,
    }  # fmt: skip
    config = getattr(transformers, config_class)(**{**sizes, **fields, **changes})
    return shaken(getattr(transformers, model_class), config).requires_grad_(False)


def config(family: str = "qwen3", **changes: Any) -> DSparkConfig:
    """Config of a small drafter for `target(family)`."""
    fields: dict[str, Any] = {
        "family": family, "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 256,
        "block_size": 4, "mask_token_id": MASK, "target_layer_ids": TAPS, "num_target_layers": LAYERS,
        "markov_rank": 6,
    }  # fmt: skip
    if family == "gemma4":
        own = {"hidden_act": "gelu_pytorch_tanh", "attention_k_eq_v": True, "final_logit_softcapping": 5.0}
        fields |= {
            **own,
            "rope_parameters": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        }
    return DSparkConfig(**{**fields, **changes})


def drafter(family: str = "qwen3", *, cls: type[DSparkDrafter] = DSparkDrafter, **changes: Any) -> DSparkDrafter:
    """A drafter with such a config; a reduced vocabulary speaks `DRAFT_IDS`."""
    model = shaken(cls, config(family, **changes))
    if model.draft_token_ids is not None:
        model.draft_token_ids.copy_(torch.tensor(DRAFT_IDS))
    return model


def shaken(model_class: type[PreTrainedModel], of: Any) -> Any:
    """A model of config `of` with noise on every parameter and float buffer that is stored; the same each time."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(5)
        model = model_class(of)
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(0.3 * torch.randn(tensor.shape))
    return model.eval()


def states(rows: int = 2, length: int = 9, width: int = WIDTH * len(TAPS), seed: int = 1) -> torch.Tensor:
    """Target hidden states as a drafter reads them."""
    return torch.randn(rows, length, width, generator=torch.Generator().manual_seed(seed))


class Case(NamedTuple):
    """One kind of drafter: its family and the fields in which it differs from `config(family)`."""

    family: str
    fields: dict[str, Any]


_NARROW = {"hidden_size": 24, "target_hidden_size": WIDTH, "share_embedding": False, "share_lm_head": False}
_REDUCED = {"draft_vocab_size": len(DRAFT_IDS)}
STORAGE: dict[str, dict[str, Any]] = {
    "borrowed": {},
    "own": {"share_embedding": False, "share_lm_head": False},
    "own embedding": {"share_embedding": False},
    "own head": {"share_lm_head": False},
    "reduced": _REDUCED,
    "reduced own embedding": {**_REDUCED, "share_embedding": False},
    "narrow": _NARROW,
    "narrow reduced": {**_NARROW, **_REDUCED},
}
HEADS: dict[str, dict[str, Any]] = {
    f"{head}-{confidence}": {
        "markov_head_type": head, "markov_rank": 0 if head == "none" else 6,
        "enable_confidence_head": confidence != "none", "confidence_head_with_markov": confidence == "markov",
    }
    for head, confidence in product(("none", "vanilla", "gated", "rnn"), ("none", "plain", "markov"))
    if (head, confidence) != ("none", "markov")
}  # fmt: skip


def _cases() -> dict[str, Case]:
    """Every family with every pair of heads, and every family with every storage, biases and anchor rule cycling."""
    cases = {}
    rest = list(product((False, True), (True, False)))
    for family in _TARGETS:
        pairs = [*zip(HEADS, list(STORAGE) * 2, strict=False), *zip(list(HEADS)[3:], STORAGE, strict=False)]
        for i, (heads, storage) in enumerate(pairs):
            has_bias, from_anchor = rest[(i + i // 4) % 4]
            own = "own" in storage or "narrow" in storage
            fields = {
                **HEADS[heads], **STORAGE[storage], "attention_bias": has_bias, "confidence_head_bias": has_bias,
                "sample_from_anchor": from_anchor, "embed_scale": 2.0 if own else 1.0,
            }  # fmt: skip
            name = f"{family} {heads} {storage} {'bias ' if has_bias else ''}{'anchor' if from_anchor else 'mask'}"
            cases[name] = Case(family, fields)
    return cases


CASES = _cases()
