"""Sequential temperature scaling recovers known temperatures, and refuses to invent some.

Catches: a fit on single confidences instead of the product, earlier temperatures that move, slots behind an end or a
cut that count, a base rate for everyone that wins by its ECE, temperatures made of a handful of rounds or of a
position that was always rejected, values of unverified slots that leak in.
"""

from __future__ import annotations

import math

import pytest
import torch

from dspark.calibration import (
    brier_score,
    expected_calibration_error,
    fit_positions,
    fit_sequential_temperatures,
    position_reliability,
    survival,
)

from .synthetic import TRUE, rounds

COUNT = 12_000


@pytest.mark.parametrize(("mean", "seed"), [(1.0, 0), (1.0, 1), (2.0, 2), (0.5, 3)])
def test_known_temperatures_are_recovered(mean: float, seed: int) -> None:
    logits, accepted = rounds(COUNT, mean=mean, seed=seed)
    found = fit_sequential_temperatures(logits, accepted)
    assert found.dtype == torch.float64
    for ours, true in zip(found.tolist(), TRUE, strict=True):
        assert abs(math.log(ours / true)) < 0.25  # .1 is one deviation for the flattest of the deep slots
    fresh, events = rounds(2 * COUNT, mean=mean, seed=seed + 100)
    before = position_reliability(fresh, events)
    after = position_reliability(fresh, events, temperatures=found)
    assert max(figures.ece for figures in after) < 0.02
    assert before[0].ece > 0.05
    assert sum(f.ece for f in after) < sum(f.ece for f in before) / 2


def test_what_is_calibrated_stays() -> None:
    logits, accepted = rounds(COUNT, [1.0] * 4)
    assert fit_sequential_temperatures(logits, accepted).tolist() == pytest.approx([1.0] * 4, rel=0.1)


def test_scaled_logits_give_scaled_temperatures() -> None:
    logits, accepted = rounds(4000, [1.0, 2.0])
    factor = torch.tensor([0.5, 1.7])
    assert fit_sequential_temperatures(logits * factor, accepted).tolist() == pytest.approx(
        (fit_sequential_temperatures(logits, accepted) * factor).tolist(), rel=0.01
    )


def test_the_order_of_rounds_does_not_matter() -> None:
    logits, accepted = rounds(3000, seed=4)
    order = torch.randperm(3000, generator=torch.Generator().manual_seed(0))
    again = fit_sequential_temperatures(logits[order], accepted[order])
    assert again.tolist() == pytest.approx(fit_sequential_temperatures(logits, accepted).tolist(), rel=1e-9)


def test_earlier_temperatures_are_frozen() -> None:
    logits, accepted = rounds(4000, seed=5)
    whole = fit_sequential_temperatures(logits, accepted).tolist()
    for width in range(1, len(TRUE)):
        part = fit_sequential_temperatures(logits[:, :width], accepted.clamp(max=width)).tolist()
        assert part == whole[:width]


def test_the_product_is_calibrated_not_the_slot_alone() -> None:
    # The first slot is too sure in a way no temperature mends: it says more than one half and is accepted less often.
    logits, second = rounds(COUNT, [1.0], seed=11)
    first = torch.rand(COUNT, generator=torch.Generator().manual_seed(9)) < 0.44
    logits, accepted = torch.cat([torch.ones(COUNT, 1), logits], dim=1), torch.where(first, 1 + second, 0)
    with pytest.warns(UserWarning, match="position 0: the best temperature lies at the end"):
        sequential = fit_sequential_temperatures(logits, accepted).tolist()
    # The second slot on its own, over the rounds that reached it, is honest; in the product it has to make up.
    alone = fit_sequential_temperatures(logits[first, 1:], accepted[first] - 1)
    assert float(alone) == pytest.approx(1.0, rel=0.1)
    in_product = survival(logits, sequential)[:, 1]
    with_own = survival(logits, [sequential[0], float(alone)])[:, 1]
    events = accepted > 1
    assert expected_calibration_error(in_product, events) < expected_calibration_error(with_own, events)
    assert sequential[1] > 1.5


