"""`dspark profile` on a tiny pair: the file it writes is a curve of these shapes, and nothing of the pair is changed.

Catches: a cache that grows from timing to timing, settings of the drafter left behind, a table that divides by zero, a
run that fails only after it has measured.
"""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from dspark import SpeculationConfig
from dspark.cli import app
from dspark.decoding.curve import curve_key
from dspark.evaluation import profile as module
from dspark.evaluation.profile import profile_pair
from dspark.scheduling import ThroughputCurve
from tests.cli.test_commands import pair  # noqa: F401 - a fixture
from tests.decoding.pair import hostile
from tests.decoding.pair import target as make_target

runner = CliRunner()


def command(pair, path, *more):  # noqa: F811
    return [
        "profile", "--target", pair["target"], "--drafter", pair["drafter"], "--out", str(path), "--tokens", "1",
        "--tokens", "4", "--contexts", "6", "--contexts", "12", "--repeats", "2", "--dtype", "fp32", "--no-pack",
        *more,
    ]  # fmt: skip


def test_writes_a_curve(pair, tmp_path):  # noqa: F811
    path = tmp_path / "curve.json"
    result = runner.invoke(app, command(pair, path))
    assert result.exit_code == 0, result.output
    assert "drafter's side" in result.output
    curve = ThroughputCurve.load(path)
    assert curve.contexts == [6, 12]
    assert curve.token_counts(6) == curve.token_counts(12) == [1, 4]
    assert curve.num_samples(4, 12) == 2
    assert curve.draft_seconds(1) > 0
    assert curve.key is not None
    assert (curve.key.model, curve.key.dtype, curve.key.device) == ("target", "float32", "cpu")


def test_json(pair, tmp_path):  # noqa: F811
    path = tmp_path / "curve.json"
    result = runner.invoke(app, command(pair, path, "--json", "--rows", "2", "--rows", "1"))
    value = json.loads(result.stdout)
    assert {entry["tokens"] for entry in value["medians"]["12"]} == {1, 4}
    assert value["medians"]["6"][0]["ratio"] == 1.0
    assert list(value["draft_seconds"]) == ["1", "2"]
    curve = ThroughputCurve.load(path)
    for rows, seconds in value["draft_seconds"].items():
        assert seconds == curve.draft_seconds(int(rows)) > 0
    written = json.loads(path.read_text())
    assert {name: value[name] for name in written} == written


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--rows", "3"], "multiples of the rows (3)"),
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


def test_a_batch_and_what_is_left_behind(monkeypatch):
    target = make_target()
    drafter = hostile()
    drafter.speculation = SpeculationConfig(num_assistant_tokens=1)
    lengths = []
    original = module._TargetSteps._forward

    def watched(steps, width, cache):
        lengths.append((int(cache.get_seq_length()), width))
        original(steps, width, cache)

    monkeypatch.setattr(module._TargetSteps, "_forward", watched)
    curve = profile_pair(target, drafter, token_counts=[2, 6], contexts=[5], rows=[3, 2], repeats=2)
    assert lengths == [(0, 5), *[(5, 1), (5, 3)] * 3]
    assert curve.token_counts() == [2, 6]
    assert curve.draft_seconds(2) > 0
    assert curve.draft_seconds(3) > 0
    assert drafter.speculation == SpeculationConfig(num_assistant_tokens=1)
    assert curve_key(target, "x").threads == torch.get_num_threads()


@pytest.mark.parametrize("rows", [[], [0], [0, 2]])
def test_no_rows_are_refused(rows):
    with pytest.raises(ValueError, match="multiples of the rows"):
        profile_pair(make_target(), hostile(), token_counts=[2], contexts=[5], rows=rows)
