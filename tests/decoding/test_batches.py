"""Several rows at once: each row is as if it were alone, whatever the others accept and whenever they end.

Catches faults of ragged positions, of windows told by slots, of row selection in both caches, and of padding of
finished rows. How a pass over rows is made is in `test_ragged_forms.py`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, TextStreamer

from dspark import SpeculationConfig
from dspark.compat import cache_name
from dspark.context_cache import ContextCache
from dspark.modeling_dspark import DraftBlock, SharedModules
from dspark.target import text_config
from tests import zoo
from tests.decoding.equality import left_padded, plain, refused
from tests.scripted import CYCLE, Hostile, Oracle

NEW = 48
LENGTHS = (3, 9, 17, 30)
PROMPTS = [zoo.prompt(length) for length in LENGTHS]
WRONG = [[0], [3], [6], [None]]
THRESHOLD = SpeculationConfig(assistant_confidence_threshold=0.25)
SETTINGS = [THRESHOLD, *(SpeculationConfig(policy) for policy in ("fixed", "scheduled", "async", "auto"))]


class RowOracle(Oracle):
    """An oracle for rows that end at different times: it knows a row by its anchor's position and token.

    Its confidences are noise, so that with `THRESHOLD` rows and rounds verify any number of drafts.

    Attributes:
        live: Rows of each block, in order of the rounds.
    """

    def __init__(self, target: PreTrainedModel, texts: list[list[int]], wrong: Any) -> None:
        super().__init__(target, texts, wrong)
        self.live: list[int] = []
        self._anchors: list[int] = []
        self._noise = torch.Generator().manual_seed(0)

    def draft_block(
        self, anchor_ids: torch.Tensor, cache: ContextCache, shared: SharedModules, num_drafts: int | None = None
    ) -> DraftBlock:
        self._anchors = anchor_ids.tolist()
        self.live.append(len(self._anchors))
        return super().draft_block(anchor_ids, cache, shared, num_drafts)

    def confidence_logits(self, hidden: torch.Tensor, previous_ids: torch.Tensor) -> torch.Tensor:
        return torch.randn(previous_ids.shape, generator=self._noise)

    def forced_tokens(self, b: int, position: int) -> list[int]:
        matches = [r for r, t in enumerate(self.texts) if len(t) > position and t[position] == self._anchors[b]]
        assert matches, "no row has this anchor at this position: context and text have come apart"
        return super().forced_tokens(matches[0], position)


@lru_cache
def texts_of(model: PreTrainedModel, lengths: tuple[int, ...] = LENGTHS, new: int = NEW) -> list[list[int]]:
    """Each prompt's text when it is alone."""
    return [plain(model, new, input_ids=zoo.prompt(length))[0].tolist() for length in lengths]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("wrong", [WRONG, [CYCLE] * 4, [[None], [None], [None], [0]]])
def test_each_row_is_as_if_alone(attention: str, wrong: Any) -> None:
    model = zoo.target("Qwen3", attention)
    texts = texts_of(model)
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


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: settings.policy)
@pytest.mark.parametrize("name", ["Llama", "Gemma 3", "Gemma 4 (shared keys)"])
@pytest.mark.parametrize("rows", [2, 3, 8, 17])
def test_batches_of_every_size(rows: int, name: str, settings: SpeculationConfig) -> None:
    """Every accept length in another order per row, short prompts beside ones far beyond a window."""
    if reason := zoo.TARGETS[name].absent:
        pytest.skip(reason)
    model = zoo.target(name)
    lengths = tuple(2 + 5 * row % 37 for row in range(rows))
    texts = texts_of(model, lengths, 30)
    oracle = RowOracle(model, texts, [CYCLE[row % 10 :] + CYCLE[: row % 10] for row in range(rows)])
    call = left_padded(*map(zoo.prompt, lengths))
    found = plain(model, 30, assistant_model=oracle, speculation=settings, **call)
    assert [row[-len(text) :] for row, text in zip(found.tolist(), texts, strict=True)] == texts
    assert settings.policy != "threshold" or len(set(oracle.last_stats.verified)) > 4


@pytest.mark.parametrize("name", ["Llama", "Mistral", "MPT (ALiBi)"])
def test_a_fast_row_beside_a_slow_one(name: str) -> None:
    """A row that accepts everything beside one that accepts nothing: their lengths drift far apart."""
    model = zoo.target(name)
    lengths = (5, 8)
    texts = texts_of(model, lengths, 80)
    call = left_padded(*map(zoo.prompt, lengths))
    found = plain(model, 80, assistant_model=RowOracle(model, texts, [[None], [0]]), **call)
    assert [row[-len(text) :] for row, text in zip(found.tolist(), texts, strict=True)] == texts


@pytest.mark.parametrize("wrong", [WRONG, [CYCLE] * 4])
def test_rows_that_end_at_different_times(wrong: Any) -> None:
    """EOS inside a block, as a bonus and late: the rest is padding, and a finished row costs nothing more."""
    model = zoo.target("Llama")
    texts = texts_of(model)
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
    texts = texts_of(model)
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
    texts = texts_of(model)
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
    oracle = RowOracle(model, texts_of(model), WRONG)
    plain(model, NEW, assistant_model=oracle, **call)
    stats = oracle.last_stats
    assert stats.num_rows == 4
    assert stats.num_new_tokens == 4 * NEW
    # The last rounds have no room for a draft, and so no block.
    assert 0 <= stats.num_target_passes - 1 - len(oracle.live) <= 2


@pytest.mark.parametrize("name", ["Qwen3.5", "LFM2", "Mamba 2"])
@pytest.mark.parametrize("cache", [None, "static"])
def test_recurrent_targets_take_one_row(name: str, cache: str | None) -> None:
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
def test_an_offloaded_cache_takes_one_row(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would go on in a cache that stays on the device."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch, "Stream", lambda: None)
    model = zoo.target(name)
    with refused(model, "offloaded cache", "batch of 2", "row by row"):
        call = left_padded(zoo.prompt(3), zoo.prompt(4))
        plain(model, 2, assistant_model=Hostile(model), cache_implementation="offloaded", **call)


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
