"""What a drafter is trained for: anchors and blocks, and the loss on them. Pure tensors; imports no model."""

from .anchors import Blocks, block_attention_mask, build_blocks, sample_anchors
from .losses import LossTerms, Objective, TargetLaw, block_loss, l1_distance, position_weights

__all__ = [
    "Blocks",
    "LossTerms",
    "Objective",
    "TargetLaw",
    "block_attention_mask",
    "block_loss",
    "build_blocks",
    "l1_distance",
    "position_weights",
    "sample_anchors",
]
