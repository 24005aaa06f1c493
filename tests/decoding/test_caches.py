"""Caches on a full-attention, a sliding and a recurrent target: exact and usable afterwards, or refused first.

Also the drafter's own context cache, held to a stateless recomputation round by round: a rewind off by one, a row kept
twice or a padded row lowers acceptance without any error.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import DynamicLayer

from dspark import DSparkDrafter
from dspark.compat import cache_length, cache_name
from dspark.context_cache import ContextCache
from dspark.decoding.capture import HiddenStateCapture
from dspark.modeling_dspark import DraftBlock, SharedModules
from dspark.target import text_config
from tests import zoo
from tests.decoding.equality import assert_same_text, left_padded, plain, refused
from tests.scripted import CYCLE, Hostile, Oracle

FULL, SLIDING, RECURRENT = "Llama", "Gemma 3", "Qwen3.5"
KINDS = [FULL, SLIDING, RECURRENT]


class Spy(Oracle):
    """An oracle that keeps what its drafter saw in each round: anchor, context keys, unforced draft logits."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rounds: list[tuple[int, int, torch.Tensor, torch.Tensor]] = []

    def draft_block(
        self, anchor_ids: torch.Tensor, cache: ContextCache, shared: SharedModules, num_drafts: int | None = None
    ) -> DraftBlock:
        block = DSparkDrafter.draft_block(self, anchor_ids, cache, shared, num_drafts)
        start = cache.offsets[0] + cache.lengths[0]
        keys = cache.keys[0][0, :, : cache.lengths[0]].clone()
        self.rounds.append((int(anchor_ids[0]), start, keys, block.base_logits[0].clone()))
        return super().draft_block(anchor_ids, cache, shared, num_drafts)


def _cache(model: PreTrainedModel) -> DynamicCache:
    return DynamicCache(config=text_config(model))


def _num_hooks(model: PreTrainedModel) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def _spy(model: PreTrainedModel, text: list[int], **call: Any) -> Spy:
    torch.manual_seed(0)
    spy = Spy(model, [text], CYCLE)
    plain(model, len(text) - 9, assistant_model=spy, **call)
    return spy


# --- kinds of caches ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_named_dynamic_cache(name: str) -> None:
    ids = zoo.prompt(9)
    assert_same_text(zoo.target(name), ids, 24, input_ids=ids, cache_implementation="dynamic")


class _NoStream:
    """A stream of a machine without one: everything is done in order."""

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...

    def wait_stream(self, other: object) -> None: ...


@pytest.mark.parametrize("name", KINDS)
def test_offloaded_cache(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch, "Stream", _NoStream)
        monkeypatch.setattr(torch.cuda, "default_stream", lambda device: _NoStream())
    ids = zoo.prompt(9)
    assert_same_text(zoo.target(name), ids, 24, input_ids=ids, cache_implementation="offloaded")


@pytest.mark.parametrize("name", [FULL, SLIDING])
def test_a_cache_without_a_config(name: str) -> None:
    """Its layers keep everything; the target's own mask makes the window."""
    model, ids = zoo.target(name), zoo.prompt(9)
    assert_same_text(model, ids, 24, input_ids=ids, **{cache_name(model): DynamicCache()})


def test_a_static_cache_of_the_callers_goes_on_afterwards() -> None:
    model, ids, key = zoo.target(FULL), zoo.prompt(9), cache_name(zoo.target(FULL))
    caches = [StaticCache(config=model.config, max_cache_len=64) for _ in range(2)]
    first = plain(model, 20, input_ids=ids, **{key: caches[0]})
    oracle = Oracle(model, first.tolist(), CYCLE)
    assert plain(model, 20, input_ids=ids, assistant_model=oracle, **{key: caches[1]}).tolist() == first.tolist()
    assert cache_length(caches[0]) == cache_length(caches[1]) == 28
    second = [plain(model, 10, input_ids=torch.cat([first, ids], 1), **{key: cache}).tolist() for cache in caches]
    assert second[0] == second[1]


