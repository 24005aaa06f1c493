"""Algorithm 1 against golden vectors, brute force over all length vectors, and its own contract.

Catches: a fall that is stepped over, `>=` for `>`, a prefix with a gap, ties broken by row, a budget or limit that is
exceeded, lengths that look at a later score, a schedule too slow to be worth running.
"""

from __future__ import annotations

import json
import random
import statistics
import time

import pytest
import torch

from dspark.scheduling import ThroughputCurve, foresighted_schedule, prefix_schedule, ranked_prefixes
from tests.conftest import golden_root
from tests.reference import scheduler

FILE = json.loads((golden_root() / "algorithms" / "scheduler.json").read_text())


def padded(rows: list[list[float]]) -> tuple[torch.Tensor, list[int]]:
    width = max(map(len, rows))
    return torch.tensor([row + [0.0] * (width - len(row)) for row in rows], dtype=torch.float64), [*map(len, rows)]


class Counts:
    """A speed that takes many counts at once."""

    def __init__(self, speeds: list[float]) -> None:
        self.speeds = torch.tensor(speeds, dtype=torch.float64)

    def at_counts(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.speeds[tokens]


@pytest.mark.parametrize("kind", ["early_stop", "global_max"])
@pytest.mark.parametrize("takes_counts", [False, True])
@pytest.mark.parametrize("case", FILE["cases"], ids=lambda case: case["id"])
def test_golden_cases(case, kind, takes_counts):
    survival, limits = padded(case["survival"])
    speed = case["sps"].__getitem__
    if takes_counts:  # asked for every candidate at once, also behind the fall
        speed = Counts([1.0, *case["sps"][1:], *[1e-9] * survival.numel()])
    lengths = prefix_schedule(survival, speed, early_stop=kind == "early_stop", limits=limits)
    assert lengths.dtype == torch.int64
    assert lengths.tolist() == case[kind]["lengths"]
    assert scheduler.throughput(case["survival"], lengths.tolist(), case["sps"].__getitem__) == pytest.approx(
        case[kind]["theta"], abs=1e-9
    )


@pytest.mark.parametrize("case", FILE["async_topk_cases"], ids=lambda case: case["id"])
def test_golden_budgets(case):
    past, now = (torch.tensor(case[f"{when}_confidences"]).cumprod(1) for when in ("historical", "current"))
    budget = int(prefix_schedule(past, case["sps"].__getitem__, early_stop=False).sum())
    assert budget == case["capacity_K"]
    assert ranked_prefixes(now, budget).tolist() == case["expected_lengths"]


def random_case(rng: random.Random) -> tuple[list[list[float]], list[float]]:
    """Survival on a coarse grid, so ties and zeros are common, and a speed: a smooth fall, a staircase or noise."""
    rows, slots = rng.randint(1, 3), rng.randint(1, 3)
    survival = []
    for _ in range(rows):
        value, row = 1.0, []
        for _ in range(slots):
            value *= rng.choice([0, 0.25, 0.5, 0.75, 0.9, 1])
            row.append(value)
        survival.append(row)
    counts = range(rows * (1 + slots) + 1)
    speeds = rng.choice([
        [1 / (1 + 0.1 * n) for n in counts],
        [1 / (1 + 0.6 * (n // 3)) for n in counts],
        [rng.uniform(0.2, 1) for _ in counts],
    ])  # fmt: skip
    return survival, speeds


def test_brute_force():
    rng = random.Random(1)
    for _ in range(150):
        survival, speeds = random_case(rng)
        speed = speeds.__getitem__
        tensor = torch.tensor(survival, dtype=torch.float64)
        best = prefix_schedule(tensor, speed, early_stop=False).tolist()
        most = max(scheduler.throughput(survival, lengths, speed) for lengths in scheduler.all_lengths(survival))
        assert scheduler.throughput(survival, best, speed) == pytest.approx(most, rel=1e-12)
        stopped = prefix_schedule(tensor, speed).tolist()
        for total in (sum(stopped), sum(best)):
            ranked = ranked_prefixes(tensor, total).tolist()
            accepted = sum(sum(row[:length]) for row, length in zip(survival, ranked, strict=True))
            assert accepted == pytest.approx(scheduler.best_of(survival, total), rel=1e-12)
        assert stopped == ranked_prefixes(tensor, sum(stopped)).tolist()
        if sum(stopped) != scheduler.early_stop_total(survival, speed):
            # Only where two throughputs are equal but for the rounding of the sum.
            thetas = [(len(survival) + scheduler.best_of(survival, n)) * speed(len(survival) + n)
                      for n in (sum(stopped), sum(stopped) + 1)]  # fmt: skip
            assert thetas[0] == pytest.approx(thetas[1], rel=1e-12)


def test_limits_are_a_shorter_block():
    rng = random.Random(2)
    for _ in range(100):
        survival, speeds = random_case(rng)
        limits = [rng.randint(0, len(row) + 1) for row in survival]
        cut = [[a if k < most else 0.0 for k, a in enumerate(row)] for row, most in zip(survival, limits, strict=True)]
        full, short = torch.tensor(survival), torch.tensor(cut)
        speed = speeds.__getitem__
        for early_stop in (True, False):
            got = prefix_schedule(full, speed, early_stop=early_stop, limits=limits)
            assert got.tolist() == prefix_schedule(short, speed, early_stop=early_stop).tolist()
        assert ranked_prefixes(full, 4, limits).tolist() == ranked_prefixes(short, 4).tolist()


def test_ties_go_to_the_lower_slot_then_the_lower_row():
    survival = torch.tensor([[0.5, 0.5, 0.5], [0.5, 0.5, 0.5]])
    order = [ranked_prefixes(survival, n).tolist() for n in range(7)]
    assert order == [[0, 0], [1, 0], [1, 1], [2, 1], [2, 2], [3, 2], [3, 3]]


@pytest.mark.parametrize("schedule", ["early stop", "foresighted", "ranked"])
def test_no_length_depends_on_a_later_score(schedule):
    """Whether a slot is admitted stays the same when any score behind it changes: what makes the text exact."""
    rng = random.Random(3)
    usual = [0.8, 0.5, 0.3]
    rules = {
        "early stop": lambda s, speed: prefix_schedule(s, speed),
        "foresighted": lambda s, speed: foresighted_schedule(s, speed, usual),
        "ranked": lambda s, speed: ranked_prefixes(s, 3),
    }
    changed = 0
    for _ in range(300):
        rows = rng.randint(1, 3)
        scores = torch.tensor([[rng.random() ** 0.3 for _ in range(3)] for _ in range(rows)], dtype=torch.float64)
        jagged = [1 / rng.uniform(0.5, 1.5 + 0.1 * n) for n in range(3 * rows + rows + 1)]
        row, slot = rng.randrange(rows), rng.randrange(2)
        other = scores.clone()
        other[row, slot + 1 :] = torch.tensor([rng.random() for _ in range(2 - slot)])
        lengths = [rules[schedule](s.cumprod(1), jagged.__getitem__).tolist() for s in (scores, other)]
        admitted = [length[row] > slot for length in lengths]
        assert admitted[0] == admitted[1]
        changed += lengths[0] != lengths[1]
    assert changed > 5  # the scores do matter


def test_global_search_does_look_at_later_scores():
    speed = {1: 1.0, 2: 0.5, 3: 0.45}.__getitem__  # Appendix A
    lengths = [prefix_schedule(torch.tensor([[0.8, a]]), speed, early_stop=False).tolist() for a in (0.72, 0.0)]
    assert lengths == [[2], [0]]


def test_foresight_is_algorithm_1_on_smooth_curves_and_steps_over_cliffs():
    smooth = lambda n: 1 / (1 + 0.08 * n)  # noqa: E731
    survival = torch.tensor([[0.9, 0.8, 0.5, 0.2], [0.7, 0.3, 0.2, 0.1]])
    usual = [0.8, 0.55, 0.35, 0.15]
    assert foresighted_schedule(survival, smooth, usual).tolist() == prefix_schedule(survival, smooth).tolist()
    cliff = lambda n: 1 / (1.0 if n == 1 else 1.9 if n == 2 else 1.6)  # noqa: E731
    row = torch.tensor([[0.85, 0.7, 0.6, 0.5]])
    assert prefix_schedule(row, cliff).tolist() == [0]
    assert foresighted_schedule(row, cliff, [0.85, 0.7, 0.6, 0.5]).tolist() == [4]
    assert foresighted_schedule(row / 2, cliff, [0.85, 0.05, 0.02, 0.01]).tolist() == [0]  # little to hope for
    assert foresighted_schedule(row, cliff, usual, limits=[1]).tolist() == [0]


def test_rounding_of_a_product_is_not_a_rise():
    survival = torch.tensor([[0.5, 0.5 + 1e-7, 0.4]])
    assert prefix_schedule(survival, lambda n: 1.0).tolist() == [3]


@pytest.mark.parametrize(
    ("survival", "kwargs", "message"),
    [
        (torch.tensor([[0.5, 0.6]]), {}, "never rise along a row.*row 0"),
        (torch.tensor([[0.9], [float("nan")]]), {}, r"in \[0, 1\], got nan"),
        (torch.tensor([[1.5]]), {}, r"in \[0, 1\], got 1.5"),
        (torch.tensor([[-0.5]]), {}, r"in \[0, 1\], got -0.5"),
        (torch.tensor([0.5]), {}, "shape"),
        (torch.tensor([[1]]), {}, "floating"),
        ([[0.5]], {}, "floating tensor"),
        (torch.tensor([[0.5]]), {"limits": [1, 1]}, "one number of at least 0 per row"),
        (torch.tensor([[0.5]]), {"limits": [-1]}, "one number of at least 0 per row"),
    ],
)
def test_bad_input_is_refused(survival, kwargs, message):
    with pytest.raises(ValueError, match=message):
        prefix_schedule(survival, lambda n: 1.0, **kwargs)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("early_stop", [True, False])
def test_bad_speed_is_refused(value, early_stop):
    with pytest.raises(ValueError, match=r"positive finite number, got .* for 2 tokens"):
        prefix_schedule(torch.tensor([[0.5]]), [0, 1.0, value].__getitem__, early_stop=early_stop)


def test_bad_budget_and_profile_are_refused():
    with pytest.raises(ValueError, match="`capacity` must be at least 0"):
        ranked_prefixes(torch.tensor([[0.5]]), -1)
    for usual in ([0.5], [0.5, 0.0], [0.5, 1.5]):
        with pytest.raises(ValueError, match="`usual`"):
            foresighted_schedule(torch.tensor([[0.5, 0.5]]), lambda n: 1.0, usual)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)])
def test_empty_shapes(shape):
    empty = torch.zeros(shape)
    assert prefix_schedule(empty, lambda n: 1.0).tolist() == [0] * shape[0]
    assert ranked_prefixes(empty, 2).tolist() == [0] * shape[0]
    assert foresighted_schedule(empty, lambda n: 1.0, [0.5] * shape[1]).tolist() == [0] * shape[0]


def test_256_rows_take_little_time():
    curve = ThroughputCurve()
    for tokens in (1, 8, 64, 512, 4096):
        curve.learn(tokens, 0.05 + 1e-4 * tokens)
    survival = torch.rand(256, 16).cumprod(1)
    times = []
    for _ in range(20):
        start = time.perf_counter()
        prefix_schedule(survival, curve)
        times.append(time.perf_counter() - start)
    assert statistics.median(times) < 5e-3  # about 1 ms where nothing else runs
