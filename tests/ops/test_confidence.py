"""The confidence op in torch, and what its door refuses.

Catches: a score that sees its own or a later slot, calibration of another row, an embedding read by draft id, a
product of confidences in half precision.
"""

from __future__ import annotations

import pytest
import torch

from dspark.heads import ConfidenceHead
from dspark.ops.confidence import ConfidenceWeights, confidence_scores, scores_of_logits

from .. import small
from .confidence_contract import ConfidenceContract, head


class TestTorch(ConfidenceContract):
    implementation = "torch"


@pytest.mark.parametrize("heads", [name for name in small.HEADS if not name.endswith("-none")])
def test_scores_are_the_modules(heads):
    model = small.drafter(**small.HEADS[heads])
    hidden, previous_ids = torch.randn(2, 4, small.WIDTH), torch.randint(small.VOCAB, (2, 4))
    embedding = None if model.markov_head is None else model.markov_head.markov_w1
    weights = model.confidence_head.op_weights(hidden, embedding)
    got = confidence_scores(hidden, previous_ids, weights)
    with torch.no_grad():
        want = scores_of_logits(model.confidence_logits(hidden, previous_ids), None)
    for ours, other in zip(got, want, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-5, atol=1e-6)
    assert isinstance(model.confidence_head, ConfidenceHead)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(2, 5)}, r"`hidden` must be .* \[B, g, D\], got torch.float32 \[2, 5\]"),
        ({"hidden": torch.zeros(2, 3, 5).double()}, "got torch.float64"),
        (
            {"previous_ids": torch.zeros(2, 4).long()},
            r"`previous_ids` must be int64 \[2, 3\], got torch.int64 \[2, 4\]",
        ),
        ({"weights": head(5, 0)._replace(weight=torch.zeros(6))}, r"of shape \[5\] \(hidden state\)"),
        ({"weights": head(5, 2)._replace(weight=torch.zeros(5))}, r"of shape \[7\] \(hidden state, then embedding\)"),
        ({"weights": head(5, 2)._replace(bias=torch.zeros(1).half())}, "must have the dtype of"),
        ({"temperatures": torch.ones(2)}, r"`temperatures` must be float32, \[3\] or \[2, 3\] or longer"),
        ({"temperatures": torch.ones(3, 3)}, r"got torch.float32 \[3, 3\]"),
        ({"temperatures": torch.ones(3).double()}, "got torch.float64"),
    ],
)
def test_misfits_are_named(change, message):
    fitting = {"hidden": torch.zeros(2, 3, 5), "previous_ids": torch.zeros(2, 3).long(), "weights": head(5, 2)}
    confidence_scores(**fitting)
    with pytest.raises(ValueError, match=message):
        confidence_scores(**{**fitting, **change})


def test_a_head_that_is_more_than_its_weights_is_left_alone():
    model = small.drafter()
    hidden = torch.zeros(1, 4, small.WIDTH)
    assert isinstance(model.confidence_head.op_weights(hidden, model.markov_head.markov_w1), ConfidenceWeights)
    assert model.confidence_head.op_weights(hidden.half(), model.markov_head.markov_w1) is None
    assert model.confidence_head.op_weights(hidden, None) is None
    model.confidence_head.proj.register_forward_hook(lambda *_: None)
    assert model.confidence_head.op_weights(hidden, model.markov_head.markov_w1) is None
