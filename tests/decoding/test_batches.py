"""Several rows at once: each row is as if it were alone, whatever the others accept and whenever they end.

Catches faults of ragged positions, holes, compaction, row selection in both caches, and padding of finished rows.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, TextStreamer

from dspark.compat import cache_name
from dspark.context_cache import ContextCache
from dspark.decoding.session import TargetSession
from dspark.modeling_dspark import DraftBlock, SharedModules
from dspark.target import text_config
from tests import zoo
from tests.decoding.equality import left_padded, plain, refused
from tests.scripted import CYCLE, Hostile, Oracle

NEW = 48
LENGTHS = (3, 9, 17, 30)
PROMPTS = [zoo.prompt(length) for length in LENGTHS]
WRONG = [[0], [3], [6], [None]]


class RowOracle(Oracle):
    """An oracle for rows that end at different times: it knows a row by its anchor's position and token.

    Attributes:
        live: Rows of each block, in order of the rounds.
    """

    def __init__(self, target: PreTrainedModel, texts: list[list[int]], wrong: Any) -> None:
        super().__init__(target, texts, wrong)
        self.live: list[int] = []
        self._anchors: list[int] = []

    def draft_block(self, anchor_ids: torch.Tensor, cache: ContextCache, shared: SharedModules) -> DraftBlock:
        self._anchors = anchor_ids.tolist()
        self.live.append(len(self._anchors))
        return super().draft_block(anchor_ids, cache, shared)

    def forced_tokens(self, b: int, position: int) -> list[int]:
        matches = [r for r, t in enumerate(self.texts) if len(t) > position and t[position] == self._anchors[b]]
        assert matches, "no row has this anchor at this position: context and text have come apart"
        return super().forced_tokens(matches[0], position)


@lru_cache
def _texts(model: PreTrainedModel, lengths: tuple[int, ...] = LENGTHS, new: int = NEW) -> list[list[int]]:
    """Each prompt's text when it is alone."""
    return [plain(model, new, input_ids=zoo.prompt(length))[0].tolist() for length in lengths]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("wrong", [WRONG, [CYCLE] * 4, [[None], [None], [None], [0]]])
def test_each_row_is_as_if_alone(attention: str, wrong: Any) -> None:
    model = zoo.target("Qwen3", attention)
    texts = _texts(model)
    found = plain(model, NEW, assistant_model=RowOracle(model, texts, wrong), **left_padded(*PROMPTS))
    assert [row[-len(text) :] for row, text in zip(found.tolist(), texts, strict=True)] == texts


@pytest.mark.parametrize("form", [torch.Tensor.float, torch.Tensor.half, torch.Tensor.bool, lambda mask: mask * 2])
@pytest.mark.parametrize("rows", [1, 4])
def test_a_mask_may_have_any_dtype_and_values(form: Any, rows: int) -> None:
    """A mask says where padding is, in whatever numbers plain decoding takes."""
    model = zoo.target("Llama")
    call = {name: value[:rows] for name, value in left_padded(*PROMPTS).items()}
    call["attention_mask"] = form(call["attention_mask"])
    expected = plain(model, 20, **call)
    assert plain(model, 20, assistant_model=Hostile(model), **call).tolist() == expected.tolist()


@pytest.mark.parametrize("name", ["Llama", "GPT-2", "MPT (ALiBi)"])
def test_a_hostile_drafter_changes_no_row(name: str) -> None:
    model = zoo.target(name)
    call = left_padded(*PROMPTS)
    expected = plain(model, 20, **call)
    assert plain(model, 20, assistant_model=Hostile(model), **call).tolist() == expected.tolist()


