"""The confidence head fitted to rounds: it finds the law that made them, and says truly how good it is on new prompts.

Catches: a fit that only scales, one judged on what it has seen, a penalty that never lets go or never holds, a bias
where the head has none, prompts split between fit and judgement.
"""

from __future__ import annotations

import pytest
import torch

from dspark.calibration import LinearHead, fit_confidence_head

WIDTH = 12


def events(
    count: int, seed: int, groups: int = 40, bias: float = -0.8
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, LinearHead]:
    """Inputs with unequal scales and an offset, events of a known head, their groups, and that head."""
    generator = torch.Generator().manual_seed(seed)
    scale, offset = torch.linspace(0.1, 3, WIDTH), torch.linspace(-1, 3, WIDTH)
    inputs = (torch.randn(count, WIDTH, generator=generator) + offset / 4) * scale
    truth = LinearHead(torch.linspace(-1, 1.4, WIDTH) / scale * 0.6, bias)
    accepted = torch.rand(count, generator=generator) < truth.logits(inputs).sigmoid()
    return (
        inputs,
        accepted,
        2 * (torch.arange(count) % groups) + 1,
        truth,
    )  # names with gaps: prompts that are held out


def test_the_law_behind_the_events_is_found_where_the_trained_head_reads_too_high() -> None:
    inputs, accepted, groups, truth = events(20_000, 0)
    start = LinearHead(truth.weight * 0.3, truth.bias + 2.5)
    fit = fit_confidence_head(inputs, accepted, groups, start)
    fresh, happened, _, _ = events(20_000, 1)
    gap = (fit.head.logits(fresh).sigmoid() - truth.logits(fresh).sigmoid()).abs()
    assert float(gap.mean()) < 0.015
    assert float(gap.max()) < 0.08
    assert float((start.logits(fresh).sigmoid() - truth.logits(fresh).sigmoid()).abs().mean()) > 0.15
    # What was promised for unseen prompts is what unseen prompts give.
    loss = torch.nn.functional.binary_cross_entropy_with_logits(fit.head.logits(fresh), happened.float())
    assert fit.loss_after == pytest.approx(float(loss), abs=0.01)
    assert fit.loss_before > fit.loss_after + 0.1
    assert fit.to_dict()["num_events"] == 20_000


def test_with_little_to_go_on_a_right_head_is_held_on_to() -> None:
    inputs, accepted, groups, truth = events(500, 2)
    noise = torch.randn(500, 300, generator=torch.Generator().manual_seed(3))
    wide = LinearHead(torch.cat([truth.weight, torch.zeros(300)]), truth.bias)
    fit = fit_confidence_head(torch.cat([inputs, noise], 1), accepted, groups, wide)
    assert fit.penalty is None or fit.penalty >= 1
    # Without a penalty 312 weights learn 500 events by heart.
    fresh, _, _, _ = events(5000, 4)
    padded = torch.cat([fresh, torch.randn(5000, 300)], 1)
    gap = (fit.head.logits(padded).sigmoid() - truth.logits(fresh).sigmoid()).abs().mean()
    assert float(gap) < 0.1


def test_folds_leave_whole_prompts_out() -> None:
    inputs, accepted, groups, truth = events(4000, 5)
    truth = LinearHead(truth.weight * 0.3, truth.bias + 2)
    fit = fit_confidence_head(inputs, accepted, groups, truth)
    assert len(fit.folds) == 4
    for fold, head in enumerate(fit.folds):
        # Events of the fold's own prompts have no say in its head.
        changed = torch.where(fit.fold_of[groups] == fold, ~accepted, accepted)
        other = fit_confidence_head(inputs, changed, groups, truth)
        if other.penalty == fit.penalty:
            torch.testing.assert_close(other.folds[fold].weight, head.weight)
        assert not torch.allclose(other.head.weight, fit.head.weight)


def test_a_head_that_no_fit_beats_is_kept() -> None:
    """Each prompt has a level of its own, which its first input tells and no other prompt shares."""
    inputs, _, groups, truth = events(2000, 8, groups=4)
    accepted = groups % 4 == 3
    fit = fit_confidence_head(inputs, accepted, groups, LinearHead(torch.zeros(WIDTH), 0.0))
    assert fit.penalty is None
    assert fit.loss_after == fit.loss_before
    assert torch.equal(fit.head.weight, torch.zeros(WIDTH))
    assert fit.without(0) == fit.without(10_000) == fit.head
    assert truth.bias != 0


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("value", [100.3, 1e6])
def test_an_input_that_never_changes_moves_nothing_far(with_bias: bool, value: float) -> None:
    inputs, accepted, groups, truth = events(3000, 9)
    padded = torch.cat([inputs, torch.full((3000, 1), value)], 1)
    start = LinearHead(torch.cat([truth.weight * 0.5, torch.zeros(1)]), truth.bias)
    fit = fit_confidence_head(padded, accepted, groups, start, with_bias=with_bias)
    assert abs(float(fit.head.weight[-1])) * value < 5
    assert abs(fit.head.bias) < 5
    gap = (fit.head.logits(padded).sigmoid() - truth.logits(inputs).sigmoid()).abs().mean()
    assert float(gap) < 0.05


def test_a_head_without_a_bias_gets_none() -> None:
    inputs, accepted, groups, truth = events(2000, 6, bias=0.0)
    fit = fit_confidence_head(inputs, accepted, groups, LinearHead(truth.weight * 0.5, 0.0), with_bias=False)
    assert fit.head.bias == 0.0
    assert all(head.bias == 0.0 for head in fit.folds)
    assert fit.loss_after < fit.loss_before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, y, g: (x[:, :-1], y, g), r"must be \[n, 12\]"),
        (lambda x, y, g: (x, y[:-1], g), "events and groups"),
        (lambda x, y, g: (x * torch.tensor(float("nan")), y, g), "must be finite"),
        (lambda x, y, g: (x[:100], y[:100], g[:100]), "got 100 of 40"),
        (lambda x, y, g: (x, y, g % 4), "of 4 prompts"),
        (lambda x, y, g: (x, y | True, g), "1000 accepted"),
    ],
)
def test_what_cannot_be_fitted_is_refused(change, message: str) -> None:
    inputs, accepted, groups, truth = events(1000, 7)
    with pytest.raises(ValueError, match=message):
        fit_confidence_head(*change(inputs, accepted, groups), truth)
