"""Sequential heads (Markov, gated, recurrent) and the confidence head: torch modules with readable maths."""

from __future__ import annotations

from typing import Any

from .base import SequentialHead
from .confidence import ConfidenceHead
from .gated import GatedMarkovHead
from .markov import MarkovHead
from .rnn import RecurrentHead

# Beside the literal `MarkovHeadType` of the config; a test holds that the two agree.
SEQUENTIAL_HEADS: dict[str, type[SequentialHead]] = {
    "vanilla": MarkovHead,
    "gated": GatedMarkovHead,
    "rnn": RecurrentHead,
}


def build_sequential_head(config: Any) -> SequentialHead | None:
    """The head `config.markov_head_type` names, or None for `"none"`."""
    return None if config.markov_head_type == "none" else SEQUENTIAL_HEADS[config.markov_head_type](config)


__all__ = ["SEQUENTIAL_HEADS", "ConfidenceHead", "SequentialHead", "build_sequential_head"]
