"""A batch that nobody joins is done when its slowest row is: `auto` drafts for rows it waits for.

Catches: drafts verified for rows that end early anyway, a pace carried over to another text, a row's pace taken from
the scores of the round it decides.
"""

from __future__ import annotations

import random
from time import perf_counter

import pytest
import torch

from dspark.scheduling import RoundObservation, VerifyPolicy, make_policy
from dspark.scheduling.stragglers import Stragglers

LENGTH = 150
BLOCK = 4


def affine(tokens: int) -> float:
    return 0.1 + 0.004 * tokens


def draft(rows: int, slots: int) -> float:
    return 0.001 if slots == 0 else 0.01 + 0.001 * rows


def finish(policy: VerifyPolicy, chances: list[float], seed: int, *, is_told: bool = True) -> float:
    """Seconds until the last of these rows has its text, each row accepting every draft with its own chance."""
    dice, time = random.Random(seed), 0.0
    left = dict.fromkeys(range(len(chances)), LENGTH)
    while left:
        names = list(left)
        limits = [max(min(BLOCK, left[name] - 1), 0) for name in names]
        slots = policy.slots(len(names), max(limits), left if is_told else None) if max(limits) else 0
        own = torch.tensor([[chances[name]] * slots for name in names], dtype=torch.float64)
        survival = own.cumprod(1) if slots else None
        lengths = policy.lengths(own, survival, [min(limit, slots) for limit in limits]) if slots else [0] * len(names)
        accepted = []
        for name, length in zip(names, lengths, strict=True):
            count = 0
            while count < length and dice.random() < chances[name]:
                count += 1
            accepted.append(count)
        tokens = len(names) + sum(lengths)
        before, after = draft(len(names), slots), affine(tokens)
        time += before + after
        policy.observe(
            RoundObservation(len(names), slots, tokens, before, after, lengths, accepted,
                             None if survival is None else survival.tolist())
        )  # fmt: skip
        for name, count in zip(names, accepted, strict=True):
            left[name] -= 1 + count
            if left[name] <= 0:
                del left[name]
    return time


def plain(rows: int) -> float:
    return LENGTH * (affine(rows) + draft(rows, 0))


@pytest.mark.parametrize("chances", [[0.9] * 7 + [0.02], [0.8] * 4 + [0.02] * 4, [0.02] * 8])
def test_a_hopeless_row_is_not_made_to_wait(chances: list[float]) -> None:
    policy = make_policy("auto")
    finish(policy, chances, 0)  # learns the curve and what blocks are like
    assert sum(finish(policy, chances, seed) for seed in range(1, 4)) / 3 <= plain(8) / 0.97


def test_rows_alike_are_all_drafted_for() -> None:
    policy = make_policy("auto")
    finish(policy, [0.8] * 4, 0)
    assert sum(finish(policy, [0.8] * 4, seed) for seed in range(1, 4)) / 3 < 0.75 * plain(4)


def test_knowing_who_is_awaited_pays_where_rows_differ() -> None:
    chances = [0.85, 0.85, 0.85, 0.85, 0.85, 0.85, 0.5, 0.5]
    seconds = {}
    for is_told in (True, False):
        policy = make_policy("auto")
        finish(policy, chances, 0, is_told=is_told)
        seconds[is_told] = sum(finish(policy, chances, seed, is_told=is_told) for seed in range(1, 6)) / 5
    assert seconds[True] < seconds[False]


