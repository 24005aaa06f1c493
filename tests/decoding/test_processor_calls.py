"""Processors give the text of plain decoding, and the target's side calls them exactly as plain decoding does.

Catches: a block processed in one call with one prefix, a processor asked about a rejected token, memory that runs
ahead with the drafts, options that reach one side only.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import SynthIDTextWatermarkingConfig, WatermarkingConfig
from transformers.generation.logits_process import (
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
)

from tests.decoding.pair import distinct, hostile, oracle, plain, prompt, sampled, target
from tests.scripted import CYCLE

PROMPT = 6
COUNT = 36


def drafters(text: list[int]) -> list[Any]:
    """One that knows the processed text, one that knows it and errs at every slot, and noise."""
    return [oracle((None,), text=text), oracle(CYCLE, text=text), hostile()]


def options() -> dict[str, dict[str, Any]]:
    _, text = distinct()
    new = text[PROMPT:]
    return {
        "repetition_penalty": {"repetition_penalty": 1.3},
        "strong repetition_penalty": {"repetition_penalty": 5.0},
        "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.7},
        "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
        "no token twice": {"no_repeat_ngram_size": 1},
        "encoder_no_repeat_ngram_size": {
            "encoder_no_repeat_ngram_size": 1,
            "sequence_bias": [[[text[0]], 9.0], [[33], 9.0]],
        },
        "bad_words_ids": {"bad_words_ids": [[new[2]], [new[5], new[6]], [new[0], new[1], 9]]},
        "sequence_bias": {"sequence_bias": [[[new[3]], -9.0], [[new[7], new[8]], -9.0], [[17], 1.5]]},
        "suppress_tokens": {"suppress_tokens": [new[1], new[4]]},
        "begin_suppress_tokens": {"begin_suppress_tokens": [new[0], new[1]]},
        "min_new_tokens": {"min_new_tokens": 12, "eos_token_id": [new[3], new[6], new[14]]},
        "min_length": {"min_length": PROMPT + 12, "eos_token_id": [new[3], new[6], new[14]]},
        "exponential_decay_length_penalty": {
            "exponential_decay_length_penalty": (4, 1.2),
            "eos_token_id": [new[19], 126],
        },
        "forced_eos_token_id": {"forced_eos_token_id": 126},
        "remove_invalid_values": {"remove_invalid_values": True},
        "renormalize_logits": {"renormalize_logits": True},
        "watermark": {"watermarking_config": WatermarkingConfig(bias=2.5, seeding_scheme="lefthash")},
        "guidance_scale": {"guidance_scale": 1.8},
        "guidance_scale with a negative prompt": {"guidance_scale": 1.8, "negative_prompt_ids": prompt(4, seed=77)},
        "guidance below one": {"guidance_scale": 0.5},
        "several": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "suppress_tokens": [new[2]]},
    }


@pytest.mark.parametrize("name", sorted(options()))
def test_greedy_text_is_that_of_plain_decoding(name: str) -> None:
    ids, _ = distinct()
    rules = options()[name]
    expected = plain(target(), ids, max_new_tokens=COUNT, **rules)
    for drafter in drafters(expected[0].tolist()):
        got = plain(target(), ids, max_new_tokens=COUNT, assistant_model=drafter, **rules)
        assert torch.equal(got, expected), type(drafter).__name__


@pytest.mark.parametrize("rules", [{"forced_bos_token_id": 7}, {"begin_suppress_tokens": [55]}], ids=str)
def test_rules_for_the_first_token_of_a_one_token_prompt(rules: dict[str, Any]) -> None:
    ids = torch.tensor([[10]])
    expected = plain(target(), ids, max_new_tokens=12, **rules)
    assert "forced_bos_token_id" not in rules or expected[0, 1] == 7
    for drafter in drafters(expected[0].tolist()):
        assert torch.equal(plain(target(), ids, max_new_tokens=12, assistant_model=drafter, **rules), expected)


def test_the_options_change_the_text() -> None:
    # Else equality above would prove nothing. Three change scores, but no greedy choice of this target.
    ids, _ = distinct()
    silent = {"remove_invalid_values", "renormalize_logits", "encoder_repetition_penalty"}
    for name, rules in options().items():
        eos = {key: value for key, value in rules.items() if key == "eos_token_id"}
        without = plain(target(), ids, max_new_tokens=COUNT, **eos)
        differs = not torch.equal(plain(target(), ids, max_new_tokens=COUNT, **rules), without)
        assert differs or name in silent, name


def test_drafts_follow_a_strong_penalty() -> None:
    # Judged on the target's side only, a penalty rejects nearly every draft as soon as the text has some length.
    ids, _ = distinct()
    rules = {"repetition_penalty": 5.0, "max_new_tokens": COUNT}
    text = plain(target(), ids, **rules)[0].tolist()
    drafter = oracle((None,), text=text)
    plain(target(), ids, assistant_model=drafter, **rules)
    assert drafter.last_stats.accepted == drafter.last_stats.verified


class Recording(LogitsProcessor):
    """Prefers tokens by a rule with memory; remembers the prefix and the shape of every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[list[int]], tuple[int, ...]]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls.append((input_ids.tolist(), tuple(scores.shape)))
        scores = scores.clone()
        scores[:, len(self.calls) % 3 :: 3] += 2.0
        return scores


