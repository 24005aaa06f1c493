"""Markov steps, one or a block's: bias from the previous token, a choice, its log-probability (round step 3)."""

from .arguments import MAX_CANDIDATES, GatedFeatures, MarkovDraw, MarkovTables, RecurrentFeatures, Sampling
from .door import candidate_columns, markov_block, markov_step

__all__ = [
    "MAX_CANDIDATES",
    "GatedFeatures",
    "MarkovDraw",
    "MarkovTables",
    "RecurrentFeatures",
    "Sampling",
    "candidate_columns",
    "markov_block",
    "markov_step",
]
