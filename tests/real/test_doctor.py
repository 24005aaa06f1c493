"""The doctor on the real pair: a drafter with one setting spoiled is told which one."""

from __future__ import annotations

import pytest
import torch

from dspark import DSparkDrafter, optimize_for_cpu
from dspark.cli.common import demo_drafter, demo_target
from dspark.cli.loading import load_target
from dspark.evaluation import chat_ids, sample_prompts
from dspark.evaluation.doctor import Diagnosis, diagnose

pytestmark = pytest.mark.real

SPOILED = {
    "mask token": ({"mask_token_id": 0}, "mask token", "set `mask_token_id` to"),
    "rope": ({"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}, "the target's rope", "100000.0"),
}


@pytest.fixture(scope="module")
def real():
    folder, file = demo_target()
    target, tokenizer = load_target(folder, file, torch.float32)
    return target, tokenizer, [chat_ids(tokenizer, text) for text in sample_prompts("gsm8k", 4)]


def diagnosis(real, count: int, tokens: int, **fields) -> Diagnosis:
    target, tokenizer, prompts = real
    drafter = DSparkDrafter.from_pretrained(demo_drafter(), dtype=torch.float32, **fields)
    with optimize_for_cpu(target):
        result = diagnose(target, drafter, prompts[:count], tokenizer=tokenizer, max_new_tokens=tokens)
    assert result.replayed_length == pytest.approx(result.accepted_length)
    return result


def test_nothing_wrong(real) -> None:
    assert diagnosis(real, 2, 32).is_healthy


@pytest.mark.slow
@pytest.mark.parametrize("spoiled", SPOILED)
def test_likely_cause(real, spoiled: str) -> None:
    fields, name, advice = SPOILED[spoiled]
    result = diagnosis(real, 4, 64, **fields)
    assert not result.is_healthy
    assert result.cause is not None
    assert result.cause.name.startswith(name)
    assert advice in result.verdict
