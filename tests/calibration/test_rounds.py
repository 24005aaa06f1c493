"""Rounds of real decoding as data: every draft verified, ends cut, the same rounds for the same seed.

Catches: a threshold of the drafter's own settings that hides slots, draws that depend on the prompts before, rounds
whose logits and lengths belong to different rounds, a prompt that is fitted and judged at once.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dspark import DSparkDrafter, SpeculationConfig, SpeculationStats
from dspark.calibration import fit_positions
from dspark.evaluation.calibrate import calibrate_rounds, check_enough_prompts, held_out_places
from dspark.evaluation.rounds import collect_rounds, stack_rounds
from tests.decoding.pair import BLOCK, distinct, oracle, plain, prompt, target
from tests.scripted import CYCLE, drafter_config

from .synthetic import rounds

PROMPTS = [prompt(seed=seed) for seed in range(3)]


def untrained(**overrides: Any) -> DSparkDrafter:
    torch.manual_seed(3)
    return DSparkDrafter(drafter_config(target(), **overrides)).eval()


def test_every_draft_is_verified_whatever_the_drafter_s_settings() -> None:
    drafter = untrained()
    drafter.speculation = SpeculationConfig(assistant_confidence_threshold=1.0, survival_threshold=1.0)
    seen: list[tuple[int, SpeculationStats]] = []
    stats = collect_rounds(
        target(), drafter, PROMPTS, max_new_tokens=20, on_progress=lambda place, part: seen.append((place, part))
    )
    assert [place for place, _ in seen] == [0, 1, 2]
    assert [part for _, part in seen] == stats
    for ids, part in zip(PROMPTS, stats, strict=True):
        assert part.num_new_tokens == plain(target(), ids, max_new_tokens=20).shape[1] - ids.shape[1]
        assert part.verified[0] == BLOCK
        assert len(part.confidence_logits) == sum(d > 0 for d in part.drafted)


def test_accepted_lengths_are_the_oracle_s() -> None:
    ids, _ = distinct()
    drafter = oracle(CYCLE)
    (stats,) = collect_rounds(target(), drafter, [ids], max_new_tokens=40)
    logits, accepted, verified = stack_rounds([stats], BLOCK)
    expected = [BLOCK if slot is None else slot for slot in CYCLE]
    assert accepted.tolist()[:-1] == (expected * 3)[: len(accepted) - 1]
    assert verified.tolist()[:-1] == [BLOCK] * (len(accepted) - 1)
    assert logits.shape == (len(accepted), BLOCK)
    assert torch.equal(logits, torch.tensor(stats.confidence_logits).double())


def test_slots_behind_an_end_of_the_text_are_not_verified() -> None:
    ids, text = distinct()
    model = target()
    drafter = oracle((None,))
    # The tenth new token ends the text: the second round accepts it as its second draft.
    call = {"eos_token_id": text[6 + 9], "pad_token_id": 0}
    output = model.generate(
        ids, assistant_model=drafter, max_new_tokens=40, do_sample=False, return_dict_in_generate=True,
        speculation=SpeculationConfig(policy="fixed", record_confidence=True), **call,
    )  # fmt: skip
    _, accepted, verified = stack_rounds([output.speculation], BLOCK)
    assert accepted.tolist() == verified.tolist() == [7, 1]


def test_a_prompt_s_draws_do_not_depend_on_the_others() -> None:
    drafter = untrained()
    how = {"temperature": 0.8, "max_new_tokens": 16}
    both = collect_rounds(target(), drafter, PROMPTS[:2], **how, seed=1)
    torch.manual_seed(99)
    again = collect_rounds(target(), drafter, PROMPTS[:2], **how, seed=1)
    assert [s.accepted for s in again] == [s.accepted for s in both]
    assert [s.confidence_logits for s in again] == [s.confidence_logits for s in both]
    other = collect_rounds(target(), drafter, [PROMPTS[2], PROMPTS[1]], **how, seed=1)
    assert other[1].confidence_logits == both[1].confidence_logits
    assert collect_rounds(target(), drafter, PROMPTS[:1], **how, seed=2)[0].confidence_logits != (
        both[0].confidence_logits
    )


def test_a_drafter_without_a_confidence_head_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no confidence head.*dspark train --confidence"):
        collect_rounds(target(), untrained(enable_confidence_head=False), PROMPTS)


def stats_of(logits: torch.Tensor, accepted: torch.Tensor) -> SpeculationStats:
    width = logits.shape[1]
    stats = SpeculationStats(confidence_logits=logits.tolist())
    for a in accepted.tolist():
        stats.add_round(width, width, a)
    return stats


def test_stacking_keeps_rounds_together_and_leaves_out_those_without_a_draft() -> None:
    logits, accepted = rounds(30, [1.0, 1.0])
    stats = stats_of(logits, accepted)
    stats.add_round(0, 0, 0)
    stacked = stack_rounds([stats, SpeculationStats(), stats], 2)
    assert torch.equal(stacked.logits, torch.cat([logits, logits]))
    assert torch.equal(stacked.accepted, torch.cat([accepted, accepted]))
    assert stack_rounds([], 5).logits.shape == (0, 5)
    with pytest.raises(ValueError, match="3 confidence logits each, got one of 2"):
        stack_rounds([stats], 3)


# --- fit on some prompts, judge on others ----------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[10], [3, 3, 3, 3], [1, 1, 20, 5], [2, 0, 2]])
@pytest.mark.parametrize("share", [0.25, 0.3, 0.5])
def test_the_share_holds_over_all_sets_and_within_each(sizes: list[int], share: float) -> None:
    places = held_out_places(sizes, share, seed=0)
    assert len(places) == sum(sizes)
    assert abs(sum(places) - share * sum(sizes)) < 1
    start = 0
    for size in sizes:
        assert abs(sum(places[start : start + size]) - share * size) < 1
        start += size
    assert held_out_places(sizes, share, seed=0) == places


def test_the_seed_chooses() -> None:
    chosen = {tuple(held_out_places([12], 0.5, seed)) for seed in range(20)}
    assert len(chosen) > 10


@pytest.mark.parametrize(("sizes", "share"), [([1], 0.5), ([2], 0.3), ([], 0.3)])
def test_a_side_without_prompts_is_refused(sizes: list[int], share: float) -> None:
    with pytest.raises(ValueError, match="leave no prompt on one side"):
        held_out_places(sizes, share, 0)


@pytest.mark.parametrize("share", [0.0, 1.0, -1, float("nan")])
def test_the_share_lies_between_none_and_all(share: float) -> None:
    with pytest.raises(ValueError, match="must lie between 0 and 1"):
        held_out_places([4], share, 0)


def test_temperatures_come_from_one_part_and_figures_from_the_other() -> None:
    scale = [2.0, 0.5]
    fitted = [stats_of(*rounds(800, scale, seed=seed)) for seed in (0, 1)]
    judged = stats_of(*rounds(800, [1.0, 1.0], seed=2))  # as if other prompts needed no calibration
    result = calibrate_rounds(
        [fitted[0], judged, fitted[1]], [False, True, False], temperature=0.0, num_draft_tokens=2
    )
    assert result.temperatures == pytest.approx(scale, rel=0.25)
    alone = fit_positions(*stack_rounds(fitted, 2)[:2])
    assert result.temperatures == [round(fit.temperature, 4) for fit in alone]
    assert (result.num_fit_rounds, result.num_held_out_rounds) == (1600, 800)
    assert result.mean_acceptance_length == judged.mean_acceptance_length
    assert result.before[0].ece < 0.05 < result.after[0].ece
    assert result.mean_ece(result.before) == pytest.approx((result.before[0].ece + result.before[1].ece) / 2)
    assert result.key == "0"


def test_too_few_rounds_are_refused_before_and_after_work() -> None:
    check_enough_prompts([False, True], 51)
    with pytest.raises(ValueError, match="49 rounds at most from 2 prompts of 50 new tokens are too few"):
        check_enough_prompts([False, True], 50)
    parts = [stats_of(*rounds(count, [1.0])) for count in (49, 200)]
    with pytest.raises(ValueError, match=r"49 rounds at temperature 0\.7 are too few"):
        calibrate_rounds(parts, [False, True], temperature=0.7, num_draft_tokens=1)
