"""What each policy decides from scores, rounds and curve, through the interface that the decoding loop drives.

Catches: a threshold that is not strict, a budget from this round's scores, drafting time left out of the step, a
learnt curve that never sees a plain round, lengths above their limits.
"""

from __future__ import annotations

import pytest
import torch

from dspark.scheduling import (
    POLICIES,
    RoundObservation,
    ThroughputCurve,
    VerifyPolicy,
    make_policy,
    prefix_schedule,
    ranked_prefixes,
)

SURVIVAL = torch.tensor([[0.9, 0.8, 0.6, 0.3], [0.7, 0.2, 0.1, 0.05]])
OWN = torch.tensor([[0.9, 0.89, 0.75, 0.5], [0.7, 0.3, 0.5, 0.5]])


def curve(slope: float, base: float = 1.0, most: int = 64) -> ThroughputCurve:
    made = ThroughputCurve()
    for tokens in range(1, most):
        for _ in range(3):
            made.learn(tokens, base + slope * tokens)
    return made


def observation(policy: VerifyPolicy, *, slots: int = 4, verified=(4, 4), accepted=(2, 1), survival=SURVIVAL):
    tokens = len(verified) + sum(verified)
    rows = survival.tolist() if survival is not None and slots else None
    return RoundObservation(len(verified), slots, tokens, 0.1, 1.0 + 0.01 * tokens, verified, accepted, rows)


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_keeps_to_its_limits(name):
    policy = make_policy(name, assistant_confidence_threshold=0.1, survival_threshold=0.1)
    for step in range(40):
        rows = 2 if step < 20 else 1
        slots = policy.slots(rows, 4)
        assert 0 <= slots <= 4
        limits = [min(slots, limit) for limit in (step % 5, 4)[:rows]]
        lengths = policy.lengths(OWN[:rows, :slots], SURVIVAL[:rows, :slots], limits) if slots else [0] * rows
        assert all(0 <= length <= limit for length, limit in zip(lengths, limits, strict=True))
        assert all(type(length) is int for length in lengths)
        accepted = [min(length, 1) for length in lengths]
        policy.observe(
            observation(policy, slots=slots, verified=lengths, accepted=accepted, survival=SURVIVAL[:rows, :slots])
        )


def test_fixed_and_threshold():
    fixed = make_policy("fixed", assistant_confidence_threshold=0.99)
    assert not fixed.needs_confidence
    assert fixed.slots(2, 7) == 7
    assert fixed.lengths(OWN, SURVIVAL, [4, 3]) == fixed.lengths(None, None, [4, 3]) == [4, 3]
    own = make_policy("threshold", assistant_confidence_threshold=0.75)
    assert own.needs_confidence
    assert own.lengths(OWN, SURVIVAL, [4, 4]) == [3, 0]  # 0.75 itself is not below
    assert own.lengths(OWN, SURVIVAL, [2, 4]) == [2, 0]
    assert own.lengths(None, None, [2, 4]) == [2, 4]
    assert make_policy("threshold", survival_threshold=0.6).lengths(OWN, SURVIVAL, [4, 4]) == [3, 1]
    off = make_policy("threshold")
    assert not off.needs_confidence
    assert off.lengths(OWN, SURVIVAL, [4, 4]) == [4, 4]


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match=r"must be one of 'fixed', .*, got 'greedy'"):
        make_policy("greedy")


def test_scheduled_is_algorithm_1_with_the_drafting_time_in_the_step():
    steep = curve(0.5)
    assert make_policy("scheduled", curve=steep).lengths(OWN, SURVIVAL, [4, 4]) == prefix_schedule(
        SURVIVAL, steep
    ).tolist()  # fmt: skip
    dear = steep.copy()
    dear.learn_draft(2, 4, 5.0)
    with_draft = make_policy("scheduled", curve=dear).lengths(OWN, SURVIVAL, [4, 4])
    assert with_draft == prefix_schedule(SURVIVAL, lambda n: 1 / (5.0 + 1.0 + 0.5 * n)).tolist()
    assert sum(with_draft) > sum(prefix_schedule(SURVIVAL, steep).tolist())  # what is spent makes verifying cheap


@pytest.mark.parametrize("name", ["scheduled", "async", "auto"])
def test_a_given_curve_is_left_alone(name):
    given = curve(0.1)
    before = given.to_json()
    policy = make_policy(name, curve=given)
    policy.observe(observation(policy))
    assert given.to_json() == before


@pytest.mark.parametrize("name", ["scheduled", "async", "auto"])
def test_without_a_curve_the_first_rounds_teach_one(name):
    policy = make_policy(name)
    counts = []
    for _ in range(12):
        slots = policy.slots(2, 4)
        lengths = policy.lengths(OWN[:, :slots], SURVIVAL[:, :slots], [slots, slots]) if slots else [0, 0]
        counts.append(2 + sum(lengths))
        policy.observe(observation(policy, slots=slots, verified=lengths, accepted=[min(n, 1) for n in lengths],
                                   survival=SURVIVAL[:, :slots]))  # fmt: skip
    assert counts[:9] == [10, 2, 6] * 3  # full, plain and half rounds
    curve = policy.curve
    assert [curve.num_samples(n) for n in (2, 6, 10)] >= [3, 3, 3]
    assert curve.seconds(10) == pytest.approx(1.1)


def test_without_scores_past_rounds_stand_in():
    policy = make_policy("scheduled", curve=curve(0.3))
    assert policy.lengths(None, None, [4, 4]) == [4, 4]
    for _ in range(60):
        policy.observe(observation(policy, accepted=(1, 1), survival=None))
    assert policy.lengths(None, None, [4, 4]) == [1, 1]
    for _ in range(400):
        policy.observe(observation(policy, accepted=(0, 0), survival=None))
    assert policy.lengths(None, None, [4, 4]) == [0, 0]


def test_async_takes_the_budget_of_two_rounds_ago_and_this_rounds_ranking():
    flat = curve(0.4)
    policy = make_policy("async", curve=flat)
    rounds = [torch.rand(3, 4, generator=torch.Generator().manual_seed(i)).sqrt().cumprod(1) for i in range(6)]
    limits = [4, 4, 2]
    for step, survival in enumerate(rounds):
        got = policy.lengths(survival, survival, limits)
        if step < 2:
            assert got == prefix_schedule(survival, flat, limits=limits).tolist()
        else:
            budget = int(prefix_schedule(rounds[step - 2], flat, early_stop=False).sum())
            assert got == ranked_prefixes(survival, budget, limits).tolist()


def test_async_budget_shrinks_with_the_rows():
    policy = make_policy("async", curve=curve(0.01))
    high = torch.full((4, 4), 0.9).cumprod(1)
    for _ in range(2):
        assert policy.lengths(high, high, [4] * 4) == [4] * 4
    low = torch.full((1, 4), 0.01).cumprod(1)
    assert policy.lengths(low, low, [4]) == [4]  # a quarter of 16, whatever this round says
    assert policy.lengths(low, low, [3]) == [3]


def test_async_ignores_this_rounds_scores_for_its_budget():
    policy = make_policy("async", curve=curve(0.3))
    past = torch.tensor([[0.9, 0.5, 0.1]])
    for _ in range(2):
        policy.lengths(past, past, [3])
    totals = set()
    for last in (0.8, 0.01):
        now = torch.tensor([[0.85, 0.8, last]])
        totals.add(tuple(ranked := policy.lengths(now, now, [3])))
        policy._past.clear()
        policy._past.extend([past, past])
    assert len(totals) == 1, ranked
