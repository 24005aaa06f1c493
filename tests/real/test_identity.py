"""The real target with the shipped drafter: fp32 greedy ids equal plain `generate`, packed and stock.

Catches what tiny random models cannot: real acceptance patterns, long texts, the shipped weights themselves. The full
set (40 evaluation prompts of 128 tokens) is marked slow.
"""

from __future__ import annotations

import pytest
import torch

from dspark import DSparkDrafter, optimize_for_cpu
from dspark.cli.common import demo_drafter, demo_target
from dspark.cli.loading import load_drafter, load_target
from dspark.evaluation import SETS, chat_ids, sample_prompts
from dspark.pairing import check_pair

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def real():
    folder, file = demo_target()
    target, tokenizer = load_target(folder, file, torch.float32)
    return target, tokenizer, load_drafter(demo_drafter(), torch.float32)


def prompts(count: int) -> list[str]:
    """`count` prompts, taken from all sets in turn."""
    sets = [sample_prompts(name) for name in SETS]
    turns = [s[i] for i in range(max(map(len, sets))) for s in sets if i < len(s)]
    return turns[:count]


def assert_identical(real, prompt: str, *, tokens: int, thresholds: tuple[float, ...]) -> float:
    """Ids with the drafter equal plain ones at every threshold; returns the accepted length at the first."""
    target, tokenizer, drafter = real
    ids = chat_ids(tokenizer, prompt)
    plain = target.generate(ids, do_sample=False, max_new_tokens=tokens)
    lengths = []
    for threshold in thresholds:
        out = target.generate(
            ids, do_sample=False, max_new_tokens=tokens, assistant_model=drafter,
            assistant_confidence_threshold=threshold, return_dict_in_generate=True,
        )  # fmt: skip
        assert out.sequences.tolist() == plain.tolist(), (prompt, threshold)
        lengths.append(out.speculation.mean_acceptance_length)
    return lengths[0]


def test_the_pair_fits_without_a_finding(real) -> None:
    target, tokenizer, drafter = real
    assert check_pair(target, drafter, tokenizer=tokenizer) == []


def test_packed_identity_and_acceptance(real) -> None:
    target, _, drafter = real
    with optimize_for_cpu(target), optimize_for_cpu(drafter):
        lengths = [assert_identical(real, p, tokens=32, thresholds=(0.0, 0.6)) for p in prompts(6)]
    assert sum(lengths) / len(lengths) > 1.3  # a drafter that reads the wrong layers or positions stays near 1


def test_stock_identity(real) -> None:
    for prompt in prompts(2):
        assert_identical(real, prompt, tokens=24, thresholds=(0.0,))


@pytest.mark.slow
def test_identity_over_forty_prompts(real) -> None:
    target, _, drafter = real
    with optimize_for_cpu(target), optimize_for_cpu(drafter):
        for prompt in prompts(40):
            assert_identical(real, prompt, tokens=128, thresholds=(0.0, 0.6))


def test_shipped_weights_are_bf16_and_small(real) -> None:
    folder = demo_drafter()
    stored = DSparkDrafter.from_pretrained(folder)
    assert stored.dtype == torch.bfloat16
    assert stored.embed_tokens is None  # borrowed: it alone would be more than all the rest
    ids = stored.draft_token_ids
    header = 16_384
    wanted = 2 * stored.num_parameters() + ids.nbytes
    assert wanted < (folder / "model.safetensors").stat().st_size < wanted + header
    assert wanted < 64_000_000
