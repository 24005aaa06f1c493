"""Processors that hold something per row (a prompt, a memory, a cache, a rule by row) keep to their rows in a batch.

Catches: rows processed one at a time by processors that believe to see the whole batch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import SynthIDTextWatermarkingConfig, WatermarkingConfig

from tests.decoding import pair

ROWS = 3
COUNT = 16


def by_row(batch_id: int, prefix: torch.Tensor) -> list[int]:
    """Each row has its own ten tokens, which move with the text's length."""
    return [(40 * batch_id + 7 * prefix.shape[0] + i) % pair.VOCAB for i in range(10)]


OPTIONS: dict[str, dict[str, Any]] = {
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": by_row},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 5.0},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "guidance_scale": {"guidance_scale": 1.8},
    "guidance_scale with negative prompts": {
        "guidance_scale": 1.8, "negative_prompt_ids": torch.cat([pair.prompt(4, seed=50 + row) for row in range(ROWS)])
    },
    "watermark": {"watermarking_config": WatermarkingConfig(bias=2.5)},
    "synthid": {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[3, 5, 7], ngram_len=2)},
    "repetition_penalty": {"repetition_penalty": 1.5},
}  # fmt: skip


def prompts() -> torch.Tensor:
    return torch.cat([pair.prompt(seed=row) for row in range(ROWS)])


@pytest.mark.parametrize("name", OPTIONS)
def test_greedy_rows_equal_plain_decoding(name):
    model, kwargs = pair.target(), {"max_new_tokens": COUNT, **OPTIONS[name]}
    expected = pair.plain(model, prompts(), **kwargs)
    assert torch.equal(pair.plain(model, prompts(), assistant_model=pair.hostile(), **kwargs), expected)
    # Rows that leave the batch early do not hand their part to others.
    ends = expected[0, pair.prompt().shape[1] + 4]
    kwargs["eos_token_id"] = int(ends)
    expected = pair.plain(model, prompts(), **kwargs)
    assert torch.equal(pair.plain(model, prompts(), assistant_model=pair.hostile(), **kwargs), expected)


@pytest.mark.parametrize(
    "name", ["prefix_allowed_tokens_fn", "encoder_repetition_penalty", "encoder_no_repeat_ngram_size"]
)
def test_sequences_of_one_prompt_share_its_part(name):
    """Two sequences per prompt; top-1 sampling makes them comparable."""
    model = pair.target()
    kwargs = {"max_new_tokens": COUNT, "do_sample": True, "top_k": 1, **OPTIONS[name]}
    got = model.generate(prompts(), assistant_model=pair.hostile(), num_return_sequences=2, **kwargs)
    if name == "prefix_allowed_tokens_fn":  # whether the number it gets is the prompt's or the row's is theirs to say
        expected = model.generate(prompts(), num_return_sequences=2, **kwargs)
    else:
        # Plain decoding of transformers up to 5.20 mixes the prompts up when it returns several sequences.
        expected = model.generate(prompts().repeat_interleave(2, dim=0), **kwargs)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("name", ["repetition_penalty", "no_repeat_ngram_size"])
def test_padding_is_no_part_of_a_row_s_text(name):
    model, kwargs = pair.target(), {"max_new_tokens": COUNT, name: 2}
    kwargs["repetition_penalty"] = float(kwargs.get("repetition_penalty", 1))
    ids = prompts()
    mask = torch.ones_like(ids)
    for row in range(ROWS):
        ids[row, :row], mask[row, :row] = 0, 0
    expected = pair.plain(model, ids, attention_mask=mask, **kwargs)
    assert torch.equal(pair.plain(model, ids, attention_mask=mask, assistant_model=pair.hostile(), **kwargs), expected)


def test_parts_matter():
    """Else equality would prove nothing: with the rows' parts swapped the text is another."""
    model, swapped = pair.target(), prompts().flip(0)
    for name in ("prefix_allowed_tokens_fn", "guidance_scale with negative prompts"):
        kwargs = {"max_new_tokens": COUNT, **OPTIONS[name]}
        text = pair.plain(model, prompts(), **kwargs)
        assert not torch.equal(pair.plain(model, swapped, **kwargs).flip(0), text)