@pytest.mark.parametrize("extra", [{}, {"repetition_penalty": 1.2, "top_k": 9}], ids=["alone", "between others"])
def test_a_processor_with_memory_is_called_as_in_plain_decoding(extra: dict[str, Any]) -> None:
    ids, text = distinct()
    theirs = Recording()
    rules = {"max_new_tokens": COUNT, **extra}
    expected = plain(target(), ids, logits_processor=[theirs], **rules)[0].tolist()
    assert expected != text[: PROMPT + COUNT]
    for drafter in drafters(expected):
        ours = Recording()
        got = plain(target(), ids, logits_processor=LogitsProcessorList([ours]), assistant_model=drafter, **rules)
        assert got[0].tolist() == expected
        assert ours.calls == theirs.calls
    assert all(shape == (1, 128) for _, shape in theirs.calls)
    assert [len(prefix[0]) for prefix, _ in theirs.calls] == list(range(PROMPT, PROMPT + COUNT))


def test_a_sampled_text_is_processed_in_order_too() -> None:
    ids, text = distinct()
    for seed in range(2):
        torch.manual_seed(seed)
        ours = Recording()
        call = {"max_new_tokens": COUNT, "logits_processor": [ours], "assistant_model": oracle(text=text)}
        out = sampled(target(), ids, **call)[0].tolist()
        assert [prefix[0] for prefix, _ in ours.calls] == [out[:n] for n in range(PROMPT, PROMPT + COUNT)]


class Grammar:
    """Allows even ids only, and a token class that depends on how often it was asked."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def __call__(self, batch_id: int, input_ids: torch.Tensor) -> list[int]:
        self.asked.append([batch_id, *input_ids.tolist()])
        return [token for token in range(0, 128, 2) if token % 6 != 2 * (len(self.asked) % 3)]


def test_a_stateful_grammar_is_asked_about_the_text_only() -> None:
    ids, _ = distinct()
    theirs = Grammar()
    expected = plain(target(), ids, max_new_tokens=COUNT, prefix_allowed_tokens_fn=theirs)[0].tolist()
    assert all(token % 2 == 0 for token in expected[PROMPT:])
    for drafter in drafters(expected):
        ours = Grammar()
        got = plain(target(), ids, max_new_tokens=COUNT, prefix_allowed_tokens_fn=ours, assistant_model=drafter)
        assert got[0].tolist() == expected
        assert ours.asked == theirs.asked


def test_a_sampled_text_obeys_the_grammar() -> None:
    ids, _ = distinct()
    for seed in range(2):
        torch.manual_seed(seed)
        ours = Grammar()
        call = {"max_new_tokens": COUNT, "prefix_allowed_tokens_fn": ours, "assistant_model": hostile(seed)}
        out = sampled(target(), ids, **call)[0].tolist()
        assert all(token % 2 == 0 for token in out[PROMPT:])
        assert [prefix[1:] for prefix in ours.asked] == [out[:n] for n in range(PROMPT, PROMPT + COUNT)]


@pytest.mark.parametrize("name", ["guidance_scale", "watermark", "synthid"])
def test_processors_with_a_model_or_memory_inside_when_sampling(name: str) -> None:
    # Their law is theirs to keep; here that they run, stay in range and leave the next call alone.
    ids, text = distinct()
    rules = {**options(), "synthid": {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[3, 5], ngram_len=3)}}
    torch.manual_seed(0)
    out = sampled(target(), ids, max_new_tokens=COUNT, assistant_model=oracle(), **rules[name])
    assert out.shape == (1, PROMPT + COUNT)
    assert plain(target(), ids, max_new_tokens=COUNT)[0].tolist() == text[: PROMPT + COUNT]


def test_a_subclass_may_hide_memory_and_runs_on_the_target_side_only() -> None:
    class Growing(RepetitionPenaltyLogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            self.penalty += 0.05
            return super().__call__(input_ids, scores)

    ids, _ = distinct()
    expected = plain(target(), ids, max_new_tokens=COUNT, logits_processor=[Growing(1.0)])
    for drafter in drafters(expected[0].tolist()):
        processors = [Growing(1.0)]
        got = plain(target(), ids, max_new_tokens=COUNT, logits_processor=processors, assistant_model=drafter)
        assert torch.equal(got, expected)
        assert processors[0].penalty == pytest.approx(1.0 + 0.05 * COUNT)


def test_an_error_in_a_processor_comes_through() -> None:
    class Broken(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if input_ids.shape[1] == PROMPT + 5:
                raise RuntimeError("broken processor")
            return scores

    ids, _ = distinct()
    with pytest.raises(RuntimeError, match="broken processor"):
        plain(target(), ids, max_new_tokens=COUNT, logits_processor=[Broken()], assistant_model=oracle())
