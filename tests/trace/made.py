"""Traces made by hand: any length, any texts, every kind of round."""

from __future__ import annotations

import random
from typing import Any

from dspark.round_trace import Candidate, Rejection, RoundTrace, RowTrace
from dspark.stats import STEPS
from dspark.trace import Trace

BLOCK = 7
WORDS = [
    "",
    " the",
    " a",
    "\n",
    "\n\n",
    "x\n  y",
    " über",
    "日本",
    "\t",
    " 🙂",
    "\\xe2\\x82",
    " long" * 6,
    "<|im_end|>",
]


def trace(num_tokens: int = 60, *, seed: int = 0, texts: list[str] | None = None, **fields: Any) -> Trace:
    """A valid trace of exactly so many tokens whose ids cycle through `texts`; rounds of every kind come up."""
    draw = random.Random(seed)
    words = WORDS if texts is None else texts
    row = RowTrace(draw.randrange(len(words)), 0.5)
    while (left := num_tokens - len(row.token_ids())) > 0:
        row.rounds.append(_round(draw, len(row.token_ids()) - 1, len(words), left))
    made = {
        "target": "some-target",
        "drafter": "some-drafter",
        "settings": {
            "policy": "threshold",
            "confidence threshold": 0.5,
            "temperature": 0.0,
            "seed": None,
            "packed": True,
        },
        "prompt_ids": [0, 1],
        "texts": dict(enumerate(words)),
        "text": "".join(words[token] for token in row.token_ids()),
        "prefill_seconds": 0.25,
        "row": row,
        "made_by": {"dspark": "0.0.0"},
    }
    return Trace(**{**made, **fields})


def _round(draw: random.Random, anchor: int, num_ids: int, left: int) -> RoundTrace:
    size = draw.choice([0, 3, BLOCK, BLOCK, BLOCK]) if left > 1 else 0
    drafts = [draw.randrange(num_ids) for _ in range(size)]
    verified = min(draw.randint(0, size), left - 1)
    accepted = draw.randint(0, verified)
    ends = accepted == left - 1 and accepted > 0 and draw.random() < 0.5
    if ends:
        verified = accepted
    emitted = drafts[:accepted] + ([] if ends else [draw.randrange(num_ids)])
    confidence = [round(draw.random(), 3) for _ in drafts]
    survival = []
    for own in confidence:
        survival.append(round(own * (survival[-1] if survival else 1.0), 4))
    sampled = draw.random() < 0.5
    return RoundTrace(
        anchor=anchor,
        draft_ids=drafts,
        base_probs=[round(draw.random(), 3) for _ in drafts],
        head_probs=[round(draw.random(), 3) for _ in drafts],
        draft_probs=[round(draw.random(), 3) for _ in drafts] if sampled else None,
        confidence=confidence if drafts else None,
        survival=survival if drafts else None,
        num_verified=verified,
        num_accepted=accepted,
        emitted_ids=emitted,
        emitted_probs=[round(draw.random(), 3) for _ in emitted],
        rejection=_rejection(draw, num_ids) if accepted < verified else None,
        step_seconds={name: round(draw.random() / 100, 5) for name in STEPS},
        model_seconds={"target": 0.01, "drafter": 0.002},
    )


def _rejection(draw: random.Random, num_ids: int) -> Rejection:
    def law() -> list[Candidate]:
        probs = sorted((round(draw.random() / 5, 4) for _ in range(draw.randint(1, 5))), reverse=True)
        return [Candidate(draw.randrange(num_ids), prob) for prob in probs]

    return Rejection(round(draw.random(), 3), law(), law(), law())
