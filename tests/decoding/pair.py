"""The pair most tests of the loop use: a tiny target with varied texts, and drafters of known accept lengths."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.scripted import CYCLE, Hostile, Oracle

VOCAB = 128
BLOCK = 7
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def new_target(attention: str = "sdpa", *, sliding_window: int | None = None) -> PreTrainedModel:
    """A target of its own for a test that changes it; full attention unless a window is given."""
    torch.manual_seed(0)
    if sliding_window is None:
        model = Qwen3ForCausalLM._from_config(Qwen3Config(**_SIZES), attn_implementation=attention)
    else:
        config = MistralConfig(**_SIZES, sliding_window=sliding_window)
        model = MistralForCausalLM._from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2.0)
        # Rows of one length: no token is preferred, so texts are varied.
        head = model.lm_head.weight
        head.sub_(head.mean(0)).div_(head.norm(dim=-1, keepdim=True) / 2)
        head[0] = 0  # padding is never written
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model.eval()


@lru_cache
def target(attention: str = "sdpa", *, sliding_window: int | None = None) -> PreTrainedModel:
    """The shared target: no test may leave a trace on it."""
    return new_target(attention, sliding_window=sliding_window)


def prompt(length: int = 6, seed: int = 0) -> torch.Tensor:
    """Random prompt, int64 `[1, length]`, without the padding token."""
    return torch.randint(1, VOCAB - 1, (1, length), generator=torch.Generator().manual_seed(seed))


def plain(model: PreTrainedModel, ids: torch.Tensor, **kwargs: Any) -> Any:
    """Plain greedy generation."""
    return model.generate(ids, do_sample=False, **kwargs)


def sampled(model: PreTrainedModel, ids: torch.Tensor, **kwargs: Any) -> Any:
    """Sampled generation."""
    return model.generate(ids, do_sample=True, **kwargs)


@lru_cache
def distinct() -> tuple[torch.Tensor, list[int]]:
    """A prompt whose first 20 greedy tokens all differ, and the whole text: any of these can be declared a stop."""
    prompts = torch.cat([prompt(seed=seed) for seed in range(1024)])
    for row in plain(target(), prompts, max_new_tokens=20).tolist():
        if len({*row[6:]}) == 20:
            ids = torch.tensor([row[:6]])
            return ids, plain(target(), ids, max_new_tokens=60)[0].tolist()
    raise AssertionError("no prompt with 20 different tokens behind it")


def oracle(wrong: Any = CYCLE, *, text: list[int] | None = None, model: PreTrainedModel | None = None) -> Oracle:
    """An oracle for `distinct()`'s prompt unless another text is given."""
    return Oracle(target() if model is None else model, [distinct()[1] if text is None else text], wrong=wrong).eval()


def hostile(seed: int = 0, model: PreTrainedModel | None = None) -> Hostile:
    """A drafter that is nearly always wrong."""
    return Hostile(target() if model is None else model, seed=seed).eval()


__all__ = ["BLOCK", "VOCAB", "distinct", "hostile", "new_target", "oracle", "plain", "prompt", "sampled", "target"]
