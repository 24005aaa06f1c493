"""`dspark profile` on a tiny pair: the file it writes is a curve of these shapes, and nothing of the pair is changed.

Catches: a cache that grows from timing to timing, settings of the drafter left behind, a table that divides by zero, a
run that fails only after it has measured.
"""

from __future__ import annotations

import json
import re

import pytest
import torch
from typer.testing import CliRunner

from dspark import SpeculationConfig
from dspark.cli import app, common
from dspark.decoding.curve import curve_key
from dspark.evaluation import profile as module
from dspark.evaluation.profile import default_slots, profile_pair
from dspark.scheduling import RoundObservation, ThroughputCurve
from tests.cli.test_commands import pair  # noqa: F401 - a fixture
from tests.decoding.pair import hostile
from tests.decoding.pair import target as make_target

runner = CliRunner()


def command(pair, path, *more):  # noqa: F811
    return [
        "profile", "--target", pair["target"], "--drafter", pair["drafter"], "--out", str(path), "--slots", "0",
        "--slots", "3", "--contexts", "6", "--contexts", "12", "--repeats", "2", "--dtype", "fp32", "--no-pack",
        *more,
    ]  # fmt: skip


def test_writes_a_curve(pair, tmp_path):  # noqa: F811
    path = tmp_path / "curve.json"
    result = runner.invoke(app, command(pair, path))
    assert result.exit_code == 0, result.output
    assert "Milliseconds of a round" in result.output
    curve = ThroughputCurve.load(path)
    assert curve.contexts == [6, 12]
    assert curve.token_counts(6) == curve.token_counts(12) == [1, 4]
    assert curve.num_samples(4, 12) == 2
    assert curve.draft_seconds(1) > 0
    assert curve.key is not None
    assert (curve.key.model, curve.key.dtype, curve.key.device, curve.key.packed) == (
        "target",
        "float32",
        "cpu",
        False,
    )
    said = " ".join(result.stderr.split())
    assert "profile: warming up profile: 1 row of 6 tokens profile: 1 row of 12 tokens" in said
    assert "1 thread" in said or "threads, not packed" in said


def test_every_number_of_rows_is_shown(pair, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(common.out, "_width", 80)
    path = tmp_path / "curve.json"
    result = runner.invoke(app, command(pair, path, "--rows", "2", "--rows", "1", "--pack"))
    assert result.exit_code == 0, result.output
    shown = [tuple(map(int, found)) for found in re.findall(r"│ +(\d+) │ +(\d+) │ +(\d+) │", result.stdout)]
    assert shown == [(1, 0, 1), (1, 3, 4), (2, 0, 2), (2, 3, 8)]
    assert "…" not in result.stdout
    assert "at 12" in result.stdout
    key = ThroughputCurve.load(path).key
    assert key is not None
    assert key.packed is True


def test_json(pair, tmp_path):  # noqa: F811
    path = tmp_path / "curve.json"
    result = runner.invoke(app, command(pair, path, "--json", "--rows", "2", "--rows", "1"))
    assert result.exit_code == 0, result.output
    value = json.loads(result.stdout)
    assert {entry["tokens"] for entry in value["medians"]["12"]} == {1, 2, 4, 8}
    assert value["medians"]["6"][0]["ratio"] == 1.0
    assert list(value["draft_seconds"]) == ["1", "2"]
    curve = ThroughputCurve.load(path)
    for rows, by_slots in value["draft_seconds"].items():
        assert by_slots == {n: curve.draft_seconds(int(rows), int(n)) for n in ("0", "3")}
        assert by_slots["3"] > by_slots["0"] > 0
    written = json.loads(path.read_text())
    assert {name: value[name] for name in written} == written


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--slots", "9"], "from 0 to the drafter's"),
        (["--contexts", "100000"], "leave room"),
        (["--out", "no-such-folder/curve.json"], "cannot be written"),
        (["--dtype", "int8"], "dtype"),
    ],
)
def test_bad_input_exits_2(pair, tmp_path, more, message):  # noqa: F811
    result = runner.invoke(app, command(pair, tmp_path / "curve.json", *more))
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.stderr.split())
    assert not (tmp_path / "curve.json").exists()


def test_real_rounds_of_every_shape_and_what_is_left_behind():
    target, drafter = make_target(), hostile()
    drafter.speculation = SpeculationConfig(num_assistant_tokens=1)
    most = drafter.config.num_draft_tokens
    curve = profile_pair(target, drafter, rows=[3, 1], contexts=[5], repeats=2)
    shapes = [(rows, slots) for rows in (1, 3) for slots in default_slots(drafter)]
    assert curve.token_counts() == sorted({rows * (1 + slots) for rows, slots in shapes})
    for rows, slots in shapes:
        same = [shape for shape in shapes if shape[0] * (1 + shape[1]) == rows * (1 + slots)]
        assert curve.num_samples(rows * (1 + slots), 5) == 2 * len(same)
    assert curve.draft_seconds(1, most) > curve.draft_seconds(1, 0) > 0
    assert drafter.speculation == SpeculationConfig(num_assistant_tokens=1)
    assert drafter._policies is None
    assert curve_key(target, "x").threads == torch.get_num_threads()


def observed(slots: int, tokens: int) -> RoundObservation:
    return RoundObservation(2, slots, tokens, 0.1, 0.2, [slots] * 2, [0] * 2, None)


def test_widths_take_turns_until_each_was_seen():
    policy = module._InTurn([0, 3], repeats=1)
    asked = []
    policy.observe(observed(1, 4))  # a width nobody asked for, of a target that has to catch up
    for tokens in (2, 8, 2, 7):  # the last was cut behind an end of sequence
        asked.append(policy.slots(2, 3))
        policy.observe(observed(asked[-1], tokens))
    assert asked == [0, 3, 0, 3]
    assert policy.slots(2, 3) == 3
    with pytest.raises(module._Seen):
        policy.observe(observed(3, 8))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": []}, "at least 1"),
        ({"rows": [0, 2]}, "at least 1"),
        ({"repeats": 0}, "at least 1"),
        ({"slots": []}, "from 0"),
        ({"slots": [-1]}, "from 0"),
        ({"contexts": []}, "leave room"),
    ],
)
def test_counts_out_of_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        profile_pair(make_target(), hostile(), **arguments)
