"""`auto` in worlds with known costs: near the best fixed width, near plain decoding when nothing is accepted.

Catches: exploration that never ends, a curve poisoned by first calls, a drafter kept on or off by one lucky or unlucky
round, a cliff that traps the schedule, a world that changed unnoticed, overconfidence that is believed.
"""

from __future__ import annotations

import math

import pytest

from dspark.scheduling import ThroughputCurve, make_policy

from .world import World, block_draft, cliffs, flat, serial_draft, steep, two_is_worst

LEARN, JUDGE = 20, 400  # rounds
SCORES = {
    "exact": lambda c: c,
    "no head": None,
    "overconfident": lambda c: 1 - 0.3 * (1 - c),
    "underconfident": lambda c: 0.75 * c,
}
FALLING = [0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55]


def share_of_best(world: World, rounds: int = JUDGE) -> float:
    policy = make_policy("auto")
    world.run(policy, LEARN)
    return world.run(policy, rounds) / world.best_rate()


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize(
    ("target", "draft", "accepts", "rows"),
    [
        (flat, block_draft, [0.9] * 7, 1),
        (flat, serial_draft, FALLING, 1),
        (flat, block_draft, FALLING, 8),
        (two_is_worst, block_draft, FALLING, 1),
        (cliffs, serial_draft, [0.7] * 7, 1),
        (steep, serial_draft, [0.3] * 7, 1),
    ],
)
def test_near_the_best_fixed_width(target, draft, accepts, rows, scores):
    rounds = JUDGE if rows == 1 else JUDGE // 4
    shares = [
        share_of_best(World(target, draft, accepts, SCORES[scores], rows, seed=seed), rounds) for seed in range(2)
    ]
    assert sum(shares) / len(shares) >= 0.97, shares


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("scores", [None, lambda c: 0.9], ids=["no head", "liar"])
@pytest.mark.parametrize(("target", "draft"), [(flat, block_draft), (steep, block_draft), (flat, serial_draft)])
def test_hostile_drafter_costs_little(target, draft, scores, rows):
    world = World(target, draft, [0.01] * 7, scores, rows, seed=3)
    policy = make_policy("auto")
    world.run(policy, LEARN)
    assert world.run(policy, JUDGE) >= 0.97 * world.rate(0)


@pytest.mark.parametrize("rows", [4, 8, 16])
def test_a_try_is_charged_for_all_it_verifies(rows):
    """Where whole blocks cost twice a plain round and drafts do not pay, tries of them must be rare."""

    def two_cores(tokens: int) -> float:
        return 0.040 + 0.0014 * tokens

    def two_core_draft(_: int, slots: int) -> float:
        return 0.008 + 0.0013 * slots if slots else 0.0

    shares = []
    for seed in range(3):
        world, policy = World(two_cores, two_core_draft, [0.28] * 7, rows=rows, seed=seed), make_policy("auto")
        world.run(policy, LEARN)
        shares.append(world.run(policy, JUDGE) / world.rate(0))
    assert sum(shares) / len(shares) >= 0.99, shares


def test_a_world_that_changes_is_noticed():
    world = World(flat, block_draft, [0.01] * 7, lambda c: c, seed=5)
    policy = make_policy("auto")
    world.run(policy, 200)
    world.accepts = [0.9] * 7
    world.run(policy, 150)
    assert world.run(policy, 100) >= 0.95 * world.best_rate()
    world.accepts = [0.01] * 7
    world.run(policy, 60)
    assert world.run(policy, 100) >= 0.95 * world.rate(0)


def test_scores_beat_every_fixed_width_where_blocks_differ():
    """Half the rounds are easy and half hopeless; the scores know which."""
    policy = make_policy("auto")
    easy, hard = [0.95] * 7, [0.1] * 7
    world = World(steep, lambda rows, slots: 0.01 * slots, easy, lambda c: c, seed=2)
    best = max(
        sum(World(steep, world.draft_seconds, accepts).rate(w) * _seconds(world, w) for accepts in (easy, hard))
        / (2 * _seconds(world, w))
        for w in range(8)
    )
    for step in range(500):
        world.accepts = easy if step % 2 else hard
        world.round(policy)
        if step == 100:
            tokens, seconds = world.tokens, world.seconds
    assert (world.tokens - tokens) / (world.seconds - seconds) > best


def _seconds(world: World, width: int) -> float:
    return world.draft_seconds(1, width) + world.target_seconds(1 + width)


def test_a_given_curve_saves_the_exploring_and_is_not_changed():
    given = ThroughputCurve()
    for tokens in range(1, 9):
        for _ in range(3):
            given.learn(tokens, flat(tokens))
            given.learn_draft(1, tokens - 1, block_draft(1, tokens - 1))
    before = given.to_json()
    world = World(flat, block_draft, [0.9] * 7, lambda c: c)
    policy = make_policy("auto", curve=given)
    assert world.run(policy, 30) > 0.9 * world.best_rate()
    assert {slots for slots, _ in world.rounds} == {7}
    assert given.to_json() == before


def test_nothing_to_draft():
    policy = make_policy("auto")
    assert policy.slots(1, 0) == 0
    assert policy.slots(0, 7) == 0


def test_tries_of_other_widths_are_rare():
    world = World(flat, block_draft, [0.01] * 7, None, seed=1)
    policy = make_policy("auto")
    world.run(policy, 500)
    drafted = sum(slots > 0 for slots, _ in world.rounds[LEARN:])
    assert 1 <= drafted <= 0.08 * 480
    assert math.isfinite(policy.curve.uncertainty(1))