def test_many_rows_are_not_drafted_for_the_gain_of_the_mean_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts pay for a row on average, not for the slowest of sixteen, which is when the batch ends."""
    monkeypatch.setitem(globals(), "affine", lambda tokens: 0.1 + 0.008 * tokens)
    policy, chances = make_policy("auto"), [0.6] * 16
    finish(policy, chances, 0)
    assert sum(finish(policy, chances, seed) for seed in range(1, 6)) / 5 <= plain(16) / 0.97


def test_deciding_for_many_rows_costs_little() -> None:
    policy, left = make_policy("auto"), dict.fromkeys(range(256), 500)
    finish(policy, [0.8] * 8, 0)
    for _ in range(12):  # whatever it explores first
        policy.slots(256, 16, left)
        policy.observe(RoundObservation(256, 0, 256, draft(256, 0), affine(256), [0] * 256, [0] * 256, None))
    seconds = []
    for _ in range(20):
        start = perf_counter()
        policy.slots(256, 16, left)
        seconds.append(perf_counter() - start)
    assert sorted(seconds)[10] < 2e-3  # it was 6.5 ms by rows and widths in Python, and is 0.5


def test_paces() -> None:
    rows = Stragglers()
    rows.begin({3: 100, 5: 100})
    assert rows.shares([1.0])[1][0] == pytest.approx([1.0, 1.0])  # nothing is known: alike
    for left in range(99, 80, -1):
        rows.begin({3: left, 5: left})
        rows.observe([2.0, 0.1], 1.0)
    assert rows.ratio(0) > 1.5 > 0.5 > rows.ratio(1)
    (speed,), ((fast, slow),) = rows.shares([1.0])
    assert slow == pytest.approx(1.0)
    assert 0 < fast < 0.5
    assert 1 < speed < 1 + rows.ratio(1)
    rows.begin({3: 60, 5: 10})  # the slow row has nearly all of its text: it is through without drafts
    assert rows.shares([1.0])[1][0] == pytest.approx([1.0, 0.0])
    rows.begin({5: 9})
    assert rows.shares([1.0])[1][0] == pytest.approx([1.0])
    rows.begin({3: 60, 5: 8})
    turns = [rows.due([0.25, 1.0]) for _ in range(8)]
    assert [0 in turn for turn in turns].count(True) == 2
    assert all(1 in turn for turn in turns)
    rows.begin({3: 60, 5: 500})  # row 5 is another text, row 3 came back
    assert rows.ratio(0) == rows.ratio(1) == 1.0


def test_one_row_of_many_is_out_of_luck() -> None:
    """Rows alike take longer together than one of them, and no longer than without drafts."""
    speeds = []
    for count in (1, 2, 8, 64):
        rows = Stragglers()
        rows.begin(dict.fromkeys(range(count), 60))
        speeds.append(float(rows.shares([1.0])[0][0]))
    assert speeds[0] == pytest.approx(2.0)
    assert speeds == sorted(speeds, reverse=True)
    assert speeds[-1] >= 1.0
    dice, rounds = random.Random(0), []
    for _ in range(300):  # a draft of a fair coin that is tossed until it fails: one kept on average, of variance two
        left, count = [60] * 8, 0
        while max(left) > 0:
            count += 1
            for row in range(8):
                left[row] -= 1
                while dice.random() < 0.5:
                    left[row] -= 1
        rounds.append(count)
    assert sum(rounds) / len(rounds) == pytest.approx(60 / speeds[2], rel=0.1)


def test_who_is_awaited_is_known_before_the_scores() -> None:
    """Whatever this round's scores say, the rows that get drafts are those the past chose."""
    policy = make_policy("auto")
    chances = [0.8] * 8
    finish(policy, chances, 0)
    usual = torch.tensor([[chance] * BLOCK for chance in chances], dtype=torch.float64).cumprod(1)
    found = 0
    for left in range(90, 30, -1):
        slots = policy.slots(8, BLOCK, {row: left if row > 5 else left // 4 for row in range(8)})
        if not slots:  # a try of a plain round
            policy.observe(RoundObservation(8, 0, 8, draft(8, 0), affine(8), [0] * 8, [0] * 8, None))
            continue
        scores = usual[:, :slots]
        lengths = policy.lengths(scores, scores, [slots] * 8)
        other = policy.lengths(scores.flip(0), scores.flip(0), [slots] * 8)
        if lengths[:6] == [0] * 6:
            found += 1
            assert other[:6] == [0] * 6
        tokens = 8 + sum(lengths)
        policy.observe(
            RoundObservation(8, slots, tokens, draft(8, slots), affine(tokens), lengths, lengths, scores.tolist())
        )
    assert found > 10
