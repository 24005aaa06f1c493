"""`context_window`: the text stays the target's, and every draft is that of a drafter that cannot see older rows.

Catches: a window that moves positions, that counts padding, that is another for a row in a batch than alone; old rows
of a prompt projected for nothing; memory that grows with the text all the same.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from dspark import BatchDecoder, DSparkDrafter, SpeculationConfig
from dspark.compat import cache_name
from dspark.context_cache import _GROWTH, ContextCache
from dspark.modeling_dspark import DraftBlock, SharedModules
from tests import zoo
from tests.decoding.equality import left_padded, plain
from tests.decoding.test_batches import RowOracle, texts_of
from tests.scripted import CYCLE, Hostile

FULL, SLIDING, RECURRENT = "Llama", "Gemma 3", "Qwen3.5"
LENGTHS, NEW = (3, 9, 17, 30), 40
SLIDES = {"attention_windows": [4, None], "window_rule": "per_slot_all"}
EVERY = (0,)  # all drafts wrong: a block at every position


class Spy(RowOracle):
    """Keeps the unforced logits of every block, and what the context took.

    Attributes:
        blocks: Index of the text and position of the anchor, to base logits `[g, V]`.
        capacity: Most slots of a buffer.
        projected: Columns of hidden states per projection.
    """

    def __init__(self, target: PreTrainedModel, texts: list[list[int]], wrong: Any, **layers: Any) -> None:
        super().__init__(target, texts, [wrong] * len(texts))
        for name, value in layers.items():
            setattr(self.config, name, value)
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():  # far from their initial values, so that the context matters
            torch.nn.init.normal_(parameter, std=0.3, generator=generator)
        self.blocks: dict[tuple[int, int], torch.Tensor] = {}
        self.projected: list[int] = []
        self.capacity = 0

    def project_context(self, target_hidden_states: torch.Tensor) -> torch.Tensor:
        self.projected.append(target_hidden_states.shape[1])
        return super().project_context(target_hidden_states)

    def draft_block(
        self, anchor_ids: torch.Tensor, cache: ContextCache, shared: SharedModules, num_drafts: int | None = None
    ) -> DraftBlock:
        logits = DSparkDrafter.draft_block(self, anchor_ids, cache, shared, num_drafts).base_logits
        for b, anchor in enumerate(anchor_ids.tolist()):
            position = cache.offsets[b] + cache.lengths[b]
            matches = [r for r, t in enumerate(self.texts) if len(t) > position and t[position] == anchor]
            if len(matches) == 1:  # else it may be another text's block
                self.blocks[matches[0], position] = logits[b].clone()
        assert cache.keys[0] is not None
        self.capacity = max(self.capacity, cache.keys[0].shape[2])
        return super().draft_block(anchor_ids, cache, shared, num_drafts)


def spied(
    model: PreTrainedModel, window: int | None, lengths: tuple[int, ...] = (30,), wrong: Any = CYCLE, **more: Any
) -> Spy:
    """A run over the prompts of these lengths, whose texts are the plain ones; `more`: layer fields and arguments."""
    layers = {name: more.pop(name) for name in SLIDES if name in more}
    texts = texts_of(model, lengths, NEW)
    spy = Spy(model, texts, wrong, **layers).eval()
    call = left_padded(*map(zoo.prompt, lengths))
    found = plain(model, NEW, assistant_model=spy, context_window=window, **call, **more).tolist()
    assert [row[-len(text) :] for row, text in zip(found, texts, strict=True)] == texts
    assert (sum(spy.last_stats.accepted) > 0) == (wrong is not EVERY)
    return spy


def farthest(found: Spy, wanted: Spy, text: int = 0) -> float:
    """How far blocks of `found`'s text of this index are from those of the single text of `wanted`, at most."""
    own = {p: block for (r, p), block in found.blocks.items() if r == text}
    common = [(own[p], other) for (_, p), other in wanted.blocks.items() if p in own]
    assert len(common) > 3
    return max(float((block - other).abs().max()) for block, other in common)


@pytest.mark.parametrize("name", [FULL, SLIDING, RECURRENT])
@pytest.mark.parametrize("window", [1, 5, 25])
def test_drafts_are_those_of_a_drafter_that_cannot_see_older_rows(name: str, window: int) -> None:
    """The reference keeps all rows and hides the old ones by masks, those of `attention_windows`."""
    model = zoo.target(name)
    found = spied(model, window)
    hides = {"attention_windows": [window, window], "window_rule": "ctx_from_anchor"}
    assert farthest(found, spied(model, None, **hides)) < 1e-4
    assert farthest(found, spied(model, None)) > 1e-2
    assert found.projected[0] == window


@pytest.mark.parametrize("window", [NEW + 30, 10_000])
def test_a_window_as_long_as_the_text_changes_nothing(window: int) -> None:
    model = zoo.target(FULL)
    found, wanted = spied(model, window), spied(model, None)
    assert farthest(found, wanted) == 0
    assert (found.last_stats.verified, found.projected) == (wanted.last_stats.verified, wanted.projected)


