"""Measuring a drafter on a real target."""

from .compare import Comparison, Summary, compare, plain_seconds, summarise
from .prompt_sets import SETS, chat_ids, read_prompts, sample_prompts

__all__ = [
    "SETS",
    "Comparison",
    "Summary",
    "chat_ids",
    "compare",
    "plain_seconds",
    "read_prompts",
    "sample_prompts",
    "summarise",
]
