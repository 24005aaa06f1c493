"""What every implementation of the training loss is held to: autograd on the formula written out, in float64."""

from __future__ import annotations

import pytest
import torch

from dspark.ops.training_loss import TermWeights, training_loss

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TERMS = {"both": TermWeights(0.3, 0.7), "ce": TermWeights(1.0, 0.0), "l1": TermWeights(0.0, 1.0)}


def batch(rows: int, columns: int, dtype: torch.dtype = torch.float32, *, mass: float = 1.0):
    """Logits, labels (one of them unknown), weights and a target law that sums to `mass`."""
    logits = (torch.randn(rows, columns) * 2).to(dtype)
    labels = torch.randint(columns, (rows,))
    labels[rows // 2] = -1
    target = (logits.float() + torch.randn(rows, columns)).softmax(-1) * mass
    return logits, labels, torch.rand(rows), target


def by_formula(logits, labels, weights, target, terms):
    """Sums of both terms, acceptance and gradient of `ce * CE + l1 * L1`, by autograd in float64."""
    x = logits.double().requires_grad_()
    with torch.enable_grad():
        log_probs = x.log_softmax(-1)
        each = -log_probs.gather(1, labels.clamp(min=0)[:, None])[:, 0] * (labels >= 0)
        ce = (each * weights).sum()
        l1, acceptance = x.new_zeros(()), None
        if target is not None:
            distance = (log_probs.exp() - target).abs().sum(-1) + (1 - target.double().sum(-1)).clamp(min=0)
            l1, acceptance = (distance * weights).sum(), (1 - distance / 2).detach()
        (gradient,) = torch.autograd.grad(terms.ce * ce + terms.l1 * l1, x)
    return ce.detach(), l1.detach(), acceptance, gradient


class TrainingLossContract:
    implementation = "torch"
    device = "cpu"

    def loss(self, *args, **kwargs):
        args = [a.to(self.device) if isinstance(a, torch.Tensor) else a for a in args]
        found = training_loss(*args, implementation=self.implementation, **kwargs)
        return type(found)(*(None if t is None else t.cpu() for t in found))

    @pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize(("rows", "columns", "mass"), [(1, 63, 1.0), (5, 2500, 0.8), (3, 4097, 1.0)])
    def test_terms_and_gradient_are_the_formula(self, rows, columns, mass, dtype, terms):
        given = batch(rows, columns, dtype, mass=mass)
        got, want = self.loss(*given, terms), by_formula(*given, terms)
        close = {"rtol": 2e-5, "atol": 2e-5}  # float32 sums of thousands
        torch.testing.assert_close(got.ce, (want[0] if terms.ce else want[0] * 0).float(), **close)
        torch.testing.assert_close(got.l1, (want[1] if terms.l1 else want[1] * 0).float(), **close)
        torch.testing.assert_close(got.acceptance, want[2].float(), **close)
        rounding = 1e-5 if dtype == torch.float32 else 8e-3  # relative; Triton's interpreter cuts bfloat16 off at 2^-7
        torch.testing.assert_close(got.gradient.float(), want[3].float(), rtol=rounding, atol=2e-7)

    def test_without_a_target_law_there_is_the_cross_entropy(self):
        logits, labels, weights, _ = batch(4, 300)
        got = self.loss(logits, labels, weights, None, TermWeights(0.5, 0.9))
        want = by_formula(logits, labels, weights, None, TermWeights(0.5, 0.0))
        torch.testing.assert_close(got.ce, want[0].float(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got.gradient, want[3].float(), rtol=1e-5, atol=1e-7)
        assert got.acceptance is None
        assert float(got.l1) == 0

    @pytest.mark.parametrize("target", [True, False])
    def test_the_gradient_is_left_out_where_nobody_wants_it(self, target):
        logits, labels, weights, law = batch(4, 300)
        given = (logits, labels, weights, law if target else None, TERMS["both"])
        whole, terms = self.loss(*given), self.loss(*given, with_gradient=False)
        assert terms.gradient is None
        assert torch.equal(terms.ce, whole.ce)
        assert torch.equal(terms.l1, whole.l1)

    def test_saturated_rows(self):
        """A sure and right drafter, a sure and wrong one, columns of probability 0, a row of one value."""
        logits = torch.tensor([[200.0, 0, 0, 0], [200, 0, 0, 0], [1, -torch.inf, 1, -torch.inf], [3, 3, 3, 3]])
        target = torch.tensor([[1.0, 0, 0, 0], [0, 1, 0, 0], [0.5, 0, 0.5, 0], [0.25] * 4])
        labels, weights = torch.tensor([0, 1, 2, 3]), torch.ones(4)
        got = self.loss(logits, labels, weights, target, TERMS["both"])
        assert got.acceptance.tolist() == pytest.approx([1, 0, 1, 1], abs=1e-6)
        assert float(got.ce) == pytest.approx(200 + torch.tensor(8.0).log().item(), rel=1e-6)
        assert got.gradient.isfinite().all()
        assert got.gradient[0].tolist() == [0, 0, 0, 0]

    def test_rows_do_not_depend_on_each_other_nor_on_nan_beside_them(self):
        logits, labels, weights, law = batch(5, 300)
        logits[1, 7] = torch.nan
        logits[3] = -torch.inf
        got = self.loss(logits, labels, weights, law, TERMS["both"])
        assert got.gradient[[1, 3]].isnan().all(dim=-1).all()
        for row in (0, 2, 4):
            part = slice(row, row + 1)
            alone = self.loss(logits[part], labels[part], weights[part], law[part], TERMS["both"])
            torch.testing.assert_close(got.gradient[part], alone.gradient)
            torch.testing.assert_close(got.acceptance[part], alone.acceptance)

    def test_strides_do_not_matter_and_no_rows_are_a_batch(self):
        logits, labels, weights, law = batch(4, 300)
        want = self.loss(logits, labels, weights, law, TERMS["both"])
        loose = (logits.T.contiguous().T, labels.repeat_interleave(2)[::2], weights.repeat_interleave(2)[::2],
                 law.repeat(1, 2)[:, :300])  # fmt: skip
        got = self.loss(*loose, TERMS["both"])
        for ours, other in zip(got, want, strict=True):
            torch.testing.assert_close(ours, other, rtol=1e-5, atol=1e-7)
        none = self.loss(logits[:0], labels[:0], weights[:0], law[:0], TERMS["both"])
        assert (float(none.ce), float(none.l1), none.gradient.shape) == (0, 0, (0, 300))
