"""Drafters that are sure of themselves, right or wrong, change nothing about the law of sampled text.

Their law is one-hot: a token they draft is kept with the target's own probability. Catches: a first draft that is
never checked, a residual that keeps the refused token, a softmax in place of the one-hot law.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dspark import DSparkDrafter
from tests.scripted import Hostile, Oracle

from .enumeration import Chance, distance, emitted_law
from .test_exact_law import PROMPT, TOLERANCE
from .tiny import own_law, target

HORIZON = 3
CALLS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 0.7},
    "top-k": {"top_k": 2},
    "penalty": {"repetition_penalty": 1.5},
    "end in the block": {"eos_token_id": 1, "temperature": 1.5},
}


def scripted(name: str) -> DSparkDrafter:
    """A new one for every replay: they count rounds."""
    model = target()
    if name.startswith("hostile"):
        return Hostile(model, seed=int(name[-1]), block_size=3, enable_confidence_head=False).eval()
    text = model.generate(PROMPT, do_sample=False, max_new_tokens=12)[0].tolist()
    wrong = {"right": (None,), "wrong at once": (0,), "wrong later": (1, 0, 2)}[name]
    return Oracle(model, [text], wrong=wrong, block_size=3, enable_confidence_head=False).eval()


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("right", "top-k"),
        ("right", "penalty"),
        ("wrong at once", "plain"),
        ("wrong later", "plain"),
        ("wrong later", "end in the block"),
        ("hostile 0", "plain"),
        ("hostile 1", "top-k"),
        ("hostile 2", "penalty"),
        ("hostile 3", "end in the block"),
    ],
)
def test_law_is_the_target_s_own(name, call):
    model, kwargs = target(), {"max_new_tokens": HORIZON + 4, **CALLS[call]}
    got = emitted_law(model, lambda: scripted(name), PROMPT, Chance(HORIZON, batch=1), **kwargs)
    assert distance(got, own_law(model, PROMPT, HORIZON, **kwargs)) < TOLERANCE


def test_samples_do_not_repeat_what_a_hostile_drafter_says():
    model = target(12)
    hostile = Hostile(model, block_size=3, enable_confidence_head=False).eval()
    prompt = torch.tensor([[3, 7, 1, 4]])
    torch.manual_seed(0)
    texts = model.generate(prompt, assistant_model=hostile, do_sample=True, max_new_tokens=8, num_return_sequences=64)
    assert len({tuple(text) for text in texts.tolist()}) > 32
    assert hostile.last_stats.draft_acceptance_rate < 0.3