# --- the base rate for everyone --------------------------------------------------------------------------------------


def even_rounds(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An honest pair of slots: the first says .85 to all, the second hardly tells rounds apart around one half.

    All of `.85 sigmoid(logit / 10)` lie in the bin from .4 to .45, and events are drawn so that .425 of them happen.
    """
    generator = torch.Generator().manual_seed(seed)
    second = (0.45 * torch.randn(count, generator=generator, dtype=torch.float64)).clamp(-1, 1)
    logits = torch.stack([torch.full_like(second, math.log(0.85 / 0.15)), second], dim=1)
    uniforms = torch.rand(count, generator=generator, dtype=torch.float64)
    # The same number of uniforms below each level: the first slot's share is exact, the second's nearly.
    accepted = torch.where(uniforms < 0.85, torch.where(uniforms < 0.85 * second.sigmoid(), 2, 1), 0)
    return logits, accepted


@pytest.mark.parametrize("seed", range(1, 5))
def test_a_constant_prediction_does_not_win(seed: int) -> None:
    logits, accepted = even_rounds(6000, seed)
    events = accepted > 1
    grid = torch.logspace(-1, 1, 81, dtype=torch.float64).tolist()
    by_ece_alone = min(grid, key=lambda t: expected_calibration_error(survival(logits, [1.0, t])[:, 1], events))
    assert by_ece_alone > 5
    assert fit_sequential_temperatures(logits, accepted).tolist() == pytest.approx([1.0, 1.0], rel=0.25)


def test_calibration_never_costs_brier_score() -> None:
    for seed, (bias, mean) in enumerate([(0.0, 0.0), (1.0, 1.0), (1.0, 0.0), (-1.5, -0.5), (2.0, 2.0)]):
        logits, accepted = rounds(2000, [1.0, 1.5, 0.7], mean=mean, bias=bias, seed=seed)
        found = fit_positions(logits, accepted)
        for k, fit in enumerate(found):
            earlier = [f.temperature for f in found[:k]]
            events = accepted > k
            ours = survival(logits[:, : k + 1], [*earlier, fit.temperature])[:, -1]
            plain = survival(logits[:, : k + 1], [*earlier, 1.0])[:, -1]
            assert fit.note or brier_score(ours, events) <= brier_score(plain, events)


@pytest.mark.parametrize(("mean", "bias"), [(-1.0, -2.0), (2.0, 2.0), (1.0, 0.7)])
def test_where_no_temperature_is_right_the_ece_decides(mean: float, bias: float) -> None:
    # A head that is wrong by a constant: the least Brier score is at another temperature.
    logits, accepted = rounds(5000, [1.0], mean=mean, bias=bias, seed=7)
    events = accepted > 0
    (fit,) = fit_positions(logits, accepted)

    def ece(temperature: float) -> float:
        return expected_calibration_error((logits[:, 0] / temperature).sigmoid(), events)

    def brier(temperature: float) -> float:
        return brier_score((logits[:, 0] / temperature).sigmoid(), events)

    grid = torch.logspace(-1, 1, 81, dtype=torch.float64).tolist()
    least = min(ece(t) for t in grid if brier(t) <= brier(1.0))
    assert least > 0.03  # far above what noise explains, about .02
    assert ece(fit.temperature) <= least + 1e-3
    assert abs(bias) < 1 or ece(min(grid, key=brier)) > least + 0.01


# --- slots that were not verified ---------------------------------------------------------------------------------


def cut_rounds(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rounds of which a third end behind an accepted or rejected draft at a random slot: nothing after it is known."""
    logits, accepted = rounds(count, [2.0, 2.0, 2.0, 2.0], seed=seed, mean=1.5)
    generator = torch.Generator().manual_seed(seed + 1)
    end = torch.randint(1, 4, (count,), generator=generator)
    verified = torch.where(torch.rand(count, generator=generator) < 0.33, end, 4)
    return logits, torch.minimum(accepted, verified), verified


def test_slots_behind_an_end_are_left_out() -> None:
    logits, accepted, verified = cut_rounds(COUNT)
    found = fit_sequential_temperatures(logits, accepted, verified_lengths=verified)
    assert found.tolist() == pytest.approx([2.0] * 4, rel=0.1)
    # The control takes the accepted prefix of a cut round for a rejection behind it.
    control = fit_sequential_temperatures(logits, accepted)
    assert float((control / 2.0).log().abs().max()) > 0.4
    figures = position_reliability(logits, accepted, verified_lengths=verified, temperatures=found)
    assert [f.num_rounds for f in figures] == [int((verified > k).sum()) for k in range(4)]
    assert max(f.ece for f in figures) < 0.02


def test_scores_of_unverified_slots_are_never_looked_at() -> None:
    logits, accepted, verified = cut_rounds(2000)
    noise = torch.where(torch.arange(4) < verified[:, None], logits, 1e6 * torch.randn(2000, 4))
    for function in (fit_positions, position_reliability):
        one, other = (function(rows, accepted, verified_lengths=verified) for rows in (logits, noise))
        assert str(one) == str(other)


def test_rounds_without_a_verified_slot_change_nothing() -> None:
    logits, accepted = rounds(1500, seed=3)
    verified = torch.full((1500,), len(TRUE))
    more = [torch.cat([values, zeros]) for values, zeros in (
        (logits, torch.full((300, len(TRUE)), 7.0)), (accepted, torch.zeros(300, dtype=torch.long)),
        (verified, torch.zeros(300, dtype=torch.long)),
    )]  # fmt: skip
    ours = fit_sequential_temperatures(more[0], more[1], verified_lengths=more[2])
    assert torch.equal(ours, fit_sequential_temperatures(logits, accepted, verified_lengths=verified))


# --- too little to fit -----------------------------------------------------------------------------------------------


def test_few_rounds_keep_the_temperature_before_and_say_so() -> None:
    logits, accepted = rounds(400, [2.0, 2.0, 2.0, 2.0, 2.0, 2.0], mean=0.0, seed=1)
    fits = fit_positions(logits, accepted)
    reached = [fit.num_reached for fit in fits]
    assert reached == [int((accepted >= k).sum()) for k in range(6)]
    assert [fit.num_rounds for fit in fits] == [400] * 6
    few = next(k for k, count in enumerate(reached) if count < 50)
    assert 2 <= few < 5
    for k in range(few, 6):
        assert fits[k].temperature == fits[few - 1].temperature
        assert fits[k].note == f"{reached[k]} rounds reached it, fewer than 50: kept the temperature before it"
    assert all(fit.note is None for fit in fits[:few])
    with pytest.warns(UserWarning, match=f"position {few}: {reached[few]} rounds reached it, fewer than 50"):
        found = fit_sequential_temperatures(logits, accepted)
    assert found.tolist() == [fit.temperature for fit in fits]
    assert fit_positions(logits, accepted, min_rounds=1)[few].note is None


@pytest.mark.parametrize("count", [0, 1, 49])
def test_next_to_nothing_gives_ones(count: int) -> None:
    logits, accepted = rounds(count)
    with pytest.warns(UserWarning, match=f"position 0: {count} rounds reached it, fewer than 50: kept 1"):
        assert fit_sequential_temperatures(logits, accepted).tolist() == [1.0] * len(TRUE)


def test_positions_of_one_outcome_are_not_fitted() -> None:
    logits, _ = rounds(500, [1.0, 1.0, 1.0])
    for length, outcome in ((0, "rejected"), (3, "accepted")):
        fits = fit_positions(logits, torch.full((500,), length))
        assert fits[0].note == f"all 500 rounds that reached it {outcome} it: kept 1"
        assert [fit.temperature for fit in fits] == [1.0] * 3
    # A first slot that is always accepted does not keep the second from being fitted.
    more, accepted = rounds(4000, [2.0, 0.6])
    more = torch.cat([torch.full((4000, 1), 9.0), more], dim=1)
    fits = fit_positions(more, accepted + 1)
    assert fits[0].temperature == 1.0
    assert [fit.temperature for fit in fits[1:]] == pytest.approx([2.0, 0.6], rel=0.15)


def test_the_end_of_the_grid_is_said() -> None:
    logits, accepted = rounds(2000, [40.0])
    (fit,) = fit_positions(logits, accepted)
    assert fit.temperature == pytest.approx(10.0, rel=0.06)
    assert "end of the grid, 0.1 to 10.0" in fit.note


def test_constant_and_tied_logits() -> None:
    # One logit for all: the temperature can only set the base rate, here sigmoid(2 / T) = .7.
    accepted = torch.tensor([1] * 700 + [0] * 300)
    (fit,) = fit_positions(torch.full((1000, 1), 2.0), accepted)
    assert fit.temperature == pytest.approx(2 / math.log(0.7 / 0.3), rel=0.01)
    # Logits of zero do not know a temperature: nothing is gained, and nothing moves far for it.
    (fit,) = fit_positions(torch.zeros(1000, 1), accepted)
    assert survival(torch.zeros(1), [fit.temperature]).item() == 0.5


def test_lists_and_other_dtypes_are_taken() -> None:
    logits, accepted = rounds(300, [2.0, 1.0])
    expected = fit_sequential_temperatures(logits.float(), accepted, min_rounds=10)
    again = fit_sequential_temperatures(logits.float().tolist(), accepted.int().tolist(), min_rounds=10)
    assert again.tolist() == pytest.approx(expected.tolist(), rel=1e-6)
    tracked = logits.float().requires_grad_()
    assert torch.equal(fit_sequential_temperatures(tracked, accepted, min_rounds=10), expected)
    assert not expected.requires_grad


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"confidence_logits": torch.zeros(4)}, r"`confidence_logits` must be \[N, g\].*got shape \(4,\)"),
        ({"confidence_logits": torch.zeros(4, 0)}, r"`confidence_logits` must be \[N, g\].*\(4, 0\)"),
        ({"confidence_logits": torch.tensor([[0.0, math.nan]] * 4)}, r"got nan at round 0, position 1 \(4 of 8"),
        ({"confidence_logits": torch.tensor([[0.0, 1.0]] * 3 + [[math.inf, 0.0]])}, "got inf at round 3, position 0"),
        ({"accepted_lengths": torch.zeros(3).long()}, r"`accepted_lengths` must be \[N\] with N = 4 .*, got 3 values"),
        ({"accepted_lengths": torch.tensor([0, 3, 0, 0])}, "`accepted_lengths` must lie .*got 3 at round 1"),
        ({"accepted_lengths": torch.tensor([0, 0, -1, 0])}, "`accepted_lengths` must lie .*got -1 at round 2"),
        ({"accepted_lengths": torch.zeros(4)}, "`accepted_lengths` must be integers, got torch.float32"),
        ({"accepted_lengths": torch.zeros(4, 1).long()}, r"`accepted_lengths` must be one-dimensional \[N\]"),
        ({"verified_lengths": torch.tensor([2, 2, 2])}, "`verified_lengths` must be .*got 3 values"),
        ({"verified_lengths": torch.tensor([2, 2, 2, 3])}, "`verified_lengths` must lie between 0 and g = 2, got 3"),
        ({"verified_lengths": torch.tensor([0, 2, 2, 2]), "accepted_lengths": torch.tensor([1, 0, 0, 0])},
         "`accepted_lengths` must lie between 0 and the round's verified length, got 1 at round 0"),
        ({"min_rounds": 0}, "`min_rounds` must be at least 1, got 0"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(changes: dict, message: str) -> None:
    arguments = {"confidence_logits": torch.zeros(4, 2), "accepted_lengths": torch.zeros(4).long(), **changes}
    with pytest.raises(ValueError, match=message):
        fit_sequential_temperatures(arguments.pop("confidence_logits"), arguments.pop("accepted_lengths"), **arguments)
