"""What `dspark calibrate` shows: what was fitted, and what calibration does on held-out prompts."""

from __future__ import annotations

import math

from rich.console import Console

from ..calibration import PositionReliability
from ..evaluation.calibrate import Calibration
from .tables import print_table

_FEW_ROUNDS = 1000


def print_survival(console: Console, calibration: Calibration) -> None:
    """Figures by draft position."""
    rows = [
        [
            str(fit.position + 1), f"{fit.temperature:.2f}", str(fit.num_reached), str(before.num_rounds),
            _percent(before.observed), _percent(before.ece), _percent(after.ece), _area(before), _area(after),
        ]
        for fit, before, after in zip(calibration.fits, calibration.before, calibration.after, strict=True)
    ]  # fmt: skip
    means = [_percent(calibration.mean_ece(part)) for part in (calibration.before, calibration.after)]
    print_table(
        console,
        f"Survival at temperature {calibration.key}: fitted on {calibration.num_fit_rounds} rounds, judged on "
        f"{calibration.num_held_out_rounds} rounds of held-out prompts, accepted length "
        f"{calibration.mean_acceptance_length:.2f}",
        ("pos.", "T", "reached", "verified", "accepted", "ECE raw", "ECE new", "AUC raw", "AUC new"),
        [*rows, ["mean", "", "", "", "", *means, "", ""]],
        caption="reached: rounds of the fit that accepted every draft before it; verified: held-out rounds that "
        "verified it; accepted: the share of these that accepted it and every draft before it",
    )


def fitted_positions(calibration: Calibration) -> str:
    """Which positions got a temperature of their own, 1-based, and whether that was on few rounds."""
    total, fitted, rounds = len(calibration.fits), calibration.fitted, calibration.num_fit_rounds
    what = f"temperatures for decoding at {calibration.key}"
    few = "" if rounds >= _FEW_ROUNDS else f". {rounds} rounds are few: take this for a first guess, give more prompts"
    if len(fitted) == total:
        return f"{what} fitted at all {total} positions{few}"
    named = ", ".join(str(position + 1) for position in fitted)
    return f"{what} fitted at {len(fitted)} of {total} positions ({named}); each other keeps the one before it{few}"


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{share:.1%}"


def _area(figures: PositionReliability) -> str:
    return "-" if math.isnan(figures.auc) else f"{figures.auc:.2f}"


__all__ = ["fitted_positions", "print_survival"]
