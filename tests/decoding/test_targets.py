"""One test per cell of `tests.zoo.SUPPORT`: exact cells give plain generate's ids, refused ones say so before any pass.

Catches per-family faults of position ids, masks, hidden-state taps, logits kept, cache rollback and state replay.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from dspark.compat import cache_length, cache_name
from dspark.target import text_config
from tests import zoo
from tests.decoding.equality import assert_same_text, left_padded, plain, refused
from tests.scripted import CYCLE, Hostile, Oracle


def _text(name: str, model: PreTrainedModel, lengths: tuple[int, ...]) -> None:
    seen: set[int] = set()
    for length in lengths:
        call = zoo.inputs(name, length)
        oracle = assert_same_text(model, call["input_ids"], 40, **call)
        seen.update(oracle.texts[0][length:])
    assert len(seen) >= 10, "the texts repeat themselves: they would agree with any mistake"
    expected = plain(model, 24, **call)
    assert plain(model, 24, assistant_model=Hostile(model), **call).tolist() == expected.tolist()


def greedy(name: str) -> None:
    """Prompts of 1, 2, 3 and 30 tokens, every accept length, and a hostile drafter."""
    _text(name, zoo.target(name), (1, 2, 3, 30))


def eager(name: str) -> None:
    """The same with the other attention implementation."""
    _text(name, zoo.target(name, "eager"), (2, 30))


def left_padding(name: str) -> None:
    """A prompt behind padding."""
    ids = zoo.prompt(9)
    assert_same_text(zoo.target(name), ids, 24, **left_padded(ids, width=14))


def chunked_prefill(name: str) -> None:
    """A prompt read in chunks that do not divide it."""
    ids = zoo.prompt(12)
    assert_same_text(zoo.target(name), ids, 24, input_ids=ids, prefill_chunk_size=5)


def embeds(name: str) -> None:
    """A prompt given as embeddings only: the ids returned are the new ones."""
    model, ids = zoo.target(name), zoo.prompt(9)
    with torch.no_grad():
        states = model.get_input_embeddings()(ids)
    assert_same_text(model, ids, 24, inputs_embeds=states)


def own_cache(name: str) -> None:
    """Two turns on the caller's cache: the second is exact, and so is a plain third one behind it."""
    model, ids = zoo.target(name), zoo.prompt(9)
    key = cache_name(model)
    cache = DynamicCache(config=text_config(model))
    turn = torch.cat([plain(model, 6, input_ids=ids, **{key: cache}), zoo.prompt(5)], dim=1)
    caches = {False: copy.deepcopy(cache), True: cache}
    texts = {}
    for is_drafted, own in caches.items():
        oracle = Oracle(model, [texts[False]], CYCLE) if is_drafted else None
        texts[is_drafted] = plain(model, 24, input_ids=turn, assistant_model=oracle, **{key: own})[0].tolist()
    assert texts[True] == texts[False]
    assert cache_length(caches[True]) == cache_length(caches[False])
    third = torch.cat([torch.tensor([texts[False]]), zoo.prompt(4)], dim=1)
    after = {kind: plain(model, 12, input_ids=third, **{key: own}).tolist() for kind, own in caches.items()}
    assert after[True] == after[False]


def static_cache(name: str) -> None:
    """A cache of fixed size."""
    ids = zoo.prompt(9)
    assert_same_text(zoo.target(name), ids, 24, input_ids=ids, cache_implementation="static")


def batch(name: str) -> None:
    """Rows of 3, 9, 17 and 30 tokens that accept very different numbers of drafts: each as if it were alone."""
    model = zoo.target(name)
    prompts = [zoo.prompt(length) for length in (3, 9, 17, 30)]
    rows = [plain(model, 40, input_ids=ids)[0].tolist() for ids in prompts]
    call = left_padded(*prompts)
    expected = plain(model, 40, **call)
    found = plain(model, 40, assistant_model=Oracle(model, rows, [[0], [3], [6], CYCLE]), **call)
    assert found.tolist() == expected.tolist()
    for row, text in zip(found.tolist(), rows, strict=True):
        assert row[-len(text) :] == text


CHECKS: dict[str, Callable[[str], None]] = {
    "greedy": greedy,
    "eager attention": eager,
    "left padding": left_padding,
    "chunked prefill": chunked_prefill,
    "inputs_embeds": embeds,
    "own cache": own_cache,
    "static cache": static_cache,
    "batch": batch,
}


def test_every_column_has_a_check() -> None:
    assert list(CHECKS) == list(zoo.COLUMNS)
    assert {row.target for row in zoo.SUPPORT} == set(zoo.TARGETS)


@pytest.mark.parametrize(
    ("name", "column"),
    [
        pytest.param(row.target, column, id=f"{row.target}-{column}".replace(" ", "_"))
        for row in zoo.SUPPORT
        for column, cell in row.cells().items()
        if cell.verdict != zoo.NOT_OFFERED
    ],
)
def test_cell(name: str, column: str) -> None:
    cell = zoo.row(name).cells()[column]
    if reason := zoo.TARGETS[name].absent or cell.absent:
        pytest.skip(reason)
    if cell.verdict == zoo.EXACT:
        CHECKS[column](name)
        return
    with refused(zoo.target(name), cell.says):
        CHECKS[column](name)
