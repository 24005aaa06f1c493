"""The training loss in torch, and what its door refuses. `test_fused_loss.py` holds the training forward to it.

Catches: a gradient that misses a term or the unknown label, mass outside the draft vocabulary that is not counted, a
row that reads its neighbour's, half-precision sums.
"""

from __future__ import annotations

import pytest
import torch

from dspark.ops.training_loss import training_loss

from .training_loss_contract import TERMS, TrainingLossContract, batch


class TestTorch(TrainingLossContract):
    implementation = "torch"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(3)}, r"`logits` must be of a float dtype, \[n, Vd\], got torch.float32 \[3\]"),
        ({"logits": torch.zeros(3, 9).long()}, "got torch.int64"),
        ({"labels": torch.zeros(4).long()}, r"`labels` must be torch.int64 of shape \[3\], got torch.int64 \[4\]"),
        ({"weights": torch.zeros(3).half()}, r"`weights` must be torch.float32 of shape \[3\], got torch.float16"),
        ({"target_probs": torch.zeros(3, 8)}, r"`target_probs` must be torch.float32 of shape \[3, 9\]"),
        ({"target_probs": torch.zeros(3, 9).half()}, "got torch.float16"),
    ],
)
def test_misfits_are_named(change, message):
    fitting = dict(zip(("logits", "labels", "weights", "target_probs"), batch(3, 9), strict=True))
    training_loss(**fitting, terms=TERMS["both"])
    with pytest.raises(ValueError, match=message):
        training_loss(**{**fitting, **change}, terms=TERMS["both"])
