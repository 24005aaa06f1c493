"""A batch that nobody joins is done when its slowest row is: `auto` drafts for what that row gains.

Catches: drafts for the gain of the mean row, a pace carried over to another text.
"""

from __future__ import annotations

import random
from time import perf_counter

import pytest
import torch

from dspark.scheduling import RoundObservation, VerifyPolicy, make_policy
from dspark.scheduling.slowest_row import SlowestRow

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
    rows = SlowestRow()
    rows.begin({3: 100, 5: 100})
    assert rows.ratios() == [1.0, 1.0]  # nothing is known: alike
    alike = float(rows.speeds([1.0])[0])
    for left in range(99, 60, -1):
        rows.begin({3: left, 5: left})
        rows.observe([2.0, 0.1], 1.0)
    fast, slow = rows.ratios()
    assert fast > 1.5 > 0.5 > slow
    assert 1 < float(rows.speeds([1.0])[0]) < alike  # the slow row decides
    rows.begin({3: 60, 5: 10})  # it has nearly all of its text: the other decides
    assert float(rows.speeds([1.0])[0]) > alike
    rows.begin({3: 60, 5: 500})  # row 5 is another text
    assert rows.ratios() == [fast, 1.0]
    rows.begin({3: 59})
    rows.begin({3: 58, 5: 499})  # and came back: forgotten
    assert rows.ratios() == [fast, 1.0]


def test_one_row_of_many_is_out_of_luck() -> None:
    """Rows alike take longer together than one of them, and no longer than without drafts."""
    speeds = []
    for count in (1, 2, 8, 64):
        rows = SlowestRow()
        rows.begin(dict.fromkeys(range(count), 60))
        speeds.append(float(rows.speeds([1.0])[0]))
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
