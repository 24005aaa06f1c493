"""`confidence_temperatures`: one list, or lists by decoding temperature, and which of them a call uses.

Catches: a mapping that changes when it is written and read, keys that are no temperatures or name one twice, a greedy
call with the temperatures of sampling, temperatures that reach the drafts themselves.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper
from transformers.generation.logits_process import LogitsProcessorList

from dspark import DSparkConfig, DSparkDrafter
from dspark.decoding.processors import Processors
from tests import small
from tests.decoding.pair import BLOCK, prompt, target
from tests.scripted import Oracle, drafter_config

ROWS = {"0": [1.0, 2.0, 3.0, 4.0], "1.0": [0.5, 0.5, 0.5, 0.25]}


def test_lists_by_temperature_survive_writing_and_reading(tmp_path) -> None:
    config = small.config(confidence_temperatures=ROWS)
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["confidence_temperatures"] == ROWS
    for again in (
        DSparkConfig.from_pretrained(tmp_path),
        DSparkConfig(**config.to_dict()),
        DSparkConfig.from_dict(json.loads(config.to_json_string())),
    ):
        assert again.confidence_temperatures == ROWS
        assert again.temperatures_at(0) == ROWS["0"]
    small.drafter(confidence_temperatures=ROWS, share_embedding=False).save_pretrained(tmp_path)
    assert DSparkDrafter.from_pretrained(tmp_path).config.confidence_temperatures == ROWS


def test_keys_of_python_become_keys_of_json() -> None:
    given = {0: (1.0, 2.0, 3.0, 4.0), 1.0: ROWS["1.0"]}
    config = small.config(confidence_temperatures=given)
    assert config.confidence_temperatures == ROWS


def test_the_caller_s_rows_are_copied() -> None:
    given = {"0": [1.0] * 4}
    config = small.config(confidence_temperatures=given)
    config.confidence_temperatures["0"].append(1.0)
    config.confidence_temperatures["1"] = []
    assert given == {"0": [1.0] * 4}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({}, "keyed by decoding temperatures, numbers of at least 0 .*got none"),
        ({"greedy": [1.0] * 4}, "keyed by decoding temperatures, .*got 'greedy'"),
        ({"-0.5": [1.0] * 4}, "keyed by decoding temperatures, .*got '-0.5'"),
        ({"nan": [1.0] * 4}, "keyed by decoding temperatures, .*got 'nan'"),
        ({"inf": [1.0] * 4, "0": [1.0] * 4}, "keyed by decoding temperatures, .*got 'inf', '0'"),
        ({True: [1.0] * 4}, "keyed by decoding temperatures, .*got 'True'"),
        ({"1": [1.0] * 4, "1.0": [1.0] * 4}, "must name each decoding temperature once, got '1', '1.0'"),
        ({1: [1.0] * 4, "1": [1.0] * 4}, "must name each decoding temperature once, got 1, '1'"),
        ({"0": [1.0] * 3}, "must be 4 positive numbers, one per draft position, or such lists by"),
        ({"0": [1.0] * 4, "1": [1.0, 0.0, 1.0, 1.0]}, "must be 4 positive numbers"),
        ({"0": None}, "must be 4 positive numbers"),
        ([1.0, 1.0, 1.0, 1e39], "must be 4 positive numbers"),  # infinite in float32: confidence one half everywhere
        ([1.0, 1.0, 1.0, 1e-46], "must be 4 positive numbers"),  # zero in float32
    ],
)  # fmt: skip
def test_broken_rules_are_named(rows: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small.config(confidence_temperatures=rows)


def test_lists_without_a_confidence_head_are_refused() -> None:
    with pytest.raises(ValueError, match="no confidence head"):
        small.config(confidence_temperatures=ROWS, enable_confidence_head=False)


@pytest.mark.parametrize(
    ("temperature", "key"),
    [(0, "0"), (0.2, "0"), (0.5, "0"), (0.51, "1"), (1.0, "1"), (1.5, "1"), (1.6, "2.0"), (9.0, "2.0")],
)
def test_the_nearest_key_is_used_the_lower_of_two(temperature: float, key: str) -> None:
    rows = {key: [float(key) + 1] * 4 for key in ("2.0", "0", "1")}
    assert small.config(confidence_temperatures=rows).temperatures_at(temperature) == rows[key]


def test_one_list_is_for_every_temperature() -> None:
    config = small.config(confidence_temperatures=[1.0, 2.0, 3.0, 4.0])
    assert config.temperatures_at(0.0) == config.temperatures_at(1.7) == [1.0, 2.0, 3.0, 4.0]
    assert small.config().temperatures_at(0.0) is None


def test_the_decoding_temperature_is_the_product_of_the_warpers() -> None:
    def of(*processors: Any) -> float:
        return Processors(LogitsProcessorList(processors), num_rows=1).temperature

    assert of() == 1.0
    assert of(TopKLogitsWarper(5)) == 1.0
    assert of(TopKLogitsWarper(5), TemperatureLogitsWarper(0.7)) == 0.7
    assert of(TemperatureLogitsWarper(0.5), TemperatureLogitsWarper(3.0)) == pytest.approx(1.5)


def sure(rows: Any, **overrides: Any) -> Oracle:
    """An oracle that says .8 of every slot; its drafts are right for any text it is asked about."""
    text = target().generate(prompt(), do_sample=False, max_new_tokens=60)[0].tolist()
    drafter = Oracle(target(), [text], wrong=(None,), confidence_temperatures=rows, **overrides).eval()
    with torch.no_grad():
        drafter.confidence_head.proj.weight.zero_()
        drafter.confidence_head.proj.bias.fill_(math.log(4))
    return drafter


# Survival at T = .5: .94 .89 .83 .79 .74 ...; at T = 5: .57 .32 ...
CALLS = [
    ({"do_sample": False}, BLOCK),
    ({"do_sample": True}, 1),
    ({"do_sample": True, "temperature": 1.0}, 1),
    ({"do_sample": True, "temperature": 0.4}, BLOCK),
    ({"do_sample": True, "temperature": 0.5}, BLOCK),
    ({"do_sample": True, "temperature": 0.6}, 1),
    ({"do_sample": True, "temperature": 3.0, "top_k": 4}, 1),
]


@pytest.mark.parametrize(("call", "most"), CALLS, ids=str)
def test_a_call_uses_the_row_of_its_decoding_temperature(call: dict[str, Any], most: int) -> None:
    drafter = sure({"0": [0.5] * BLOCK, "1": [5.0] * BLOCK})
    torch.manual_seed(0)
    target().generate(prompt(), assistant_model=drafter, max_new_tokens=24, survival_threshold=0.5, **call)
    assert max(drafter.last_stats.verified) == most


def test_temperatures_never_reach_drafts_or_text() -> None:
    torch.manual_seed(5)
    drafter = DSparkDrafter(drafter_config(target())).eval()
    seen = []
    for rows in (None, [0.3] * BLOCK, {"0": [0.2] * BLOCK, "1": [6.0] * BLOCK}):
        drafter.config.confidence_temperatures = rows
        torch.manual_seed(1)
        settings = {"policy": "fixed", "record_confidence": True}
        ids = target().generate(
            prompt(), assistant_model=drafter, max_new_tokens=24, do_sample=True, temperature=0.8, **settings
        )
        stats = drafter.last_stats
        seen.append((ids.tolist(), stats.verified, stats.accepted, stats.confidence_logits))
    assert seen[0] == seen[1] == seen[2]  # the recorded logits are raw too
