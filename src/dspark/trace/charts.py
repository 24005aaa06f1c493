"""Geometry of the page's drawings, in plain numbers for SVG attributes: the page's policy allows no style there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..round_trace import RoundTrace
from .figures import Bin

_BAR, _GAP = 5, 1  # units per round of a strip, its gap included
_LEAST_RADIUS, _MOST_RADIUS = 1.5, 5.0  # of a point, in hundredths of the drawing


def strip(rounds: Sequence[RoundTrace], block: int) -> dict[str, Any]:
    """Bars of all rounds next to each other: drafted, verified and accepted drafts, each as one path.

    Args:
        rounds: In order.
        block: Drafts of the widest block, the height.
    """
    height = max(block, 1)
    counts = {
        "drafted": [len(entry.draft_ids) for entry in rounds],
        "verified": [entry.num_verified for entry in rounds],
        "accepted": [entry.num_accepted for entry in rounds],
    }
    paths = {
        name: "".join(
            f"M{_BAR * i} {height}v-{count}h{_BAR - _GAP}v{count}z" for i, count in enumerate(values) if count
        )
        for name, values in counts.items()
    }
    return {"width": max(_BAR * len(rounds), 1), "height": height, "bar": _BAR, **paths}


def points(bins: Sequence[Bin]) -> list[dict[str, float]]:
    """Points of a reliability diagram in a square of 100, y downwards; larger for more drafts."""
    most = max((entry.num_drafts for entry in bins), default=1)
    spread = _MOST_RADIUS - _LEAST_RADIUS
    return [
        {
            "x": round(100 * entry.predicted, 2),
            "y": round(100 - 100 * entry.observed, 2),
            "r": round(_LEAST_RADIUS + spread * (entry.num_drafts / most) ** 0.5, 2),
        }
        for entry in bins
    ]


def bars(values: Sequence[float]) -> list[float]:
    """Lengths in percent of the longest."""
    most = max(values, default=0)
    return [round(100 * value / most, 2) if most else 0.0 for value in values]


__all__ = ["bars", "points", "strip"]