def test_a_static_sliding_cache_is_exact_inside_the_window() -> None:
    model, ids = zoo.new_target(SLIDING, sliding_window=40), zoo.prompt(9)
    assert_same_text(model, ids, 24, input_ids=ids, cache_implementation="static")
    with refused(model, "static sliding-window layer of 40 slots", "42 tokens", "default cache"):
        plain(model, 33, input_ids=ids, cache_implementation="static", assistant_model=Hostile(model))


class _QuantizedSomehow(DynamicLayer):
    """Stands for the layers of a backend that is not installed here."""


class _Unknown(DynamicLayer):
    """A layer with a state of its own that `crop` does not take back."""


@pytest.mark.parametrize("name", KINDS)
def test_quantised_caches_are_refused(name: str) -> None:
    """By name no backend is looked for, so the message is the same without one."""
    model, ids = zoo.target(name), zoo.prompt(9)
    with refused(model, "cache_implementation='quantized'", "rolled back", "default cache"):
        plain(model, 4, input_ids=ids, cache_implementation="quantized", assistant_model=Hostile(model))


@pytest.mark.parametrize(("layer", "says"), [(_QuantizedSomehow, "quantised"), (_Unknown, "of type _Unknown")])
def test_a_cache_with_strange_layers_is_refused(layer: type, says: str) -> None:
    model, cache = zoo.target(FULL), DynamicCache()
    cache.layers = [layer() for _ in range(4)]
    with refused(model, says, "rolled back", "default cache"):
        plain(model, 4, input_ids=zoo.prompt(9), assistant_model=Hostile(model), **{cache_name(model): cache})


# --- a cache that goes on -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("gives", ["whole text", "new tokens"])
def test_a_half_filled_cache(name: str, gives: str) -> None:
    """Equal to the run without a cache; the drafter loses nothing, and the cache is as plain decoding leaves it."""
    model, ids = zoo.target(name), zoo.prompt(9)
    key, filled = cache_name(model), _cache(model)
    turn = torch.cat([plain(model, 6, input_ids=ids, **{key: filled}), zoo.prompt(5)], dim=1)
    whole = plain(model, 24, input_ids=turn)[0].tolist()
    new = {"input_ids": turn[:, cache_length(filled) :], "attention_mask": torch.ones_like(turn)}
    call = {"input_ids": turn} if gives == "whole text" else new
    oracle = Oracle(model, [whole], CYCLE)
    ours, theirs = filled, copy.deepcopy(filled)
    found = plain(model, 24, assistant_model=oracle, **call, **{key: ours})
    assert found[0, -24:].tolist() == whole[-24:]
    assert "cache" in oracle.last_stats.fallback_reason
    fresh = assert_same_text(model, turn, 24, input_ids=turn)
    assert oracle.last_stats.accepted == fresh.last_stats.accepted
    plain(model, 24, **call, **{key: theirs})
    assert cache_length(ours) == cache_length(theirs)
    third = torch.cat([torch.tensor([whole]), zoo.prompt(4)], dim=1)
    after = [plain(model, 12, input_ids=third, **{key: cache}).tolist() for cache in (ours, theirs)]
    assert after[0] == after[1] == plain(model, 12, input_ids=third).tolist()


