"""Calibration of confidence: sequential temperature scaling, the head's own fit, and the figures that judge them. Pure
torch, no models.

Terms as everywhere: confidence c_k is the chance that draft k is accepted given that all before it are, survival a_k
their running product.
"""

from __future__ import annotations

from .confidence_fit import ConfidenceFit, LinearHead, fit_confidence_head
from .ece import NUM_BINS, ReliabilityBins, auc, brier_score, expected_calibration_error, reliability_bins
from .reliability import PositionReliability, position_reliability
from .rounds import survival
from .temperature import PositionFit, fit_positions, fit_sequential_temperatures

__all__ = [
    "NUM_BINS",
    "ConfidenceFit",
    "LinearHead",
    "PositionFit",
    "PositionReliability",
    "ReliabilityBins",
    "auc",
    "brier_score",
    "expected_calibration_error",
    "fit_confidence_head",
    "fit_positions",
    "fit_sequential_temperatures",
    "position_reliability",
    "reliability_bins",
    "survival",
]