@pytest.mark.parametrize("layers", [{}, SLIDES], ids=["whole", "sliding"])
@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("name", [FULL, SLIDING])
def test_each_row_has_its_own_window(name: str, chunk: int | None, layers: Any, monkeypatch: Any) -> None:
    """Prompts shorter and longer than the window, behind padding, read in passes and slices of any width."""
    monkeypatch.setattr("dspark.decoding.context._SLICE", 4)
    monkeypatch.setattr("dspark.context_cache._GROWTH", 6)
    model = zoo.target(name)
    found = spied(model, 12, LENGTHS, prefill_chunk_size=chunk, **layers)
    monkeypatch.undo()
    for text, length in enumerate(LENGTHS):
        assert farthest(found, spied(model, 12, (length,), EVERY, **layers), text) < 1e-4


def test_a_token_masked_inside_the_prompt_is_no_row_of_the_window() -> None:
    model, ids = zoo.target(FULL), zoo.prompt(30)
    mask = torch.ones_like(ids)
    mask[0, [3, 24, 25]] = 0
    seen = ids[:, mask[0].bool()]
    text = plain(model, NEW, input_ids=seen)[0].tolist()
    spies = [Spy(model, [text], CYCLE).eval() for _ in range(2)]
    plain(model, NEW, input_ids=ids, attention_mask=mask, assistant_model=spies[0], context_window=9)
    plain(model, NEW, input_ids=seen, assistant_model=spies[1], context_window=9)
    assert farthest(*spies) < 1e-4


@pytest.mark.parametrize("chunk", [None, 100])
def test_memory_and_work_of_a_long_text_are_bounded(chunk: int | None) -> None:
    model, window, new = zoo.target(FULL), 64, 1200
    ids = zoo.prompt(1500)
    text = plain(model, new, input_ids=ids)[0].tolist()
    spy = Spy(model, [text], CYCLE).eval()
    found = plain(model, new, input_ids=ids, assistant_model=spy, context_window=window, prefill_chunk_size=chunk)
    assert found[0].tolist() == text
    assert spy.capacity <= window + _GROWTH + spy.config.block_size + _GROWTH
    assert sum(spy.projected[:2]) <= window + spy.config.block_size + 1  # the prompt and the first round
    assert sum(spy.projected) <= window + new


def test_texts_that_join_have_their_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dspark.context_cache._GROWTH", 6)
    model = zoo.target(FULL)
    texts = texts_of(model, LENGTHS, NEW)
    spy = Spy(model, texts, CYCLE).eval()
    with BatchDecoder(model, spy, max_rows=3, speculation=SpeculationConfig(context_window=12)) as decoder:
        order = [3, 0, 2, 1]
        waiting = [zoo.prompt(LENGTHS[text]) for text in order]
        submitted = {decoder.submit(waiting.pop(0), max_new_tokens=NEW, do_sample=False): order[0]}
        found = {}
        while decoder.num_live or decoder.num_waiting:
            found |= {submitted[done.submission]: done.ids[0].tolist() for done in decoder.step()}
            if waiting and len(submitted) < 4:
                text = order[len(submitted)]
                submitted[decoder.submit(waiting.pop(0), max_new_tokens=NEW, do_sample=False)] = text
    assert [found[text] for text in range(4)] == texts
    assert spy.capacity <= 12 + 6 + 7 + 2 * 6
    monkeypatch.undo()
    for text, length in enumerate(LENGTHS):
        assert farthest(spy, spied(model, 12, (length,), EVERY), text) < 1e-4


@pytest.mark.parametrize(("window", "passes"), [(5, 0), (6, 1), (None, 1)])
def test_a_cached_prefix_is_forwarded_again_only_for_rows_in_the_window(window: int | None, passes: int) -> None:
    """25 of 30 tokens are in the caller's cache: what the window does not reach needs no states."""
    model, ids = zoo.target(FULL), zoo.prompt(30)
    texts = texts_of(model, (30,), NEW)
    cache = DynamicCache(config=model.config)
    model(ids[:, :25], **{cache_name(model): cache}, use_cache=True)
    spy = Spy(model, texts, CYCLE).eval()
    call = {"input_ids": ids, cache_name(model): cache, "context_window": window}
    assert plain(model, NEW, assistant_model=spy, **call).tolist() == texts
    stats = spy.last_stats
    assert stats.num_target_passes == stats.num_rounds + 1 + passes
    assert (stats.fallback_reason is not None) == bool(passes)
    assert farthest(spy, spied(model, window)) < 1e-4


@pytest.mark.parametrize(
    "settings", [SpeculationConfig("auto", context_window=8), SpeculationConfig(context_window=1)]
)
def test_noise_drafts_change_nothing(settings: SpeculationConfig) -> None:
    model = zoo.target(FULL)
    call = left_padded(*map(zoo.prompt, LENGTHS))
    expected = plain(model, NEW, **call)
    assert (
        plain(model, NEW, assistant_model=Hostile(model), speculation=settings, **call).tolist() == expected.tolist()
    )


def test_context_keys_have_the_drafters_dtype() -> None:
    """A drafter in bfloat16 beside a target in float32 keeps its context in bfloat16."""
    model, kept = zoo.target(FULL), []

    class Watched(Hostile):
        def draft_block(self, anchor_ids: torch.Tensor, cache: ContextCache, *more: Any) -> DraftBlock:
            kept.extend([*cache.keys, *cache.values])
            return super().draft_block(anchor_ids, cache, *more)

    drafter = Watched(model).to(torch.bfloat16).eval()
    expected = plain(model, 10, input_ids=zoo.prompt(30))
    assert torch.equal(plain(model, 10, input_ids=zoo.prompt(30), assistant_model=drafter), expected)
    assert {states.dtype for states in kept} == {torch.bfloat16}