@pytest.mark.parametrize("name", ["Llama", "MPT (ALiBi)"])
def test_holes_are_compacted_and_nothing_changes(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A row that accepts everything beside one that accepts nothing: most slots of the latter would be holes."""
    shrunk = []
    compact = TargetSession._compact

    def spy(session: TargetSession) -> None:
        before = session._cached
        compact(session)
        shrunk.append(before - session._cached)
        if session._mask is not None:
            assert session._mask.shape[1] == session._cached == session._rollback.cache.get_seq_length()

    monkeypatch.setattr(TargetSession, "_compact", spy)
    model = zoo.target(name)
    lengths = (5, 8)
    texts = _texts(model, lengths, 80)
    call = left_padded(*map(zoo.prompt, lengths))
    found = plain(model, 80, assistant_model=RowOracle(model, texts, [[None], [0]]), **call)
    assert [row[-len(text) :] for row, text in zip(found.tolist(), texts, strict=True)] == texts
    assert sum(shrunk) > 30


@pytest.mark.parametrize("wrong", [WRONG, [CYCLE] * 4])
def test_rows_that_end_at_different_times(wrong: Any) -> None:
    """EOS inside a block, as a bonus and late: the rest is padding, and a finished row costs nothing more."""
    model = zoo.target("Llama")
    texts = _texts(model)
    call = left_padded(*PROMPTS)
    # Each row's own token at another place, so that every row ends, in different rounds.
    stops = [text[length + at] for text, length, at in zip(texts, LENGTHS, (2, 13, 7, 30), strict=True)]
    call.update(eos_token_id=stops, pad_token_id=0)
    expected = plain(model, NEW, **call)
    oracle = RowOracle(model, texts, wrong)
    assert plain(model, NEW, assistant_model=oracle, **call).tolist() == expected.tolist()
    assert oracle.live == sorted(oracle.live, reverse=True)
    assert oracle.live[-1] < 4


def test_the_first_token_can_end_a_row() -> None:
    model = zoo.target("Llama")
    texts = _texts(model)
    call = left_padded(*PROMPTS)
    stop = texts[1][LENGTHS[1]]
    expected = plain(model, 20, eos_token_id=stop, pad_token_id=7, **call)
    oracle = RowOracle(model, texts, [CYCLE] * 4)
    found = plain(model, 20, eos_token_id=stop, pad_token_id=7, assistant_model=oracle, **call)
    assert found.tolist() == expected.tolist()
    assert max(oracle.live) < 4


@pytest.mark.parametrize("new", [1, 2, 7, 8, 9])
def test_a_batch_ends_at_the_length_limit(new: int) -> None:
    model = zoo.target("Llama")
    texts = _texts(model)
    call = left_padded(*PROMPTS)
    expected = plain(model, new, **call)
    assert plain(model, new, assistant_model=RowOracle(model, texts, WRONG), **call).tolist() == expected.tolist()


def test_several_sequences_of_one_prompt() -> None:
    model, ids = zoo.target("Llama"), zoo.prompt(6)

    def sample(seed: int) -> list[list[int]]:
        torch.manual_seed(seed)
        options = {"do_sample": True, "temperature": 2.0, "top_k": 20, "num_return_sequences": 3}
        return model.generate(ids, max_new_tokens=20, assistant_model=Hostile(model, seed=1), **options).tolist()

    rows = sample(0)
    assert len({tuple(row) for row in rows}) == 3
    assert all(row[:6] == ids[0].tolist() and len(row) == 26 and max(row) < zoo.VOCAB for row in rows)
    assert sample(0) == rows
    assert sample(1) != rows


def test_statistics_count_every_row() -> None:
    model = zoo.target("Llama")
    call = left_padded(*PROMPTS)
    oracle = RowOracle(model, _texts(model), WRONG)
    plain(model, NEW, assistant_model=oracle, **call)
    stats = oracle.last_stats
    assert stats.num_rows == 4
    assert stats.num_new_tokens == 4 * NEW
    # The last rounds have no room for a draft, and so no block.
    assert 0 <= stats.num_target_passes - 1 - len(oracle.live) <= 2


@pytest.mark.parametrize("name", ["Mistral", "Gemma 3", "Qwen3.5", "LFM2", "Mamba 2"])
@pytest.mark.parametrize("cache", [None, "static"])
def test_sliding_and_recurrent_targets_take_one_row(name: str, cache: str | None) -> None:
    model = zoo.target(name)
    call = left_padded(zoo.prompt(3), zoo.prompt(4))
    with refused(model, type(model).__name__):
        plain(model, 2, assistant_model=Hostile(model), cache_implementation=cache, **call)


def test_a_static_cache_takes_one_row() -> None:
    model = zoo.target("Llama")
    with refused(model, "Batches of 2 rows", "StaticLayer", "row by row"):
        call = left_padded(zoo.prompt(3), zoo.prompt(4))
        plain(model, 2, assistant_model=Hostile(model), cache_implementation="static", **call)


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_a_callers_cache_takes_one_row(name: str) -> None:
    """A cache without a config does not say that its target slides, and rows leave holes in it."""
    model = zoo.target(name)
    for cache in (DynamicCache(), DynamicCache(config=text_config(model))):
        with refused(model, "batch of 2 rows", "cache"):
            call = left_padded(zoo.prompt(3), zoo.prompt(4))
            plain(model, 2, assistant_model=Hostile(model), **{cache_name(model): cache}, **call)


class _Words:
    """A tokenizer that spells ids."""

    def decode(self, ids: Any, **kwargs: Any) -> str:
        return " ".join(map(str, ids))


def test_a_streamer_takes_one_row() -> None:
    model = zoo.target("Llama")
    with pytest.raises(ValueError, match="batch"):
        plain(
            model,
            2,
            assistant_model=Hostile(model),
            streamer=TextStreamer(_Words()),
            **left_padded(zoo.prompt(3), zoo.prompt(4)),
        )
