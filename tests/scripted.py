"""Drafters whose accept length is known: they propose the target's own continuation, wrong at one chosen slot.

Random tiny models accept almost nothing, so stops inside a block, rollback and batches would stay untested. `Oracle`
reads the right continuation from a plain greedy run; `Hostile` proposes noise.
"""

from __future__ import annotations

from itertools import cycle
from typing import Any

import torch
from transformers import PreTrainedModel

from dspark import DSparkConfig, DSparkDrafter
from dspark.context_cache import ContextCache
from dspark.modeling_dspark import DraftBlock, SharedModules
from dspark.target import text_config


def drafter_config(target: PreTrainedModel, **overrides: Any) -> DSparkConfig:
    """Config of a small drafter that fits `target`."""
    config = text_config(target)
    layers = config.num_hidden_layers
    fields: dict[str, Any] = {
        "family": "qwen3",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "block_size": 7,
        "mask_token_id": config.vocab_size - 1,
        "target_layer_ids": sorted({0, max(layers - 2, 0)}),
        "num_target_layers": layers,
        "markov_rank": 8,
    }
    return DSparkConfig(**{**fields, **overrides})


class Forced(DSparkDrafter):
    """Runs the whole drafter, then forces each block's tokens by one-hot logits.

    `forced_tokens(b, position)` gives the target ids of live row b's block whose anchor sits at `position`.
    """

    def forced_tokens(self, b: int, position: int) -> list[int]:
        raise NotImplementedError

    def draft_block(
        self, anchor_ids: torch.Tensor, cache: ContextCache, shared: SharedModules, num_drafts: int | None = None
    ) -> DraftBlock:
        positions = [offset + length for offset, length in zip(cache.offsets, cache.lengths, strict=True)]
        block = super().draft_block(anchor_ids, cache, shared, num_drafts)
        forced = torch.full_like(block.base_logits, -1e4)
        for b, position in enumerate(positions):
            for k, token in enumerate(self.forced_tokens(b, position)[: forced.shape[1]]):
                forced[b, k, token] = 1e4
        return DraftBlock(block.hidden, forced)


class Oracle(Forced):
    """Proposes the target's own continuation, wrong at one slot per round.

    Args:
        target: The model it drafts for.
        texts: Per row, the whole text of a plain run without padding, prompt included: `texts[b][n]` is the token at
            position n. Rows are told apart by their anchor's position and token only when `texts` has one entry per
            live row, so use one row, or rows that all stay live.
        wrong: Slot that is wrong in round 0, 1, ..., cycled; None: all right. A list of lists gives one per row.
    """

    def __init__(
        self, target: PreTrainedModel, texts: list[list[int]], wrong: Any = (None,), **overrides: Any
    ) -> None:
        super().__init__(drafter_config(target, markov_rank=0, **overrides))
        self.texts = texts
        per_row = wrong if any(isinstance(w, list | tuple) for w in wrong) else [wrong] * len(texts)
        self.schedule = [cycle(w) for w in per_row]

    def forced_tokens(self, b: int, position: int) -> list[int]:
        right = self.texts[b][position + 1 :]
        size = self.config.num_draft_tokens
        tokens = (right + [0] * size)[:size]
        slot = next(self.schedule[b])
        if slot is not None:
            tokens[slot] = (tokens[slot] + 1) % self.config.vocab_size
        return tokens


# Every accept length, in an order that mixes short and long ones.
CYCLE = (0, 3, None, 1, 6, 2, None, 5, 4, 0)


class Hostile(Forced):
    """Proposes uniform noise: nothing about the output may change."""

    def __init__(self, target: PreTrainedModel, seed: int = 0, **overrides: Any) -> None:
        super().__init__(drafter_config(target, markov_rank=0, **overrides))
        self._generator = torch.Generator().manual_seed(seed)

    def forced_tokens(self, b: int, position: int) -> list[int]:
        size = (self.config.num_draft_tokens,)
        return torch.randint(self.config.vocab_size, size, generator=self._generator).tolist()


__all__ = ["CYCLE", "Forced", "Hostile", "Oracle", "drafter_config"]
