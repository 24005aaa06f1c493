"""How much to draft and verify: Algorithm 1, step-time curves, policies. Pure: torch and numpy only.

Terms as everywhere: survival a_k is the chance that draft k and all before it are accepted; a round runs the target
over `sum(1 + verify length)` tokens of all live rows.
"""

from __future__ import annotations

from .curve_file import CurveKey
from .policies import POLICIES, make_policy
from .policy import RoundObservation, VerifyPolicy
from .prefix import foresighted_schedule, prefix_schedule, ranked_prefixes
from .throughput import ThroughputCurve

__all__ = [
    "POLICIES",
    "CurveKey",
    "RoundObservation",
    "ThroughputCurve",
    "VerifyPolicy",
    "foresighted_schedule",
    "make_policy",
    "prefix_schedule",
    "ranked_prefixes",
]
