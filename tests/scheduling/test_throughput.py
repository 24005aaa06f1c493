"""`ThroughputCurve`: what it says between and beyond its points, what it learns, what its file holds and refuses.

Catches: an outlier that stays, a warm-up that counts, a staircase smoothed away, memory that grows with the text, a
corrupt file that is read as a curve, an interrupted save that costs the old file.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from dspark.scheduling import CurveKey, ThroughputCurve
from dspark.scheduling.samples import WINDOW, Line

KEY = CurveKey(model="toy", device="cpu", dtype="float32", attention="sdpa", threads=1)


def curve_of(points: dict[int, float], times: int = 3) -> ThroughputCurve:
    curve = ThroughputCurve(KEY)
    for tokens, seconds in points.items():
        for _ in range(times):
            curve.learn(tokens, seconds)
    return curve


def test_linear_between_points_and_beyond():
    curve = curve_of({2: 1.0, 4: 2.0, 8: 2.0})
    assert [curve.seconds(n) for n in (2, 3, 4, 6, 8)] == [1.0, 1.5, 2.0, 2.0, 2.0]
    assert curve.seconds(12) == 2.0  # the slope from half of the last count on, not that from 2
    assert curve.seconds(1) == 0.5
    steep = curve_of({4: 1.0, 15: 1.5, 16: 2.0, 5: 1.0})
    assert steep.seconds(28) == pytest.approx(2.0 + 12 * (2.0 - 1.0) / 11)
    assert curve_of({8: 1.0, 16: 3.0}).seconds(1) == 0.5  # no less than half the least
    assert curve_of({8: 3.0, 16: 1.0}).seconds(4) == 3.0  # fewer tokens are never said to cost more
    assert curve_of({8: 3.0, 16: 1.0}).seconds(40) == 1.0
    assert curve_of({8: 3.0}).seconds(100) == curve_of({8: 3.0}).seconds(1) * 1.0 == 3.0


def test_one_count_and_many_agree():
    curve = curve_of({1: 1.0, 2: 1.9, 4: 1.6, 8: 1.7})
    counts = list(range(1, 20))
    expected = [curve.seconds(n) for n in counts]
    for many in (counts, torch.tensor(counts)):
        torch.testing.assert_close(curve.seconds(many), torch.tensor(expected, dtype=torch.float64))
        torch.testing.assert_close(curve(many), 1 / torch.tensor(expected, dtype=torch.float64))
    assert curve(3) == 1 / curve.seconds(3)


def test_staircase_is_kept_and_the_envelope_stands_beside():
    curve = curve_of({1: 1.0, 2: 1.9, 4: 1.6, 8: 1.7, 16: 3.0})
    assert curve.points() == [(1, 1.0), (2, 1.9), (4, 1.6), (8, 1.7), (16, 3.0)]
    assert curve.seconds(2) == 1.9
    assert curve.envelope() == [(1, 1.0), (2, 1.6), (4, 1.6), (8, 1.7), (16, 3.0)]
    rng = random.Random(0)
    for _ in range(50):
        points = {n: rng.uniform(0.1, 1) for n in rng.sample(range(1, 100), 8)}
        times = [seconds for _, seconds in curve_of(points).envelope()]
        assert times == sorted(times)


def test_contexts():
    curve = ThroughputCurve()
    for context, seconds in ((100, 1.0), (300, 2.0)):
        for n in (1, 9):
            curve.learn(n, seconds + n, context)
    assert curve.contexts == [100, 300]
    assert curve.seconds(1) == curve.seconds(1, 100) == 2.0
    assert curve.seconds(1, 200) == 2.5
    assert curve.seconds(5, 300) == 7.0
    assert curve.seconds(1, 400) == pytest.approx(3.5)
    torch.testing.assert_close(curve.seconds([1, 5], 200), torch.tensor([2.5, 6.5], dtype=torch.float64))
    curve.learn(1, 2.0)  # without a context: beside the shortest
    assert curve.num_samples(1, 100) == 2


def test_drafting_side():
    curve = curve_of({1: 1.0})
    assert curve.draft_seconds(1, 7) == 0.0
    for rows, slots, seconds in ((1, 0, 0.01), (1, 3, 0.1), (1, 7, 0.2), (4, 7, 0.5)):
        curve.learn_draft(rows, slots, seconds)
    assert curve.draft_seconds(1) == curve.draft_seconds(1, 7) == curve.draft_seconds(1, 9) == 0.2
    assert curve.draft_seconds(1, 5) == pytest.approx(0.15)
    assert curve.draft_seconds(1, 1) == pytest.approx(0.05)
    assert curve.draft_seconds(1, 0) == curve.draft_seconds(4, 0) == 0.01
    assert curve.draft_seconds(2, 7) == pytest.approx(0.3)
    assert curve.step_seconds(1, 1) == pytest.approx(1.2)
    assert curve.step_seconds(1, 1, 0) == pytest.approx(1.01)


def test_learning_converges_with_outliers_and_follows_drift():
    rng = random.Random(4)
    true = {1: 0.05, 2: 0.06, 4: 0.062, 8: 0.08}
    curve = ThroughputCurve()
    for n in true:
        curve.learn(n, 3.0)  # first calls build kernels
    errors = [curve.uncertainty(1)]
    for i in range(40):
        for n, seconds in true.items():
            hiccup = 10 if rng.random() < 0.1 else 1
            curve.learn(n, seconds * (1 + 0.03 * rng.random()) * hiccup)
        if i in (4, 30):
            errors.append(curve.uncertainty(1))
    for n, seconds in true.items():
        assert curve.seconds(n) == pytest.approx(seconds * 1.015, rel=0.02)
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.05
    for _ in range(WINDOW):
        curve.learn(1, 0.2)
    assert curve.seconds(1) == 0.2


def test_a_single_slow_timing_is_not_a_cliff():
    curve = curve_of({1: 1.0, 8: 1.2})
    curve.learn(4, 30.0)
    assert curve.seconds(4) == 1.2
    for _ in range(2):
        curve.learn(4, 30.0)
    assert curve.seconds(4) == 30.0  # three of them are one


def test_uncertainty():
    curve = curve_of({8: 1.0}, times=1)
    once = curve.uncertainty(8)
    assert 0 < once < 1
    assert curve.uncertainty(5) == curve.uncertainty(16) == once
    assert curve.uncertainty(3) == curve.uncertainty(17) == math.inf
    curve.learn(8, 1.0)
    assert curve.uncertainty(8) < once
    assert ThroughputCurve().uncertainty(1) == math.inf


def test_memory_is_bounded():
    curve = ThroughputCurve()
    for n in range(1, 2000):
        curve.learn(n, 1.0)
        curve.learn_draft(n, 1, 1.0)
    for _ in range(100):
        curve.learn(1999, 1.0)
    assert len(curve.token_counts()) <= 512
    assert curve.num_samples(1999) == WINDOW
    assert curve.token_counts()[-1] == 1999


def test_profile_takes_turns_and_leaves_warm_ups_out(monkeypatch):
    clock, calls = [0.0], []
    cost = {(1, 16): 1.0, (4, 16): 1.5, (1, 64): 2.0, (4, 64): 3.0}

    def measure(tokens: int, context: int) -> None:
        is_first = (tokens, context) not in calls
        calls.append((tokens, context))
        clock[0] += cost[tokens, context] * (50 if is_first else 1)

    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    curve = ThroughputCurve.profile(measure, [4, 1, 4], contexts=[64, 16], repeats=3, key=KEY)
    shapes = [(1, 16), (4, 16), (1, 64), (4, 64)]
    assert calls == shapes * 4
    assert {shape: curve.seconds(*shape) for shape in shapes} == cost
    assert curve.num_samples(4, 64) == 3
    assert curve.key == KEY


@pytest.mark.parametrize(
    ("counts", "kwargs"),
    [([], {}), ([0], {}), ([1], {"contexts": [-1]}), ([1], {"repeats": 0}), ([1], {"contexts": []})],
)
def test_bad_profiles_are_refused(counts, kwargs):
    with pytest.raises(ValueError, match="A profile needs"):
        ThroughputCurve.profile(lambda *_: None, counts, **kwargs)


def test_bad_readings_and_timings_are_refused():
    curve = curve_of({1: 1.0})
    for bad in (0, [3, 0]):
        with pytest.raises(ValueError, match="`tokens` must be at least 1"):
            curve.seconds(bad)
    with pytest.raises(ValueError, match="The curve is empty"):
        ThroughputCurve()(1)
    for seconds in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="`seconds` must be positive and finite"):
            curve.learn(1, seconds)
    with pytest.raises(ValueError, match="`rows` must be at least 1"):
        curve.learn_draft(0, 1, 1.0)
    with pytest.raises(ValueError, match="`slots` must be at least 0"):
        curve.learn_draft(1, -1, 1.0)


def example() -> ThroughputCurve:
    curve = curve_of({1: 0.05, 2: 0.1, 8: 0.07})
    curve.learn(4, 0.3, 512)
    curve.learn_draft(1, 7, 0.02)
    curve.learn_draft(2, 0, 0.001)
    return curve


def test_a_saved_curve_is_the_same_curve(tmp_path):
    curve, path = example(), tmp_path / "curve.json"
    curve.save(path)
    again = ThroughputCurve.load(path)
    assert again.to_json() == curve.to_json()
    assert again.key == KEY
    counts = torch.arange(1, 30)
    torch.testing.assert_close(again(counts), curve(counts))
    assert again.seconds(4, 512) == curve.seconds(4, 512)
    assert again.draft_seconds(1) == 0.02
    assert list(tmp_path.iterdir()) == [path]
    copy = curve.copy()
    copy.learn(1, 9.0)
    assert curve.to_json() == again.to_json() != copy.to_json()


def test_an_interrupted_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "curve.json"
    example().save(path)
    before = path.read_bytes()
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        curve_of({1: 1.0}).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def changed(**changes: Any) -> dict[str, Any]:
    return {**example().to_json(), **changes}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "`format` is not"),
        (changed(format="other"), "`format` is not"),
        (changed(version=2), "`version` is 2"),
        (changed(key={"model": "x"}), "`key` must have the fields"),
        (changed(key={**example().to_json()["key"], "threads": "1"}), "`key.threads` must be of type int, got '1'"),
        (changed(key={**example().to_json()["key"], "packed": "yes"}), "`key.packed` must be of type bool, got 'yes'"),
        (changed(target={}), "`target` holds no times"),
        (changed(target={"0": {}}), "`target` holds no times"),
        (changed(target=[1]), "`target` must be an object"),
        (changed(target={"0": [1]}), "`target.0` must be an object"),
        (changed(target={"0": {"0": [1.0]}}), "`target.0` must have whole numbers of at least 1 as names, got '0'"),
        (changed(target={"x": {"1": [1.0]}}), "`target` must have whole numbers of at least 0 as names, got 'x'"),
        (changed(target={"0": {"1": []}}), "`target.0.1` must be a list of positive finite seconds"),
        (changed(target={"0": {"1": [0.1, -1]}}), "`target.0.1` must be a list of positive finite seconds"),
        (changed(target={"0": {"1": [math.nan]}}), "`target.0.1` must be"),
        (changed(target={"0": {"1": [math.inf]}}), "`target.0.1` must be"),
        (changed(target={"0": {"1": [True]}}), "`target.0.1` must be"),
        (changed(draft=None), "`draft` must be an object"),
        (changed(draft={"0": {"1": [1.0]}}), "`draft` must have whole numbers of at least 1"),
    ],
)
def test_corrupt_files_are_refused(tmp_path, data, message):
    path = tmp_path / "curve.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=f"curve.json cannot be used as a throughput curve: .*{message}"):
        ThroughputCurve.load(path)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe{}"])
def test_files_that_are_no_json_are_refused(tmp_path, content):
    path = tmp_path / "curve.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"curve\.json cannot be used"):
        ThroughputCurve.load(path)


def test_keys_say_what_differs():
    other = CurveKey(model="toy", device="cuda", dtype="float32", attention="sdpa", threads=2)
    assert KEY.differences(other) == ["device: cpu in the curve, cuda now", "threads: 1 in the curve, 2 now"]
    assert KEY.differences(KEY) == []
    packed = replace(KEY, packed=True)
    assert packed.differences(replace(KEY, packed=False)) == ["packed: yes in the curve, no now"]
    assert packed.differences(KEY) == KEY.differences(packed) == []  # not known of one


def test_curves_that_do_not_say_whether_the_target_was_packed_still_load(tmp_path):
    path = tmp_path / "curve.json"
    old = example().to_json()
    del old["key"]["packed"]
    path.write_text(json.dumps(old))
    assert ThroughputCurve.load(path).key == KEY
    curve = example()
    curve.key = replace(KEY, packed=True)
    curve.save(path)
    assert ThroughputCurve.load(path).key == replace(KEY, packed=True)


def test_a_missing_file_says_what_makes_one(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no curve file .*none\.json\. `dspark profile .*--out .*none\.json`"):
        ThroughputCurve.load(tmp_path / "none.json")


def test_line_through_one_point():
    line = Line([4], [2.0])
    assert [line.at(1), line.at(4), line.at(9)] == [2.0, 2.0, 2.0]
    assert line.at_many(torch.tensor([1, 4, 9])).tolist() == [2.0, 2.0, 2.0]
