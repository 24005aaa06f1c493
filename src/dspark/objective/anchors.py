"""Which blocks a training sequence gives: anchor positions, their labels, and who may attend to whom.

An anchor must be supervised itself and have a supervised next token (reference rule; mask 0001111 allows 3, 4, 5). A
block's labels are the tokens after its anchor, up to the first unsupervised one. Pure tensors, no model.
Shape letters: `B` sequences, `S` tokens, `A` anchors per sequence, `K` draft tokens per block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Sight(NamedTuple):
    """What a layer with a window or causal blocks sees; positions int64 and broadcastable, results bool.

    Attributes:
        context: `(slots, keys, anchors)`: whether slots see context keys, those from the anchor on not.
        block: `(slots, keys)`: whether slots see slots of their own block.
    """

    context: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    block: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Blocks(NamedTuple):
    """Blocks drawn from a batch of sequences.

    Attributes:
        anchor_positions: int64 `[B, A]`, sorted; dummy blocks have 0.
        keep: bool `[B, A]`, False for dummy blocks that only fill the shape.
        label_positions: int64 `[B, A, K]`, clamped into the sequence.
        labels: int64 `[B, A, K]`, token ids at `label_positions`.
        previous_ids: int64 `[B, A, K]`, the token before each label (position 0: the anchor).
        supervised: bool `[B, A, K]`, True on the contiguous supervised prefix of each kept block.
    """

    anchor_positions: torch.Tensor
    keep: torch.Tensor
    label_positions: torch.Tensor
    labels: torch.Tensor
    previous_ids: torch.Tensor
    supervised: torch.Tensor


def sample_anchors(
    loss_mask: torch.Tensor, num_anchors: int, *, generator: torch.Generator | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw up to `num_anchors` anchors per sequence, uniformly without replacement.

    Args:
        loss_mask: bool or 0/1 `[B, S]`, True where a token is supervised.
        num_anchors: Most anchors per sequence.
        generator: Source of the draws.

    Returns:
        Anchor positions int64 `[B, A]` (sorted, dummies 0 at the end) and a keep mask bool `[B, A]`; A is the largest
        number any sequence got, at least 1.
    """
    mask = loss_mask.bool()
    allowed = mask.clone()
    allowed[:, -1] = False
    allowed[:, :-1] &= mask[:, 1:]
    counts = allowed.sum(-1).clamp(max=num_anchors)
    width = max(int(counts.max()), 1)
    noise = torch.rand(mask.shape, generator=generator, device=mask.device).masked_fill(~allowed, 2.0)
    drawn = noise.argsort(dim=-1)[:, :width]
    keep = torch.arange(width, device=mask.device) < counts[:, None]
    # Dummies sort behind every real anchor, then become 0.
    positions = drawn.masked_fill(~keep, mask.shape[1]).sort(dim=-1).values
    return positions.masked_fill(~keep, 0), keep


def build_blocks(
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    anchor_positions: torch.Tensor,
    keep: torch.Tensor,
    num_draft_tokens: int,
) -> Blocks:
    """Labels, previous tokens and supervision of the blocks at `anchor_positions`.

    Worked example, K = 3, ids `[5, 6, 7, 8]`, all supervised, anchor 1: labels `[7, 8, 8]` (the last one clamped),
    previous `[6, 7, 8]`, supervised `[True, True, False]`.

    Args:
        input_ids: int64 `[B, S]`.
        loss_mask: bool or 0/1 `[B, S]`.
        anchor_positions: int64 `[B, A]`.
        keep: bool `[B, A]`.
        num_draft_tokens: K.
    """
    length = input_ids.shape[1]
    steps = torch.arange(1, num_draft_tokens + 1, device=input_ids.device)
    wanted = anchor_positions[..., None] + steps  # [B, A, K]
    positions = wanted.clamp(max=length - 1)
    # A dummy block reads token 0 everywhere and supervises nothing.
    positions = positions.masked_fill(~keep[..., None], 0)
    flat = positions.flatten(1)
    labels = input_ids.gather(1, flat).view_as(positions)
    supervised = loss_mask.bool().gather(1, flat).view_as(positions) & (wanted < length) & keep[..., None]
    anchors = input_ids.gather(1, anchor_positions)
    previous = torch.cat([anchors[..., None], labels[..., :-1]], dim=-1)
    return Blocks(anchor_positions, keep, positions, labels, previous, supervised.cumprod(-1).bool())


def block_attention_mask(
    anchor_positions: torch.Tensor,
    keep: torch.Tensor,
    *,
    context_length: int,
    block_size: int,
    sight: Sight | None = None,
) -> torch.Tensor:
    """Who may attend to whom when blocks are packed after the context.

    A block sees context positions strictly before its anchor (positions are compared, never block indices) and its own
    slots, in both directions.

    Args:
        anchor_positions: int64 `[B, A]`.
        keep: bool `[B, A]`; dummy blocks see only themselves.
        context_length: S.
        block_size: Input slots per block, `q`.
        sight: What the layer sees; None: the whole context before the anchor and the whole block.

    Returns:
        bool `[B, 1, A*q, S + A*q]`, True = may attend; keys are the context, then the blocks.
    """
    batch, anchors = anchor_positions.shape
    device = anchor_positions.device
    places = torch.arange(context_length, device=device)
    slot = torch.arange(anchors * block_size, device=device)
    owner, place = slot // block_size, slot % block_size
    own = owner[:, None] == owner
    if sight is None:
        sees_context = places < anchor_positions[..., None]  # [B, A, S]
        sees_context = (sees_context & keep[..., None]).repeat_interleave(block_size, dim=1)
    else:
        of_slot = anchor_positions[:, owner, None]  # [B, A*q, 1]
        sees_context = sight.context(of_slot + place[:, None], places, of_slot) & keep[:, owner, None]
        own = own & sight.block(place[:, None], place)
    own = own.expand(batch, -1, -1)
    return torch.cat([sees_context, own], dim=-1)[:, None]


def flex_block_mask(
    anchor_positions: torch.Tensor,
    keep: torch.Tensor,
    *,
    context_length: int,
    block_size: int,
    sight: Sight | None = None,
) -> Any:
    """`block_attention_mask` as flex attention's `BlockMask`, which is never laid out whole; arguments as there."""
    from torch.nn.attention.flex_attention import create_block_mask

    batch, anchors = anchor_positions.shape
    device = anchor_positions.device
    # A dummy block stands before every position, so it sees no context.
    limits = torch.where(keep, anchor_positions, -1).repeat_interleave(block_size, dim=1)  # [B, A*q]
    queries = anchors * block_size

    def may_attend(b: torch.Tensor, _h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        in_context = (kv < context_length) & (kv < limits[b, q])
        own = (kv >= context_length) & ((kv - context_length) // block_size == q // block_size)
        if sight is not None:
            place = q % block_size
            # Not in place: flex attention compiles this.
            in_context = in_context & sight.context(limits[b, q] + place, kv, limits[b, q])
            own = own & sight.block(place, (kv - context_length) % block_size)
        return in_context | own

    return create_block_mask(may_attend, batch, None, queries, context_length + queries, device=str(device))
