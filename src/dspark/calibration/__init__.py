"""Calibration of confidence: sequential temperature scaling and the figures that judge it. Pure torch, no models.

Terms as everywhere: confidence c_k is the chance that draft k is accepted given that all before it are, survival a_k
their running product.
"""

from __future__ import annotations

from .ece import NUM_BINS, ReliabilityBins, auc, brier_score, expected_calibration_error, reliability_bins
from .reliability import PositionReliability, position_reliability
from .rounds import survival
from .temperature import PositionFit, fit_positions, fit_sequential_temperatures

__all__ = [
    "NUM_BINS",
    "PositionFit",
    "PositionReliability",
    "ReliabilityBins",
    "auc",
    "brier_score",
    "expected_calibration_error",
    "fit_positions",
    "fit_sequential_temperatures",
    "position_reliability",
    "reliability_bins",
    "survival",
]
