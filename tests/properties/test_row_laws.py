"""Every row of a sampled batch has the target's law, with generators of its own too, when rows verify ragged blocks.

Catches rows that share numbers, a stream used for drafts and for verdicts, laws read at a neighbour's place when rows
are one flattened sequence. The same check fails on one number for drafts and verdicts.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dspark import SpeculationConfig
from dspark.decoding import draws
from dspark.decoding.draws import Draws
from dspark.decoding.ragged_batch import RaggedBatch

from .test_sampled_law import CAUGHT, PASSES, PROMPT, TOKENS, expected, p_value
from .tiny import close_pair

ROWS = 3
RAGGED = SpeculationConfig(survival_threshold=0.4)


def sample(calls: int, rows: int = ROWS, *, is_seeded: bool = False) -> torch.Tensor:
    """First `TOKENS` new tokens, int64 `[calls, rows, TOKENS]`, blocks cut by a confidence."""
    model, drafter = close_pair()
    texts = []
    for call in range(calls):
        torch.manual_seed(call)
        seeded = [torch.Generator().manual_seed(call * rows + row) for row in range(rows)] if is_seeded else None
        out = model.generate(
            PROMPT, assistant_model=drafter, do_sample=True, temperature=0.9, top_k=0, max_new_tokens=TOKENS + 1,
            num_return_sequences=rows, speculation=RAGGED, row_generators=seeded,
        )  # fmt: skip
        texts.append(out[:, PROMPT.shape[1] : PROMPT.shape[1] + TOKENS])
    return torch.stack(texts)


def test_each_of_three_sequences_has_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    forms = []
    run_pass = RaggedBatch._pass
    monkeypatch.setattr(
        RaggedBatch, "_pass", lambda self, blocks, form, run: forms.append(form) or run_pass(self, blocks, form, run)
    )
    texts = sample(400)
    for row in texts.unbind(1):
        assert p_value(row[:, 1:2], expected().sum((0, 2))) > PASSES / ROWS
        assert p_value(row[:, 2:], expected().sum((0, 1))) > PASSES / ROWS
    assert p_value(texts.flatten(0, 1)[:, 1:], expected().sum(0)) > PASSES
    assert forms.count("flattened") > 100


def test_rows_with_generators_of_their_own_have_the_law() -> None:
    texts = sample(20, 500, is_seeded=True)
    assert p_value(texts.flatten(0, 1), expected()) > PASSES
    pairs = texts[:, :, 1].reshape(-1, 2)
    one = expected().sum((0, 2))
    assert p_value(pairs, one[:, None] * one) > PASSES, "rows draw apart"


def test_one_stream_for_drafts_and_verdicts_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children with equal seeds: the number that drew a draft also decides whether it stays."""

    def start(self: Draws, generators: Any = None) -> None:
        self._drafts = [torch.Generator().manual_seed(g.initial_seed()) for g in generators]
        self._verdicts = [torch.Generator().manual_seed(g.initial_seed()) for g in generators]

    monkeypatch.setattr(draws.Draws, "__init__", start)
    assert p_value(sample(10, 500, is_seeded=True).flatten(0, 1), expected()) < CAUGHT
