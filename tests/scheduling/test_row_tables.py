"""Step times by rows: told apart where enough is known, in between where it is not, those of any rows else.

Catches: rows mixed up where the same tokens cost another time, a line through two timings, times of a long context
taken for those of a short one, a file that forgets them, tables that grow for ever.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from dspark.scheduling import RoundObservation, ThroughputCurve, make_policy
from dspark.scheduling.exploration import learn_round
from dspark.scheduling.row_tables import _MOST_COUNTS, RowTables


def seconds(rows: int, tokens: int) -> float:
    """Linear layers see tokens, attention sees rows."""
    return 0.01 + 0.001 * tokens + 0.002 * rows


def learnt(rows: tuple[int, ...] = (1, 4, 8), context: int | None = None) -> ThroughputCurve:
    curve = ThroughputCurve()
    for _ in range(3):
        for count in rows:
            for width in (1, 2, 4, 8):
                curve.learn(count * width, seconds(count, count * width), context, rows=count)
    return curve


@pytest.mark.parametrize("rows", [1, 4, 8])
def test_rows_that_were_timed_have_their_own_times(rows):
    curve = learnt()
    for width in (1, 3, 8):
        assert curve.seconds(rows * width, rows=rows) == pytest.approx(seconds(rows, rows * width))
    assert curve.step_seconds(rows, 8, 0) == pytest.approx(seconds(rows, 8))
    found = curve.seconds_of(np.array([rows, 3 * rows]), rows=rows)
    assert found.tolist() == pytest.approx([seconds(rows, rows), seconds(rows, 3 * rows)])


@pytest.mark.parametrize("rows", [2, 3, 6, 7])
def test_rows_in_between_are_in_between(rows):
    curve = learnt()
    for width in (1, 2, 5, 8):
        assert curve.seconds(rows * width, rows=rows) == pytest.approx(seconds(rows, rows * width))


def test_rows_beyond_those_known_have_the_times_of_any():
    curve = learnt()
    assert curve.seconds(90, rows=30) == curve.seconds(90)
    assert learnt(rows=(8,)).seconds(7, rows=7) == learnt(rows=(8,)).seconds(7)


def test_few_timings_are_no_line():
    curve = learnt(rows=(1, 8))
    curve.learn(4, 9.0, rows=4)
    curve.learn(8, 9.0, rows=4)
    assert curve.seconds(16, rows=4) == pytest.approx(seconds(4, 16))  # between 1 and 8 rows
    tables = RowTables()
    for _ in range(9):
        tables.learn(4, 8, 1.0)
        tables.learn(4, 16, 1.0)
    assert tables.line(4) is None  # two counts
    tables.learn(4, 4, 1.0)
    assert tables.line(4) is not None


def test_a_timing_counts_at_once():
    curve = learnt(rows=(4,))
    before = curve.seconds(4, rows=4)
    for _ in range(15):
        curve.learn(4, 2 * before, rows=4)
    assert curve.seconds(4, rows=4) > before


def test_longer_contexts_are_not_mixed_in():
    curve = learnt(context=128)
    for _ in range(15):
        curve.learn(4, 9.0, 1024, rows=4)
    assert curve.seconds(4, rows=4) == pytest.approx(seconds(4, 4))

    curve.learn(4, 0.5, 64, rows=4)  # the shortest is another one now
    assert curve.seconds(4, rows=4) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="rows"):
        curve.learn(4, 0.5, 1024, rows=0)


def test_the_file_keeps_them(tmp_path):
    curve = learnt()
    curve.save(tmp_path / "curve.json")
    loaded = ThroughputCurve.load(tmp_path / "curve.json")
    assert loaded.to_json() == curve.to_json()
    assert loaded.seconds(12, rows=6) == curve.seconds(12, rows=6)
    document = json.loads((tmp_path / "curve.json").read_text())
    document["rows"]["0"] = {"1": [0.1]}
    with pytest.raises(ValueError, match="rows"):
        ThroughputCurve.from_json(document)
    del document["rows"]  # a curve without: a made one
    assert ThroughputCurve.from_json(document).seconds(8, rows=8) == curve.seconds(8)


def test_rounds_teach_them_and_schedules_ask_for_them():
    curve = ThroughputCurve()
    for _ in range(3):
        for verified in (0, 1, 3):
            tokens = 4 * (1 + verified)
            learn_round(curve, RoundObservation(4, 7, tokens, 0.1, seconds(4, tokens), [verified] * 4, [0] * 4, None))
    assert curve.seconds(10, rows=4) == pytest.approx(seconds(4, 10))
    policy = make_policy("scheduled", curve=learnt())
    for rows in (1, 8):
        speed = policy._speed(torch.zeros(rows, 3))
        assert speed.at_counts(torch.tensor([8])).tolist() == pytest.approx([1 / seconds(rows, 8)])


def test_tables_are_bounded():
    tables = RowTables()
    for tokens in range(1, 300):
        tables.learn(8, tokens, 1.0)
    assert len(tables.tables[8]) == _MOST_COUNTS
    assert max(tables.tables[8]) == 299
