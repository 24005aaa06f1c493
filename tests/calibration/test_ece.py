"""ECE, AUC, Brier score and reliability bins against loops, hand-made numbers and scipy.

Catches: a bin whose edge belongs to the other side, a probability of one without a bin, empty bins that count, ties
broken by order, a figure where there is nothing to count, bad input that goes through.
"""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import mannwhitneyu

from dspark.calibration import NUM_BINS, auc, brier_score, expected_calibration_error, reliability_bins

from .synthetic import slow_auc, slow_ece


def draws(count: int, seed: int, *, levels: int | None = None) -> tuple[list[float], list[int]]:
    """Predictions and events that go with them; few `levels` give many ties and predictions on the bins' edges."""
    generator = torch.Generator().manual_seed(seed)
    predicted = torch.rand(count, generator=generator, dtype=torch.float64)
    if levels is not None:
        predicted = (predicted * levels).round() / levels
    return predicted.tolist(), (torch.rand(count, generator=generator) < predicted**1.5).long().tolist()


@pytest.mark.parametrize("levels", [None, 3, 20, 40])
@pytest.mark.parametrize("count", [1, 2, 7, 400])
def test_figures_equal_slow_loops(count: int, levels: int | None) -> None:
    for seed in range(5):
        predicted, observed = draws(count, seed, levels=levels)
        for bins in (1, 7, 20):
            got = expected_calibration_error(predicted, observed, num_bins=bins)
            assert got == pytest.approx(slow_ece(predicted, observed, bins), abs=1e-12)
        assert auc(predicted, observed) == pytest.approx(slow_auc(predicted, observed), abs=1e-12, nan_ok=True)
        mean = sum((p - y) ** 2 for p, y in zip(predicted, observed, strict=True)) / count
        assert brier_score(predicted, observed) == pytest.approx(mean, abs=1e-12)


@pytest.mark.parametrize("levels", [None, 5])
def test_auc_is_the_rank_statistic(levels: int | None) -> None:
    predicted, observed = draws(300, 3, levels=levels)
    happened = [p for p, y in zip(predicted, observed, strict=True) if y]
    missed = [p for p, y in zip(predicted, observed, strict=True) if not y]
    statistic = mannwhitneyu(happened, missed).statistic
    assert auc(predicted, observed) == pytest.approx(statistic / len(happened) / len(missed), abs=1e-12)


def test_by_hand() -> None:
    # Bins of a quarter: {.1, .2} with one of two, {.5} and {.6} with one of two, {1.} with one of one.
    predicted, observed = [0.1, 0.2, 0.5, 0.6, 1.0], [0, 1, 1, 0, 1]
    bins = reliability_bins(predicted, observed, num_bins=4)
    assert bins.edges.tolist() == [0, 0.25, 0.5, 0.75, 1]
    assert bins.counts.tolist() == [2, 0, 2, 1]
    assert bins.mean_predicted.tolist() == pytest.approx([0.15, math.nan, 0.55, 1.0], nan_ok=True)
    assert bins.observed_rate.tolist() == pytest.approx([0.5, math.nan, 0.5, 1.0], nan_ok=True)
    assert bins.ece == pytest.approx(2 / 5 * 0.35 + 2 / 5 * 0.05)
    # Of the six pairs .2 beats .1 alone, .5 too, 1 beats both.
    assert auc(predicted, observed) == pytest.approx(4 / 6)
    assert brier_score(predicted, observed) == pytest.approx((0.01 + 0.64 + 0.25 + 0.36 + 0) / 5)


def test_twenty_bins_each_closed_on_the_left() -> None:
    assert NUM_BINS == 20
    for b in range(20):
        assert reliability_bins([b / 20], [1]).counts.argmax() == b
        below = math.nextafter((b + 1) / 20, 0)
        assert reliability_bins([below], [1]).counts.argmax() == b
    assert reliability_bins([1.0], [1]).counts[19] == 1


def test_nothing_to_count_is_nan_not_zero() -> None:
    assert math.isnan(expected_calibration_error([], []))
    assert math.isnan(brier_score([], []))
    for observed in ([], [1, 1], [0, 0]):
        assert math.isnan(auc([0.3] * len(observed), observed))
    assert reliability_bins([], []).counts.tolist() == [0] * 20


def test_perfect_and_constant_predictions() -> None:
    assert expected_calibration_error([0.0, 1.0], [0, 1]) == 0
    assert expected_calibration_error([0.0, 1.0], [1, 0]) == 1
    # The base rate for everyone is calibrated and useless: only the Brier score and the AUC see it.
    assert expected_calibration_error([0.5] * 4, [0, 0, 1, 1]) == 0
    assert brier_score([0.5] * 4, [0, 0, 1, 1]) == 0.25
    assert auc([0.5] * 4, [0, 0, 1, 1]) == 0.5


def test_scores_of_auc_may_be_any_numbers() -> None:
    assert auc([-torch.inf, -3.0, 2.0, torch.inf], [0, 1, 0, 1]) == 0.75
    assert auc(torch.tensor([1, 2, 3]), torch.tensor([False, True, True])) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_any_float_dtype_is_read_exactly(dtype: torch.dtype) -> None:
    predicted = torch.tensor([0.25, 0.75, 0.5], dtype=dtype, requires_grad=True)
    assert expected_calibration_error(predicted, torch.tensor([False, True, True])) == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("function", "args", "message"),
    [
        (reliability_bins, ([0.5], [1, 0]), "`predicted` and `observed` must have the same length, got 1 and 2"),
        (auc, ([0.5], [1, 0]), "`scores` and `observed` must have the same length"),
        (reliability_bins, ([1.5, 0.2, -1.0], [1, 0, 1]), r"in \[0, 1\], got 1.5 \(and 1 more such\)"),
        (brier_score, ([math.nan], [1]), r"`predicted` must be probabilities in \[0, 1\], got nan"),
        (reliability_bins, ([0.5], [0.5]), "`observed` must be events, 0 or 1, got 0.5"),
        (auc, ([0.5], [math.nan]), "`observed` must be events, 0 or 1, got nan"),
        (auc, ([math.nan, 1.0], [0, 1]), "`scores` must be numbers, got 1 NaN of 2"),
        (reliability_bins, ([[0.5]], [1]), r"`predicted` must be one-dimensional \[N\], got shape \(1, 1\)"),
    ],
)
def test_bad_input_is_named(function, args, message) -> None:
    with pytest.raises(ValueError, match=message):
        function(*args)


def test_there_is_at_least_one_bin() -> None:
    with pytest.raises(ValueError, match="`num_bins` must be at least 1, got 0"):
        expected_calibration_error([0.5], [1], num_bins=0)
