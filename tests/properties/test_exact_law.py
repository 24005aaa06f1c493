"""The law of sampled text is the target's own, to rounding: every random choice of the real loop is enumerated.

Catches: a law handed to verification that is not the one drawn from, processors on one side only or on a wrong prefix,
cuts that look at what was drawn, a wrong slot's law, caches or contexts that go astray after a rejection, draws that
rows or steps share. The same checks fail on deliberately wrong rules in `test_exact_law_controls.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor

from .enumeration import Chance, distance, emitted_law
from .tiny import drafter, own_law, target

TOLERANCE = 1e-6  # total variation; float32 laws of a few dozen texts are within 3e-7
PROMPT = torch.tensor([[1, 2, 2, 1]])


@dataclass(frozen=True)
class Case:
    """What is decoded: arguments of `generate`, fields of the drafter, sizes of the enumeration."""

    call: dict[str, Any] = field(default_factory=dict)
    draft: dict[str, Any] = field(default_factory=dict)
    vocab: int = 3
    horizon: int = 3
    varies: bool = False  # whether the number of scheduled drafts must vary

    @property
    def kwargs(self) -> dict[str, Any]:
        # Room for one more block, so that the length limit cuts nothing unless the case asks for it.
        return {"max_new_tokens": self.horizon + self.draft.get("block_size", 2) + 1, **self.call}


class Untouched(LogitsProcessor):
    """Changes nothing; a processor that is not transformers' own is asked slot by slot."""

    def __call__(self, input_ids, scores):
        return scores


ROW_WISE = {
    "temperature 0.7": Case({"temperature": 0.7}),
    "temperature 1.5": Case({"temperature": 1.5}),
    "top-k": Case({"top_k": 2}),
    "top-p": Case({"top_p": 0.8, "temperature": 1.3}),
    "min-p": Case({"min_p": 0.3}),
    "block of 1": Case(draft={"block_size": 1}),
    "block of 3": Case(draft={"block_size": 3}, horizon=2),
    "without the anchor's draft": Case(draft={"block_size": 3, "sample_from_anchor": False}),
    "gated head": Case(draft={"markov_head_type": "gated"}),
    "recurrent head": Case(draft={"markov_head_type": "rnn"}),
    "no head": Case(draft={"markov_rank": 0}),
    "reduced vocabulary": Case({"top_k": 3}, {"draft_vocab_size": 2}, vocab=4),
    "own confidence": Case({"assistant_confidence_threshold": 0.4}, varies=True),
    "own confidence, block of 3": Case(
        {"assistant_confidence_threshold": 0.4}, {"block_size": 3}, horizon=2, varies=True
    ),
    "survival": Case({"survival_threshold": 0.3}, {"confidence_temperatures": [2.0, 0.5]}, varies=True),
    "survival, calibrated by decoding temperature": Case(
        {"survival_threshold": 0.3, "temperature": 0.9},
        {"confidence_temperatures": {"0": [0.1, 0.1], "1": [2.0, 0.5]}},
        varies=True,
    ),
    "cap": Case({"num_assistant_tokens": 1}),
    "context window": Case({"context_window": 2, "survival_threshold": 0.3}, varies=True),
    "length limit": Case({"max_new_tokens": 3}, {"block_size": 3}, varies=True),
    "end in the block": Case({"eos_token_id": 1}, varies=True),
    "two ends": Case({"eos_token_id": [1, 3], "temperature": 1.5}, vocab=4, varies=True),
}
HISTORY = {
    "repetition penalty": Case({"repetition_penalty": 1.5}),
    "no repeated n-gram": Case({"no_repeat_ngram_size": 2}, vocab=4),
    "bad words": Case({"bad_words_ids": [[1, 2], [0]]}, vocab=4),
    "no end too early": Case({"min_new_tokens": 2, "eos_token_id": 1}, varies=True),
    # The last slot of a block finds every token forbidden, which the text itself never does.
    "draft without a law": Case(
        {"no_repeat_ngram_size": 1, "renormalize_logits": True, "max_new_tokens": 3}, {"block_size": 3},
        vocab=5, horizon=2,
    ),
    "all together": Case(
        {"repetition_penalty": 1.5, "temperature": 0.8, "top_k": 3, "eos_token_id": 2, "survival_threshold": 0.2},
        vocab=4, varies=True,
    ),
    "reduced vocabulary and history": Case({"repetition_penalty": 1.5}, {"draft_vocab_size": 2}, vocab=4),
}  # fmt: skip


