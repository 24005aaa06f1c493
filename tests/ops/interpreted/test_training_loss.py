"""The training loss kernel under Triton's interpreter, on the CPU: the contract, and the training forward on it.

Catches what the contract catches, and: a tail that is not masked, a running maximum of the wrong lane.
"""

from __future__ import annotations

import pytest
import torch

from dspark.objective import Objective
from dspark.ops.training_loss import training_loss
from tests import small
from tests.ops.training_loss_contract import DTYPES, TERMS, TrainingLossContract, batch
from tests.test_fused_loss import assert_same, batch_for, run


class TestTriton(TrainingLossContract):
    implementation = "triton"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_the_torch_form_to_rounding(dtype):
    given = batch(4, 2500, dtype, mass=0.9)
    want, got = (training_loss(*given, TERMS["both"], implementation=form) for form in ("torch", "triton"))
    for ours, other in zip(got[:3], want[:3], strict=True):
        torch.testing.assert_close(ours, other, rtol=5e-6, atol=5e-6)
    assert got.gradient.dtype == dtype
    rounding = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    torch.testing.assert_close(got.gradient.float(), want.gradient.float(), rtol=rounding, atol=2e-7)


@pytest.mark.parametrize("storage", ["own", "reduced"])
def test_the_training_forward_by_the_kernel(storage, monkeypatch):
    model = small.drafter(**small.STORAGE[storage])
    model.share_with(small.target())
    forms = []
    for form in ("torch", "triton"):
        monkeypatch.setenv("DSPARK_OPS", form)
        forms.append(run(model, Objective(chunk_size=5), **batch_for(model)))
    assert_same(*forms)
