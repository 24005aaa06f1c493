"""Greedy rounds replayed on a text the target wrote: real accepted lengths without running the target again.

Under greedy decoding a draft is accepted exactly while it agrees with the target's own continuation. Where that
continuation and its hidden states are known, a drafter's rounds can be walked with the drafter alone; the statistics
equal those of `generate` (tested).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ..context_cache import ContextCache
from ..decoding.capture import HiddenStateCapture
from ..modeling_dspark import DSparkDrafter, SharedModules
from ..plain_decoding import eos_ids, plain_decoding
from ..stats import SpeculationStats
from ..target import unwrap


@dataclass(frozen=True)
class WrittenText:
    """A greedy text of the target with what a drafter may read of it.

    Attributes:
        ids: int64 `[T]`, prompt and answer.
        prompt_length: Tokens of the prompt.
        layer_ids: Layers in `hidden`.
        hidden: `[T, layers * D_t]`, outputs of these layers (-1: the embedding output).
        max_new_tokens: Tokens the answer could have had.
    """

    ids: torch.Tensor
    prompt_length: int
    layer_ids: tuple[int, ...]
    hidden: torch.Tensor
    max_new_tokens: int

    def read(self, layer_ids: Sequence[int]) -> torch.Tensor:
        """Hidden states of `layer_ids`, in this order: `[T, m*D_t]`."""
        width = self.hidden.shape[-1] // len(self.layer_ids)
        starts = [self.layer_ids.index(layer) * width for layer in layer_ids]
        return torch.cat([self.hidden[:, start : start + width] for start in starts], dim=-1)


@torch.no_grad()
def write_text(
    target: PreTrainedModel, input_ids: torch.Tensor, layer_ids: Collection[int], *, max_new_tokens: int
) -> WrittenText:
    """Let the target continue `input_ids [1, P]` greedily, then read its hidden states; arguments as [`read_text`]."""
    generate: Any = target.generate
    ids = generate(input_ids, max_new_tokens=max_new_tokens, **plain_decoding(target, 0.0))
    return read_text(target, ids, input_ids.shape[1], layer_ids, max_new_tokens=max_new_tokens)


@torch.no_grad()
def read_text(
    target: PreTrainedModel, ids: torch.Tensor, prompt_length: int, layer_ids: Collection[int], *, max_new_tokens: int
) -> WrittenText:
    """A text the target wrote greedily (with a drafter or without), with its hidden states from one pass.

    Args:
        target: The target.
        ids: int64 `[1, T]`, prompt and answer.
        prompt_length: Tokens of the prompt.
        layer_ids: Layers to keep.
        max_new_tokens: Tokens the answer could have had.
    """
    layers = tuple(sorted(set(layer_ids)))
    states: list[torch.Tensor] = []
    model = unwrap(target)
    with HiddenStateCapture(model, layers) as capture:
        capture.run(lambda: model(input_ids=ids, use_cache=False), states.append)
    return WrittenText(ids[0], prompt_length, layers, states[0][0], max_new_tokens)


@torch.no_grad()
def replay(
    drafter: DSparkDrafter,
    text: WrittenText,
    target: PreTrainedModel,
    *,
    threshold: float = 0.0,
) -> SpeculationStats:
    """Statistics of the greedy rounds that would have written `text`, confidence logits included.

    Args:
        drafter: The drafter; its `target_layer_ids` must be among `text.layer_ids`.
        text: What the target wrote.
        target: The target, to borrow from; its end-of-sequence ids cut a block.
        threshold: `assistant_confidence_threshold`; 0: every draft is verified.
    """
    shared, ends = drafter.shared_modules(target), eos_ids(target)
    ids = text.ids.tolist()
    features = drafter.project_context(text.read(drafter.config.target_layer_ids or ())[None])
    cache = ContextCache(len(drafter.layers), [0])
    stats = SpeculationStats(num_new_tokens=len(ids) - text.prompt_length, num_rows=1, num_target_passes=1)
    anchor, known = text.prompt_length, 0
    while anchor < len(ids) - 1:
        left = len(ids) - 1 - anchor  # tokens still to come
        # As the loop: one token of the budget comes from the target after the accepted drafts.
        limit = min(drafter.config.num_draft_tokens, text.prompt_length + text.max_new_tokens - anchor - 2)
        drafts: list[int] = []
        drafted = drafter.config.num_draft_tokens if limit > 0 else 0
        if drafted:
            drafter.extend_context(cache, features[:, known:anchor])
            known = anchor
            drafts, confidence = _draft(drafter, ids[anchor], cache, shared)
            if confidence is not None:
                stats.confidence_logits.append(confidence.tolist())
                sure = (confidence.sigmoid() >= threshold).int().cumprod(-1)
                limit = min(limit, int(sure.sum()))
            drafts = _cut(drafts, limit, ends)
        following = ids[anchor + 1 : anchor + 1 + len(drafts)]
        accepted = next((k for k, (a, b) in enumerate(zip(drafts, following, strict=False)) if a != b), len(following))
        # The text ends at an accepted end-of-sequence draft: no token of the target's own comes after it.
        at_end = accepted == left
        stats.add_round(drafted, accepted if at_end else len(drafts), accepted)
        stats.num_target_passes += 1
        anchor += accepted + (0 if at_end else 1)
        if at_end:
            break
    return stats


def _draft(
    drafter: DSparkDrafter, anchor_id: int, cache: ContextCache, shared: SharedModules
) -> tuple[list[int], torch.Tensor | None]:
    """A greedy block and its raw confidence logits `[g]`, or None without a confidence head."""
    anchor = torch.tensor([anchor_id], device=drafter.device)
    block = drafter.draft_block(anchor, cache, shared)
    walk = drafter.walk_block(block, anchor, lambda _k, logits, _t: drafter.to_target_ids(logits.argmax(-1)))
    confidence = drafter.confidence_logits(block.hidden, walk.previous_ids)
    return walk.token_ids[0].tolist(), None if confidence is None else confidence[0]


def _cut(drafts: list[int], limit: int, ends: Collection[int]) -> list[int]:
    drafts = drafts[:limit]
    end = next((k for k, token in enumerate(drafts) if token in ends), None)
    return drafts if end is None else drafts[: end + 1]


__all__ = ["WrittenText", "read_text", "replay", "write_text"]