def deviation(case: Case, chance: Chance | None = None, assistant: Any = None) -> float:
    """How far the emitted law is from the target's own."""
    model = target(case.vocab)
    chance = chance or Chance(case.horizon)
    assistant = assistant or drafter(model, **case.draft)
    got = emitted_law(model, assistant, PROMPT, chance, **case.kwargs)
    assert sum(got.values()) == pytest.approx(1, abs=1e-5)
    if case.varies:
        assert len(chance.verified) > 1, chance.verified
    assert len(chance.accepted) > 1, chance.accepted
    return distance(got, own_law(model, PROMPT, case.horizon, **case.kwargs))


class Remembering(LogitsProcessor):
    """Its bias depends on every call so far, as that of a grammar or a watermark may; calls must follow one text."""

    def __init__(self) -> None:
        self.prefix: list[int] = []
        self.state = 0

    def __call__(self, input_ids, scores):
        prefix = input_ids[0].tolist()
        assert not self.prefix or prefix[:-1] == self.prefix, "the text did not grow by one token"
        self.prefix = prefix
        self.state = (3 * self.state + prefix[-1] + 1) % 5
        return scores + torch.arange(scores.shape[-1]) * (self.state - 2) / 4


@pytest.mark.parametrize("name", ROW_WISE)
def test_at_once(name):
    assert deviation(ROW_WISE[name]) < TOLERANCE


# The heads make no difference to this path.
@pytest.mark.parametrize("name", [name for name in ROW_WISE if not name.endswith("head")])
def test_slot_by_slot(name):
    case = ROW_WISE[name]
    assert deviation(replace(case, call={**case.call, "logits_processor": [Untouched()]})) < TOLERANCE


@pytest.mark.parametrize("name", HISTORY)
def test_processors_that_read_the_text(name):
    assert deviation(HISTORY[name]) < TOLERANCE


def test_processor_with_memory():
    """One call of `generate` per leaf, as such a processor serves one text."""
    model = target()
    kwargs = {"max_new_tokens": 6, "top_k": 2, "logits_processor": lambda: [Remembering()]}
    plain = emitted_law(model, None, PROMPT, Chance(3, batch=1), **{**kwargs, "max_new_tokens": 3})
    got = emitted_law(model, drafter(model), PROMPT, Chance(3, batch=1), **kwargs)
    assert distance(got, plain) < TOLERANCE
    assert distance(plain, own_law(model, PROMPT, 3, max_new_tokens=3)) > 0.05


@pytest.mark.parametrize("name", ["temperature 0.7", "reduced vocabulary", "own confidence", "end in the block"])
@pytest.mark.parametrize("extra", [{}, {"logits_processor": [Untouched()]}], ids=["at once", "slot by slot"])
def test_single_row(name, extra):
    """A batch of one goes through branches of its own."""
    case = replace(ROW_WISE[name], horizon=2)
    case = replace(case, call={**case.call, **extra})
    assert deviation(case, Chance(2, batch=1)) < TOLERANCE


def test_enumeration_of_plain_decoding_is_the_own_law():
    model = target()
    kwargs = {"max_new_tokens": 3, "repetition_penalty": 1.5, "top_k": 2}
    plain = emitted_law(model, None, PROMPT, Chance(3), **kwargs)
    assert distance(plain, own_law(model, PROMPT, 3, **kwargs)) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("extra", [{}, {"repetition_penalty": 1.5}], ids=["at once", "slot by slot"])
@pytest.mark.parametrize("draft", [{}, {"sample_from_anchor": False}, {"draft_vocab_size": 2}], ids=str)
def test_longer_blocks(draft, extra):
    """Three slots, all of whose acceptances count, over thousands of leaves."""
    case = Case({"temperature": 1.5, "survival_threshold": 0.1, **extra}, {"block_size": 3, **draft}, horizon=3)
    assert deviation(replace(case, varies=True)) < 2 * TOLERANCE
