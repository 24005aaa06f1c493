"""Attention masks of drafting, one per draft layer (training packs blocks and has its own, `objective.anchors`).

There is none where all rows are equally long and the layer sees everything, which is the rule.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.masking_utils import create_bidirectional_mask

from .configuration_dspark import DSparkConfig
from .context_cache import ContextCache
from .families import LayerAttention, layer_attention, sees_block, sees_context


def draft_masks(config: DSparkConfig, hidden: torch.Tensor, cache: ContextCache) -> list[Any]:
    """Masks for a block `hidden [B, q, D]` behind the context of `cache`, one per layer.

    Raises:
        ValueError: A mask is needed and the attention in use takes none.
    """
    block = hidden.shape[1]
    kinds = layer_attention(config)
    valid = cache.valid_slots(block, hidden.device)
    cut = {kind for kind in kinds if kind.cuts(max(cache.seen), block)}
    if valid is None and not cut:
        return [None] * len(kinds)
    attention = config._attn_implementation or ""
    if "flash" in attention:
        if cut:
            raise ValueError(
                f"This drafter's layers have windows or causal blocks, whose masks attention {attention!r} does not "
                "take. Load it with attn_implementation='sdpa'."
            )
        raise ValueError(
            f"Rows of different lengths are drafted under a mask with padding on the right, and attention "
            f"{attention!r} takes it for padding on the left. Load the drafter with attn_implementation='sdpa', or "
            "draft one row at a time."
        )
    masks: dict[LayerAttention, Any] = {
        kind: _cut_mask(config, kind, hidden, cache, valid) if kind in cut else _valid_mask(config, hidden, valid)
        for kind in dict.fromkeys(kinds)
    }
    return [masks[kind] for kind in kinds]


def _valid_mask(config: DSparkConfig, hidden: torch.Tensor, valid: torch.Tensor | None) -> Any:
    if valid is None:
        return None
    keys = hidden.new_empty(hidden.shape[0], valid.shape[1], 0)
    return create_bidirectional_mask(
        config=config, inputs_embeds=hidden, attention_mask=valid.long(), encoder_hidden_states=keys
    )


def _cut_mask(
    config: DSparkConfig, kind: LayerAttention, hidden: torch.Tensor, cache: ContextCache, valid: torch.Tensor | None
) -> Any:
    batch, block = hidden.shape[:2]
    device = hidden.device
    # Slots instead of positions: a row's differ by its offset, which no rule sees.
    anchors = torch.tensor(cache.lengths, device=device)[:, None, None]  # [B, 1, 1]
    keys = torch.arange(cache.first_slot, max(cache.lengths) + block, device=device)
    slots = anchors + torch.arange(block, device=device)[:, None]  # [B, q, 1]
    mask = sees_context(kind, slots, keys, anchors) | ((keys >= anchors) & sees_block(kind, slots, keys))
    if valid is not None:
        mask = mask & valid[:, None]
    if config._attn_implementation == "flex_attention":
        from torch.nn.attention.flex_attention import create_block_mask

        return create_block_mask(lambda b, _h, q, k: mask[b, q, k], batch, None, block, len(keys), device=str(device))
    if config._attn_implementation == "sdpa":
        return mask[:, None]
    return hidden.new_zeros(mask[:, None].shape).masked_fill(~mask[:, None], torch.finfo(hidden.dtype).min)


__all__ = ["draft_masks"]
