"""Figures per draft position: what is compared with what, and what a temperature can and cannot change.

Catches: a slot's own confidence in the place of survival, the AUC of a slot that moves with its temperature, rounds of
unverified slots that count, a figure that is not JSON.
"""

from __future__ import annotations

import json
import math

import pytest
import torch

from dspark.calibration import expected_calibration_error, position_reliability, survival

from .synthetic import rounds, slow_auc, slow_ece


def test_survival_is_the_product_of_scaled_confidences() -> None:
    logits = torch.tensor([[math.log(4), math.log(9), 0.0]])
    assert survival(logits)[0].tolist() == pytest.approx([0.8, 0.72, 0.36])
    # sigmoid(2 log 4) = 16/17, sigmoid(log 9 / 2) = 3/4
    assert survival(logits, [0.5, 2.0, 1.0])[0].tolist() == pytest.approx([16 / 17, 12 / 17, 6 / 17])
    assert survival(logits[0].bfloat16(), torch.tensor([1.0, 1.0, 1.0])).dtype == torch.bfloat16


@pytest.mark.parametrize("temperatures", [None, [0.4, 1.5, 3.0]])
def test_survival_is_compared_with_the_accepted_prefix(temperatures: list[float] | None) -> None:
    logits, accepted = rounds(300, [1.0, 2.0, 1.0], seed=2)
    verified = torch.randint(0, 4, (300,), generator=torch.Generator().manual_seed(1))
    accepted = torch.minimum(accepted, verified)
    figures = position_reliability(logits, accepted, verified_lengths=verified, temperatures=temperatures)
    scale = temperatures or [1.0] * 3
    for k, got in enumerate(figures):
        predicted, observed, own, own_observed = [], [], [], []
        for n in range(300):
            if verified[n] <= k:
                continue
            product = 1.0
            for i in range(k + 1):
                product /= 1 + math.exp(-float(logits[n, i]) / scale[i])
            predicted.append(product)
            observed.append(int(accepted[n] > k))
            if accepted[n] >= k:
                own.append(float(logits[n, k]))
                own_observed.append(int(accepted[n] > k))
        assert (got.position, got.num_rounds) == (k, len(predicted))
        assert got.predicted == pytest.approx(sum(predicted) / len(predicted))
        assert got.observed == pytest.approx(sum(observed) / len(observed))
        assert got.ece == pytest.approx(slow_ece(predicted, observed))
        assert got.auc == pytest.approx(slow_auc(predicted, observed))
        assert got.own_auc == pytest.approx(slow_auc(own, own_observed))


def test_no_temperature_changes_how_a_slot_ranks_rounds() -> None:
    logits, accepted = rounds(2000, seed=6)
    raw = position_reliability(logits, accepted)
    for temperatures in ([0.5] * 5, [10.0] * 5, [0.3, 5.0, 1.0, 2.0, 0.7]):
        scaled = position_reliability(logits, accepted, temperatures=temperatures)
        assert [f.own_auc for f in scaled] == [f.own_auc for f in raw]
        assert scaled[0].auc == pytest.approx(raw[0].auc, abs=1e-3)  # of the first slot survival is its own confidence
        assert scaled[3].ece != raw[3].ece


def test_bins_add_up_to_the_figures() -> None:
    logits, accepted = rounds(1000, seed=8)
    for k, figures in enumerate(position_reliability(logits, accepted, num_bins=10)):
        assert len(figures.bins.counts) == 10
        assert int(figures.bins.counts.sum()) == figures.num_rounds == 1000
        assert figures.bins.ece == figures.ece
        assert figures.ece == expected_calibration_error(survival(logits)[:, k], accepted > k, num_bins=10)


def test_without_rounds_there_are_no_figures() -> None:
    (first, second) = position_reliability(torch.zeros(3, 2), [0, 1, 1], verified_lengths=[1, 1, 1])
    assert first.num_rounds == 3
    assert second.num_rounds == 0
    record = json.loads(json.dumps([first.to_dict(), second.to_dict()], allow_nan=False))
    assert record[1] == {
        "position": 1, "num_rounds": 0, "predicted": None, "observed": None, "ece": None, "auc": None,
        "own_auc": None, "brier": None, "bins": [],
    }  # fmt: skip
    assert record[0]["bins"] == [
        {"from": 0.5, "to": 0.55, "count": 3, "predicted": 0.5, "observed": pytest.approx(2 / 3)}
    ]
    assert position_reliability(torch.zeros(0, 2), torch.zeros(0).long())[0].num_rounds == 0
