"""What a drafter is trained for: anchors and blocks, and the loss on them. Pure tensors; imports no model."""

from .anchors import Blocks, Sight, block_attention_mask, build_blocks, flex_block_mask, sample_anchors
from .fused import VocabularyHeads, VocabularyTerms, vocabulary_loss
from .losses import LossTerms, Objective, TargetLaw, block_loss, combine_terms, l1_distance, position_weights

__all__ = [
    "Blocks",
    "LossTerms",
    "Objective",
    "Sight",
    "TargetLaw",
    "VocabularyHeads",
    "VocabularyTerms",
    "block_attention_mask",
    "block_loss",
    "build_blocks",
    "combine_terms",
    "flex_block_mask",
    "l1_distance",
    "position_weights",
    "sample_anchors",
    "vocabulary_loss",
]
