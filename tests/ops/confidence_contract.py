"""What every implementation of the confidence op is held to. Subclasses say which implementation runs where."""

from __future__ import annotations

import math

import pytest
import torch

from dspark.ops.confidence import ConfidenceWeights, confidence_scores
from tests.reference.markov import dot, sigmoid

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def head(width: int, rank: int, dtype: torch.dtype = torch.float32, *, bias: bool = True) -> ConfidenceWeights:
    weight = torch.randn(width + rank) / width**0.5
    w1 = torch.randn(40, rank).to(dtype) if rank else None
    return ConfidenceWeights(weight.to(dtype), torch.randn(1).to(dtype) if bias else None, w1)


def scalar(hidden, previous_ids, weights, temperatures):
    """Logits, own confidence and survival, one slot at a time."""
    rows = []
    for b in range(hidden.shape[0]):
        alive, row = 1.0, []
        for k in range(hidden.shape[1]):
            seen = hidden[b, k].tolist()
            if weights.w1 is not None:
                seen += weights.w1[previous_ids[b, k]].tolist()
            logit = dot(seen, weights.weight.tolist()) + (0.0 if weights.bias is None else float(weights.bias))
            scale = (
                torch.ones(9) if temperatures is None else temperatures[b] if temperatures.dim() == 2 else temperatures
            )
            alive *= sigmoid(logit / float(scale[k]))
            row.append([logit, sigmoid(logit), alive])
        rows.append(row)
    return torch.tensor(rows).unbind(-1)


class ConfidenceContract:
    implementation = "torch"
    device = "cpu"

    def move(self, value):
        return value.to(self.device) if isinstance(value, torch.Tensor) else value

    def scores(self, hidden, previous_ids, weights, temperatures=None):
        found = confidence_scores(
            self.move(hidden), self.move(previous_ids), ConfidenceWeights(*map(self.move, weights)),
            temperatures=self.move(temperatures), implementation=self.implementation,
        )  # fmt: skip
        return [t.cpu() for t in found]

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize(("width", "rank", "bias"), [(33, 5, True), (1500, 0, False), (64, 1030, True)])
    def test_scores_are_the_formula(self, width, rank, bias, dtype):
        weights = head(width, rank, dtype, bias=bias)
        hidden, previous_ids = torch.randn(3, 4, width).to(dtype), torch.randint(40, (3, 4))
        for temperatures in (None, torch.rand(4) + 0.5, torch.rand(3, 6) + 0.5):
            got = self.scores(hidden, previous_ids, weights, temperatures)
            for name, ours, want in zip(("logits", "own", "survival"), got, scalar(
                hidden, previous_ids, weights, temperatures
            ), strict=True):  # fmt: skip
                assert ours.dtype == torch.float32
                torch.testing.assert_close(ours, want, rtol=1e-5, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")

    def test_survival_never_increases_and_no_slot_sees_a_later_one(self):
        weights, hidden, previous_ids = head(20, 6), torch.randn(2, 5, 20), torch.randint(40, (2, 5))
        whole = self.scores(hidden, previous_ids, weights)
        assert (whole[2].diff(dim=1) <= 0).all()
        hidden[:, 3:], previous_ids[:, 3:] = 9.0, 0
        for before, after in zip(whole, self.scores(hidden, previous_ids, weights), strict=True):
            assert torch.equal(before[:, :3], after[:, :3])
            assert not torch.equal(before[:, 3:], after[:, 3:])

    def test_a_slot_without_a_score_is_not_trusted(self):
        weights = ConfidenceWeights(torch.ones(4))
        hidden = torch.ones(4, 3, 4)
        hidden[0, 1, 2], hidden[1, 1, 2], hidden[2, 1, 2] = math.nan, math.inf, -math.inf
        logits, own, survival = self.scores(hidden, torch.zeros(4, 3, dtype=torch.long), weights)
        finite = torch.finfo(torch.float32)
        assert logits[:3, 1].tolist() == [-math.inf, finite.max, finite.min]
        assert own[:3, 1].tolist() == [0.0, 1.0, 0.0]
        assert (survival[[0, 2], 1:] == 0).all()
        assert (survival[[1, 3], 1:] > 0).all()

    def test_strides_do_not_matter(self):
        weights, hidden, previous_ids = head(20, 6), torch.randn(3, 4, 20), torch.randint(40, (3, 4))
        temperatures = torch.rand(4) + 0.5
        want = self.scores(hidden, previous_ids, weights, temperatures)
        loose = weights._replace(w1=weights.w1.T.contiguous().T, weight=weights.weight.repeat_interleave(2)[::2])
        spread = torch.stack([temperatures, temperatures], dim=1)[:, 0]
        for wide in (hidden.transpose(0, 1).contiguous().transpose(0, 1), hidden.repeat(1, 1, 2)[..., :20]):
            got = self.scores(wide, previous_ids.T.contiguous().T, loose, spread)
            for ours, other in zip(got, want, strict=True):
                torch.testing.assert_close(ours, other, rtol=1e-6, atol=1e-6)
