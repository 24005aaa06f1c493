"""Confidence of a drafted block and its running product, the survival (round step 4, paper eq. 7)."""

from .door import ConfidenceScores, ConfidenceWeights, confidence_scores, scores_of_logits

__all__ = ["ConfidenceScores", "ConfidenceWeights", "confidence_scores", "scores_of_logits"]
