"""Exact rejection sampling on given uniforms: which drafts stay, and the token behind them (step 6 of the round)."""

from .arguments import Verdict, check_arguments, check_rows
from .door import rejection_sample
from .torch import draw

__all__ = ["Verdict", "check_arguments", "check_rows", "draw", "rejection_sample"]
