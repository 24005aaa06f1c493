"""What the batches of an optimizer step are given before the forward pass: anchors, and copies left out.

Anchors depend on the seed, the step and a sequence's place in it, and on nothing else, so padding, accumulation and
devices change nothing.
"""

from __future__ import annotations

import torch

from ..objective import Objective, build_blocks, position_weights, sample_anchors
from .collator import mix

Batch = dict[str, torch.Tensor]


def add_anchors(batch: Batch, num_anchors: int, seed: int, step: int, first: int) -> None:
    """Draw the anchors of each row, in place.

    Args:
        batch: With `loss_mask [B, S]`.
        num_anchors: Most anchors per row.
        seed, step: Of the run.
        first: Place in the step of the first row.
    """
    rows = []
    for row, mask in enumerate(batch["loss_mask"].bool().cpu()):
        generator = torch.Generator().manual_seed(mix(seed, step, first + row))
        rows.append(sample_anchors(mask[None, : last_supervised(mask)], num_anchors, generator=generator))
    padded = [torch.nn.utils.rnn.pad_sequence([row[part][0] for row in rows], batch_first=True) for part in (0, 1)]
    batch["anchor_positions"], batch["anchor_keep_mask"] = (part.to(batch["loss_mask"].device) for part in padded)


def leave_out_copies(batch: Batch, first: int, length: int) -> None:
    """Unsupervise the rows with which accelerate fills up the last batches, so that all devices have some; in place.

    Args:
        batch: Of one process.
        first: Place of its first row in a pass over the data.
        length: Sequences of the data; places from here on are copies.
    """
    batch["loss_mask"][max(length - first, 0) :] = False


def loss_weight(batch: Batch, num_draft_tokens: int, objective: Objective) -> torch.Tensor:
    """Sum of the position weights of a batch with anchors: the denominator of its loss."""
    anchors = (batch["anchor_positions"], batch["anchor_keep_mask"])
    blocks = build_blocks(batch["input_ids"], batch["loss_mask"], *anchors, num_draft_tokens)
    return position_weights(blocks.supervised, objective.decay).sum()


def last_supervised(mask: torch.Tensor) -> int:
    """Tokens up to the last supervised one, at least 1: what is behind it plays no part."""
    places = mask.nonzero()
    return int(places[-1]) + 1 if len(places) else 1


__all__ = ["add_anchors", "last_supervised", "leave_out_copies", "loss_weight"]
