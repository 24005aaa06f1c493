"""One test per cell of `tests.zoo.SUPPORT`: exact cells give plain generate's ids, refused ones say so first.

Catches per-family faults of position ids, masks, hidden-state taps, logits kept, cache rollback and state replay.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from dspark.compat import cache_length, cache_name
from dspark.target import text_config
from tests import zoo
from tests.decoding.equality import assert_same_text, left_padded, plain, refused
from tests.scripted import CYCLE, Hostile, Oracle

ROWS = (3, 9, 17, 30)


def model_of(name: str, column: str) -> PreTrainedModel:
    return zoo.target(name, column if column in ("sdpa", "eager") else None)


def call_of(name: str, column: str, model: PreTrainedModel) -> dict[str, Any]:
    """Arguments of `generate` that stand for a column."""
    ids = zoo.prompt(9)
    if column == "left padding":
        return left_padded(ids, width=14)
    if column == "chunked prefill":
        return {"input_ids": ids, "prefill_chunk_size": 5}
    if column == "inputs_embeds":
        with torch.no_grad():
            return {"inputs_embeds": model.get_input_embeddings()(ids)}
    if column == "own cache":
        cache = {cache_name(model): DynamicCache(config=text_config(model))}
        return {"input_ids": torch.cat([plain(model, 6, input_ids=ids, **cache), zoo.prompt(5)], dim=1), **cache}
    if column == "static cache":
        return {"input_ids": ids, "cache_implementation": "static"}
    if column == "batch":
        return left_padded(*map(zoo.prompt, ROWS))
    return zoo.inputs(name, 30)


def check_text(name: str, model: PreTrainedModel, lengths: tuple[int, ...]) -> None:
    """Every accept length behind prompts of these lengths, and a hostile drafter behind the last."""
    seen: set[int] = set()
    for length in lengths:
        call = zoo.inputs(name, length)
        oracle = assert_same_text(model, call["input_ids"], 40, **call)
        seen.update(oracle.texts[0][length:])
    assert len(seen) >= 10, "the texts repeat themselves: they would agree with any mistake"
    expected = plain(model, 24, **call)
    assert plain(model, 24, assistant_model=Hostile(model), **call).tolist() == expected.tolist()


def check_own_cache(model: PreTrainedModel, input_ids: torch.Tensor, **cache: Any) -> None:
    """A turn on a half-filled cache leaves it so that a plain turn behind it is as after a plain turn."""
    ours, theirs = cache, copy.deepcopy(cache)
    text = plain(model, 24, input_ids=input_ids, **theirs)
    found = plain(model, 24, input_ids=input_ids, assistant_model=Oracle(model, text.tolist(), CYCLE), **ours)
    assert found.tolist() == text.tolist()
    third = torch.cat([text, zoo.prompt(4)], dim=1)
    (one,), (other,) = ours.values(), theirs.values()
    assert cache_length(one) == cache_length(other)
    after = [plain(model, 12, input_ids=third, **turn).tolist() for turn in (ours, theirs)]
    assert after[0] == after[1]


def check_batch(model: PreTrainedModel, **call: Any) -> None:
    """Rows that accept very different numbers of drafts, each as if it were alone."""
    texts = [plain(model, 40, input_ids=zoo.prompt(length))[0].tolist() for length in ROWS]
    expected = plain(model, 40, **call)
    found = plain(model, 40, assistant_model=Oracle(model, texts, [[0], [3], [6], CYCLE]), **call)
    assert found.tolist() == expected.tolist()
    assert [row[-len(text) :] for row, text in zip(found.tolist(), texts, strict=True)] == texts


def check_exact(name: str, column: str) -> None:
    model = model_of(name, column)
    if column in ("sdpa", "eager"):
        is_main = zoo.TARGETS[name].attention[0] == column
        check_text(name, model, (1, 2, 3, 30) if is_main else (2, 30))
        return
    call = call_of(name, column, model)
    if column == "own cache":
        check_own_cache(model, **call)
    elif column == "batch":
        check_batch(model, **call)
    else:
        assert_same_text(model, zoo.prompt(9), 24, **call)


def test_the_table_has_every_target() -> None:
    assert [row.target for row in zoo.SUPPORT] == list(zoo.TARGETS)
    assert zoo.markdown().count("\n| ") == len(zoo.TARGETS)


@pytest.mark.parametrize(
    ("row", "column"),
    [pytest.param(row, column, id=f"{row.target}, {column}") for row in zoo.SUPPORT for column in zoo.COLUMNS],
)
def test_cell(row: zoo.Row, column: str) -> None:
    name, cell = row.target, row.cells[column]
    if reason := zoo.TARGETS[name].absent or cell.skipped:
        pytest.skip(reason)
    if cell.verdict == zoo.EXACT:
        check_exact(name, column)
    elif cell.verdict == zoo.NOT_OFFERED:
        with pytest.raises((ValueError, RuntimeError, AttributeError)):
            model = model_of(name, column)
            plain(model, 24, **call_of(name, column, model))
    else:
        model = model_of(name, column)
        call = call_of(name, column, model)
        with refused(model, cell.says, type(model).__name__ if column != "static cache" else ""):
            plain(model, 24, assistant_model=Hostile(model), **call)
