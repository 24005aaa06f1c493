"""SGLang's file of confidence temperatures: its exact keys, and what it may hold.

Catches: a key SGLang does not read, a temperature that float32 turns into 0 or infinity, lists for another block size,
files SGLang wrote itself that are refused for what it leaves out.
"""

from __future__ import annotations

import json
import math

import pytest
from dspark.conversion.sglang_sts import SglangSts, from_json, to_json

FULL = {
    "temperatures": [1.5, 0.8],
    "dataset": "gsm8k+mbpp",
    "num_samples": 1200,
    "ece_before": [0.06, 0.05],
    "ece_after": [0.01, 0.02],
}


def test_keys_are_exactly_those() -> None:
    sts = SglangSts((1.5, 0.8), "gsm8k+mbpp", 1200, (0.06, 0.05), (0.01, 0.02))
    assert json.loads(to_json(sts)) == FULL
    assert list(json.loads(to_json(sts))) == list(FULL)
    assert from_json(to_json(sts)) == sts


def test_files_that_sglang_wrote() -> None:
    # It leaves out what is empty, and passes over keys it does not know.
    assert from_json('{"temperatures":[1,2.5]}') == SglangSts((1.0, 2.5))
    assert from_json(json.dumps({**FULL, "newer": 1}), num_draft_tokens=2).dataset == "gsm8k+mbpp"


def test_lists_become_tuples_of_floats() -> None:
    sts = SglangSts([1, 2], num_samples=3)  # type: ignore[arg-type]
    assert sts.temperatures == (1.0, 2.0)
    assert json.loads(to_json(sts)) == {
        "temperatures": [1.0, 2.0], "dataset": "", "num_samples": 3, "ece_before": [], "ece_after": [],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperatures": []}, "`temperatures` must have one positive number per draft position"),
        *[({"temperatures": [1.0, value]}, "`temperatures` must be positive numbers that float32 can hold")
          for value in (0.0, -1.0, 1e-46, 1e39)],
        *[({"temperatures": value}, "`temperatures` must be a list of finite numbers")
          for value in ([1.0, math.nan], [1.0, "2"], [True], "12", 3.0, None, [1.0, math.inf])],
        ({"ece_before": [0.1]}, r"`ece_before` must have one number per temperature \(2\) or none, got 1"),
        ({"ece_after": [0.1, math.nan]}, "`ece_after` must be a list of finite numbers"),
        ({"dataset": 3}, "`dataset` must be a text, got 3"),
        *[({"num_samples": value}, "`num_samples` must be an integer of at least 0") for value in (-1, 2.5, True)],
    ],
)  # fmt: skip
def test_broken_contents_are_named(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SglangSts(**{**FULL, **changes})
    with pytest.raises(ValueError, match=message):
        from_json(json.dumps({**FULL, **changes}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "it is no JSON"),
        ("[1.0]", "expected a key `temperatures`"),
        ('{"T": [1]}', "expected a key `temperatures`"),
    ],
)
def test_other_files_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_json(text)


def test_temperatures_for_another_block_are_refused() -> None:
    with pytest.raises(ValueError, match=r"has 2 temperatures, the drafter 7 draft positions.*Calibrate again"):
        from_json(json.dumps(FULL), num_draft_tokens=7)
