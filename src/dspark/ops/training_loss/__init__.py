"""The vocabulary-wide terms of the training loss, with their gradient: cross-entropy, L1 distance, acceptance."""

from .door import TermWeights, VocabularyLoss, training_loss

__all__ = ["TermWeights", "VocabularyLoss", "training_loss"]