@pytest.mark.parametrize("name", [FULL, SLIDING])
def test_the_context_of_a_cached_prefix_is_rebuilt(name: str) -> None:
    model, ids = zoo.target(name), zoo.prompt(9)
    text = plain(model, 12, input_ids=ids)[0].tolist()
    filled = _cache(model)
    plain(model, 1, input_ids=ids[:, :6], **{cache_name(model): filled})
    fresh = _spy(model, text, input_ids=ids)
    resumed = _spy(model, text, input_ids=ids, **{cache_name(model): filled})
    torch.testing.assert_close(resumed.rounds[0][2], fresh.rounds[0][2], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", KINDS)
def test_the_returned_cache_goes_on(name: str) -> None:
    model, ids, key = zoo.target(name), zoo.prompt(9), cache_name(zoo.target(name))
    outputs = [
        plain(model, 20, input_ids=ids, return_dict_in_generate=True, assistant_model=assistant)
        for assistant in (None, Hostile(model))
    ]
    caches = [output.past_key_values if key == "past_key_values" else output[key] for output in outputs]
    assert cache_length(caches[0]) == cache_length(caches[1]) == 28
    for one, other in zip(caches[0].layers, caches[1].layers, strict=True):
        if getattr(one, "keys", None) is not None:
            torch.testing.assert_close(other.keys, one.keys, atol=1e-4, rtol=1e-4)
    turn = torch.cat([outputs[0].sequences, zoo.prompt(3)], dim=1)
    texts = [plain(model, 10, input_ids=turn, **{key: cache}).tolist() for cache in caches]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("fails", [False, True])
def test_a_sliding_cache_stops_recording(fails: bool) -> None:
    """Left on, the caller's later plain passes would keep every key."""
    model, ids, cache = zoo.target(SLIDING), zoo.prompt(9), _cache(zoo.target(SLIDING))

    def processor(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if fails and input_ids.shape[1] > 14:
            raise KeyError("stop")
        return scores

    call = {"input_ids": ids, "logits_processor": [processor], cache_name(model): cache}
    if fails:
        with pytest.raises(KeyError):
            plain(model, 20, assistant_model=Hostile(model), **call)
    else:
        plain(model, 20, assistant_model=Hostile(model), **call)
        assert max(layer.keys.shape[2] for layer in cache.layers if layer.is_sliding) == zoo.WINDOW - 1
    assert not any(getattr(layer, "record_past", False) for layer in cache.layers)


# --- prompts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("size", [5, 100])
def test_chunked_prefill(name: str, size: int) -> None:
    ids = zoo.prompt(23)
    assert_same_text(zoo.target(name), ids, 24, input_ids=ids, prefill_chunk_size=size)


@pytest.mark.parametrize("name", KINDS)
def test_embeddings_with_ids(name: str) -> None:
    """The ids are returned, the embeddings (of another prompt of that length) are what is read."""
    model, ids, other = zoo.target(name), zoo.prompt(9), zoo.prompt(9, seed=1)
    with torch.no_grad():
        states = model.get_input_embeddings()(other)
    assert_same_text(model, other, 24, input_ids=ids, inputs_embeds=states)
    assert (
        plain(model, 24, input_ids=ids, inputs_embeds=states)[0, 9:].tolist()
        != plain(model, 24, input_ids=ids)[0, 9:].tolist()
    )


@pytest.mark.parametrize("name", [FULL, SLIDING])
@pytest.mark.parametrize("pads", [1, 5, 50])
def test_padding_never_enters_the_context(name: str, pads: int) -> None:
    model, ids = zoo.target(name), zoo.prompt(9)
    text = plain(model, 24, input_ids=ids)[0].tolist()
    call = left_padded(ids, width=9 + pads)
    alone, padded = _spy(model, text, input_ids=ids), _spy(model, text, **call)
    assert plain(model, 24, assistant_model=Oracle(model, [text], CYCLE), **call)[0, pads:].tolist() == text
    assert len(alone.rounds) == len(padded.rounds)
    for one, other in zip(alone.rounds, padded.rounds, strict=True):
        assert other[:2] == one[:2]
        torch.testing.assert_close(other[2], one[2], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(other[3], one[3], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["GPT-2", FULL, SLIDING])
def test_positions_and_masks_of_the_callers(name: str) -> None:
    """Positions that start elsewhere go on from there; a token masked inside the prompt stays masked."""
    model, ids = zoo.target(name), zoo.prompt(9)
    positions = torch.arange(230, 239)[None]  # the learned ones end at 255
    assert_same_text(model, ids, 16, input_ids=ids, position_ids=positions)
    mask = torch.ones_like(ids)
    mask[0, 4] = 0
    seen = ids[:, mask[0].bool()]
    assert_same_text(model, seen, 16, input_ids=ids, attention_mask=mask)


@pytest.mark.parametrize("name", ["GPT-2", FULL])
@pytest.mark.parametrize(("length", "new", "pads"), [(30, 10, 0), (37, 3, 0), (39, 1, 0), (20, 20, 6), (1, 39, 0)])
def test_the_last_position_is_reached_and_not_passed(name: str, length: int, new: int, pads: int) -> None:
    """Learned positions have no row behind the last: drafts that would need one are not verified."""
    model, ids = zoo.new_target(name, max_position_embeddings=40), zoo.prompt(length)
    text = plain(model, new, input_ids=ids)[0].tolist()
    oracle = Oracle(model, [text], (None,))
    found = plain(model, new, assistant_model=oracle, **left_padded(ids, width=length + pads))
    assert found[0, pads:].tolist() == text
    assert oracle.last_stats.num_rounds <= 1 + new // 7


def test_rotary_positions_go_past_the_configs_limit() -> None:
    model, ids = zoo.new_target(FULL, max_position_embeddings=40), zoo.prompt(30)
    oracle = assert_same_text(model, ids, 24, input_ids=ids)
    assert oracle.last_stats.drafted[-2] == 7


# --- the drafter's context, round by round ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "num_rounds"),
    [(FULL, 100), (SLIDING, 30), (RECURRENT, 30), ("GPT-2", 30), ("Gemma 4 (shared keys)", 30)],
)
def test_the_context_equals_a_stateless_one_in_every_round(name: str, num_rounds: int) -> None:
    """Positions 0..n-1 once each, from all hidden states before the anchor; the first round has the whole prompt."""
    model, ids = zoo.target(name), zoo.prompt(9)
    text = plain(model, 5 * num_rounds, input_ids=ids)[0].tolist()
    spy = _spy(model, text, input_ids=ids)
    assert len(spy.rounds) >= num_rounds
    assert spy.rounds[0][1] == 9
    starts = [9]
    for accepted in spy.last_stats.accepted:
        starts.append(starts[-1] + accepted + 1)
    # Rounds without drafts (a recurrent state catches up, the end of the budget) have no block.
    expected = [start for start, drafted in zip(starts, spy.last_stats.drafted, strict=False) if drafted]
    assert [start for _, start, _, _ in spy.rounds] == expected
    assert [anchor for anchor, _, _, _ in spy.rounds] == [text[start] for start in expected]
    stateless = DSparkDrafter(spy.config).eval()
    stateless.load_state_dict(spy.state_dict())
    with torch.no_grad():
        hidden = model(torch.tensor([text]), output_hidden_states=True, use_cache=False).hidden_states
        features = torch.cat([hidden[i + 1] for i in spy.config.target_layer_ids], dim=-1)
        for anchor, start, keys, logits in spy.rounds[::7]:
            assert keys.shape[1] == start
            draft = stateless.draft(torch.tensor([anchor]), features[:, :start], target=model)
            torch.testing.assert_close(logits, draft.base_logits[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", [FULL, SLIDING, "Gemma 4 (shared keys)", RECURRENT, "GPT-2", "Qwen2.5-VL"])
def test_captured_states_are_the_hidden_states(name: str) -> None:
    """Layer l is `hidden_states[l + 1]`, -1 the embeddings, and nothing is left on the model."""
    model, call, taken = zoo.target(name), zoo.inputs(name, 20), []
    layers = list(range(-1, text_config(model).num_hidden_layers - 1))
    with torch.no_grad():
        model(**call, output_hidden_states=True)  # transformers leaves hooks of its own
    before = _num_hooks(model)
    with torch.no_grad(), HiddenStateCapture(model, layers) as capture:
        outputs = capture.run(lambda: model(**call, output_hidden_states=True), taken.append)
    expected = torch.cat([outputs.hidden_states[i + 1] for i in layers], dim=-1)
    assert torch.equal(taken[0], expected)
    assert _num_hooks(model) == before
