"""Tiny targets and drafters whose laws are far from uniform and from each other, and the target's own law."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from dspark import DSparkDrafter
from dspark.modeling_dspark import DraftBlock
from tests.reference.law import Text, TextLaw, target_law
from tests.scripted import drafter_config


class ConstantDrafter(DSparkDrafter):
    """Drafts every token from the same law."""

    log_law: torch.Tensor

    def draft_block(self, *args: Any) -> DraftBlock:
        block = super().draft_block(*args)
        return DraftBlock(block.hidden, self.log_law.expand_as(block.base_logits))


@lru_cache
def target(vocab: int = 3, seed: int = 0, contrast: float = 2.0) -> LlamaForCausalLM:
    """A two-layer random Llama; `contrast` scales its logits."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=512, bos_token_id=None, eos_token_id=None,
        pad_token_id=0, tie_word_embeddings=False, initializer_range=0.5,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(contrast / model.lm_head.weight.norm(dim=-1, keepdim=True).mean())
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model


def drafter(model: PreTrainedModel, seed: int = 1, cls: type[DSparkDrafter] = DSparkDrafter, **overrides: Any) -> Any:
    """A random drafter whose heads matter: law and confidence move with position and previous token."""
    torch.manual_seed(seed)
    fields = {"block_size": 2, "hidden_size": 16, "num_hidden_layers": 1, "head_dim": 8, "markov_rank": 4}
    config = drafter_config(model, **{**fields, "initializer_range": 0.4, **overrides})
    made = cls(config).eval()
    with torch.no_grad():
        for module, scale in ((made.markov_head, 2.0), (made.confidence_head, 3.0)):
            for parameter in () if module is None else module.parameters():
                parameter.mul_(scale)
        if made.draft_token_ids is not None:  # spread over the vocabulary, so that column j is not token j
            step = (config.vocab_size - 1) // max(config.draft_vocab_size - 1, 1)
            made.draft_token_ids.copy_(torch.arange(config.draft_vocab_size) * step)
    return made


def constant_pair(target_law: list[float], draft_law: list[float], block_size: int) -> tuple[Any, Any]:
    """A target and a drafter that say the same law whatever the text."""

    def say(module: Any, args: Any, outputs: Any) -> Any:
        outputs.logits = torch.tensor(target_law).log().expand_as(outputs.logits)
        return outputs

    model = target.__wrapped__(len(target_law))
    model.register_forward_hook(say)
    made = drafter(model, cls=ConstantDrafter, block_size=block_size, markov_rank=0)
    made.log_law = torch.tensor(draft_law).log()
    return model, made


@lru_cache
def close_pair(
    vocab: int = 12, *, noise: float = 0.5, attention: float = 0.05, seed: int = 0, **overrides: Any
) -> tuple[LlamaForCausalLM, Any]:
    """A target and a drafter whose law is a disturbed copy of the target's, so most drafts stay though none is sure.

    The Markov head holds the target's logits behind each single token; the target's attention adds what it misses.
    """
    model = target.__wrapped__(vocab)
    made = drafter(model, markov_rank=vocab, **{"block_size": 3, **overrides})
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(attention)
        after_each = model(torch.arange(vocab)[:, None]).logits[:, -1]
        made.norm.weight.zero_()  # base logits of 0
        made.markov_head.markov_w1.weight.copy_(after_each + noise * torch.randn(vocab, vocab, generator=generator))
        made.markov_head.markov_w2.weight.copy_(torch.eye(vocab))
    return model, made


def prepared_processors(model: PreTrainedModel, ids: torch.Tensor, **kwargs: Any) -> Any:
    """The processors transformers itself prepares for these arguments, warpers included."""
    box: list[Any] = []

    def note(model: Any, input_ids: torch.Tensor, logits_processor: Any, *_: Any, **__: Any) -> torch.Tensor:
        box.append(logits_processor)
        return input_ids

    model.generate(ids, custom_generate=note, do_sample=True, **kwargs)
    return box[0]


@torch.no_grad()
def own_law(model: PreTrainedModel, ids: torch.Tensor, horizon: int, **kwargs: Any) -> TextLaw:
    """The target's law of the next `horizon` tokens: whole-prefix forwards, no cache, no drafter."""
    for name in ("survival_threshold", "candidate_top_k", "context_window"):
        kwargs.pop(name, None)  # the others are transformers' own names, which plain decoding ignores
    processors = prepared_processors(model, ids, **kwargs)
    stops = kwargs.get("eos_token_id", [])
    stops = [stops] if isinstance(stops, int) else stops
    pad = model.generation_config.pad_token_id

    def next_law(text: Text) -> list[float]:
        if set(text) & set(stops):
            return [float(i == pad) for i in range(model.config.vocab_size)]
        prefix = torch.cat([ids, torch.tensor([text], dtype=torch.long)], dim=1)
        scores = processors(prefix, model(prefix).logits[:, -1].float())
        return scores.double().softmax(-1)[0].tolist()

    return target_law(next_law, horizon)


__all__ = ["close_pair", "constant_pair", "drafter", "own_law", "prepared_processors", "target"]
