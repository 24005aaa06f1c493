"""A penalty that grows with the text leaves it as it is and does not starve the drafter over 200 tokens.

Catches: a penalty judged on one side only, whose acceptance decays with the text; a penalty dropped to save it.
"""

from __future__ import annotations

from typing import Any

import torch

from dspark.decoding.processors import Processors
from tests.golden import common

from .tiny import close_pair

TOKENS, SPAN = 200, 50
PENALTY = 1.5


def accepted_lengths(model: Any, assistant: Any, ids: torch.Tensor, penalty: float) -> list[tuple[int, int]]:
    """Where each round began, in new tokens, and its accepted length; the text must be that of plain decoding."""
    kwargs = {"do_sample": False, "max_new_tokens": TOKENS, "eos_token_id": None, "repetition_penalty": penalty}
    got = model.generate(ids, assistant_model=assistant, **kwargs)
    assert torch.equal(got, model.generate(ids, **kwargs))
    rounds, start = [], 1
    for accepted in assistant.last_stats.accepted:
        rounds.append((start, accepted + 1))
        start += accepted + 1
    return rounds


def mean(lengths: list[int]) -> float:
    return sum(lengths) / len(lengths)


def test_acceptance_holds_with_a_drafter_that_knows_the_target(monkeypatch):
    model, assistant = close_pair(256, noise=0.0, attention=0.005, block_size=5)
    ids = torch.tensor([[3, 7, 1, 4]])
    rounds = accepted_lengths(model, assistant, ids, PENALTY)
    first = mean([n for start, n in rounds if start < SPAN])
    last = mean([n for start, n in rounds if start >= TOKENS - SPAN])
    assert first > 3
    assert last > first / 2
    monkeypatch.setattr(Processors, "process_draft", lambda self, prefix_ids, logits, *_: logits)
    one_sided = accepted_lengths(model, assistant, ids, PENALTY)
    assert mean([n for _, n in one_sided]) < 0.75 * mean([n for _, n in rounds])


def test_a_trained_drafter_keeps_its_acceptance():
    """Trained on short texts it weakens with length by itself, so it is held to its own run without a penalty."""
    model, assistant = common.target("targets/qwen3_a"), common.drafter("qwen3_vanilla_confmk")
    prompts = common.read("traces", "qwen3_vanilla_confmk")["prompts"][:2]
    late: dict[float, list[int]] = {1.0: [], PENALTY: []}
    for penalty, lengths in late.items():
        for prompt in prompts:
            rounds = accepted_lengths(model, assistant, torch.tensor([prompt["prompt_ids"]]), penalty)
            lengths += [n for start, n in rounds if start >= TOKENS - SPAN]
    assert mean(late[PENALTY]) > 0.75 * mean(late[1.0])
    assert mean(late[PENALTY]) > 1.25
