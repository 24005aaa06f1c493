"""Acceptance traces of a real drafter: its block at every place of texts the target wrote, all places in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from ..modeling_dspark import DraftBlock, DSparkDrafter
from ..modeling_outputs import split_anchor
from ..objective import build_blocks
from ..simulation import AcceptanceTrace
from ..training_forward import block_hidden
from .replay import WrittenText


@torch.no_grad()
def record_trace(
    domain: str, drafter: DSparkDrafter, target: PreTrainedModel, texts: Sequence[WrittenText]
) -> AcceptanceTrace:
    """What `drafter` would draft at every place of `texts`, greedily.

    Args:
        domain: Name of the trace.
        drafter: With a confidence head.
        target: The target, to borrow from.
        texts: What it wrote; those of fewer than two new tokens have no round and are left out.

    Raises:
        ValueError: The drafter has no confidence head, or no text has a round.
    """
    if drafter.confidence_head is None:
        raise ValueError("A trace keeps confidences, and this drafter has no confidence head.")
    texts = [text for text in texts if len(text.ids) - text.prompt_length > 1]
    if not texts:
        raise ValueError(f"No text of {domain!r} has two new tokens.")
    parts = [_blocks(drafter, target, text) for text in texts]
    own, survival, accepted = (torch.cat(part).cpu().numpy() for part in zip(*parts, strict=True))
    starts = np.cumsum([0, *(len(part[0]) for part in parts)])
    prompts = np.array([text.prompt_length for text in texts], np.int64)
    return AcceptanceTrace(domain, starts.astype(np.int64), prompts, own, survival, accepted)


def _blocks(
    drafter: DSparkDrafter, target: PreTrainedModel, text: WrittenText
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Own confidence `[n, K]`, survival `[n, K]` and accepted drafts `[n]` at the n anchors of a text."""
    shared = drafter.shared_modules(target)
    ids = text.ids.to(drafter.device)[None]
    anchors = torch.arange(text.prompt_length, ids.shape[1] - 1, device=ids.device)[None]
    everywhere = torch.ones_like(ids, dtype=torch.bool)
    blocks = build_blocks(
        ids, everywhere, anchors, torch.ones_like(anchors, dtype=torch.bool), drafter.config.num_draft_tokens
    )
    states = text.read(drafter.config.target_layer_ids or ())[None]
    slots = block_hidden(drafter, ids, states, blocks, shared)[0]
    hidden, anchor_hidden = split_anchor(drafter.config, slots)
    block = DraftBlock(hidden, drafter.base_logits(hidden, shared), anchor_hidden)
    anchor_ids = ids[0, anchors[0]]
    walk = drafter.walk_block(block, anchor_ids, lambda _k, logits, _t: drafter.to_target_ids(logits.argmax(-1)))
    logits = drafter.confidence_logits(hidden, walk.previous_ids)
    assert logits is not None
    temperatures = drafter.config.temperatures_at(0.0)
    scaled = logits if temperatures is None else logits / torch.tensor(temperatures, device=logits.device)
    is_right = (walk.token_ids == blocks.labels[0]) & blocks.supervised[0]  # nothing comes after the text's end
    return logits.sigmoid(), scaled.sigmoid().cumprod(-1), is_right.int().cumprod(-1).sum(-1)


__all__ = ["record_trace"]
