"""What is said about the paths of a pair is what a call of it does.

Catches: a rule of attention or packing that changed in the loop and not here, a reason that names another cause.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dspark import DSparkDrafter, optimize_for_cpu
from dspark.decoding import grouped_attention
from dspark.evaluation.paths import PickedPath, picked_paths
from tests.decoding.pair import new_target, prompt
from tests.scripted import drafter_config


def paths(target: Any, drafter: Any) -> dict[str, PickedPath]:
    return {path.what: path for path in picked_paths(target, drafter)}


def new_drafter(target: Any, **fields: Any) -> DSparkDrafter:
    torch.manual_seed(0)
    return DSparkDrafter(drafter_config(target, **fields)).eval()


@pytest.mark.parametrize(
    ("attention", "shares", "path", "reason"),
    [
        ("sdpa", True, "sdpa by key heads, nothing copied", "2 query heads share a key head"),
        ("sdpa", False, "sdpa, as the model has it", "no query heads share a key head"),
        ("eager", True, "eager, as the model has it", "only sdpa is known to copy shared keys"),
    ],
)
def test_attention_is_laid_out_as_is_said(
    attention: str, shares: bool, path: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shares:
        target: Any = new_target(attention)
    else:
        config = new_target().config
        config.num_key_value_heads = config.num_attention_heads
        target = type(new_target())(config).eval()
    drafter = new_drafter(target)
    attend, calls = grouped_attention.attend_grouped, []
    monkeypatch.setattr(grouped_attention, "attend_grouped", lambda *args: calls.append(0) or attend(*args))
    target.generate(prompt(), assistant_model=drafter, max_new_tokens=8)
    found = paths(target, drafter)["the target's attention"]
    assert (found.path, found.reason) == (path, reason)
    assert bool(calls) == ("by key heads" in path)


def test_layers_heads_and_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    target = new_target()
    drafter = new_drafter(target, markov_rank=0, markov_head_type="none")
    with optimize_for_cpu(drafter):
        found = paths(target, drafter)
    assert found["the target's linear layers"].path == "stock"
    assert found["the target's linear layers"].reason == "packing was not asked for"
    assert found["the drafter's linear layers"].path.startswith("packed for oneDNN in float32")
    assert found["the sequential head"].path == "none"
    assert (found["ops"].path, found["ops"].reason) == ("torch", "tensors are on cpu")
    assert paths(target, new_drafter(target))["the sequential head"].path == "vanilla, slot by slot"
    monkeypatch.setenv("DSPARK_OPS", "torch")
    assert paths(target, drafter)["ops"].reason == "the environment variable DSPARK_OPS says so"
