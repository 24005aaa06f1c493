"""Windows and causal blocks: every rule against its table, in drafting and in training, dense and flex.

Catches: a window that is one too wide, counts from the anchor instead of the slot or cuts the block where it must
not; rows of other lengths or offsets that shift it; training that sees what drafting does not; a mask
where none is needed.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from dspark.context_cache import ContextCache
from dspark.draft_masks import draft_masks
from dspark.families import LayerAttention, sees_block, sees_context
from dspark.objective import Sight, block_attention_mask, build_blocks, flex_block_mask
from dspark.training_forward import block_hidden

from . import small

RULES = ("ctx_from_anchor", "per_slot_ctx", "per_slot_all", "abs_all")
KINDS = [LayerAttention(None, None, True), *(LayerAttention(3, rule, c) for rule in RULES for c in (True, False))]
BLOCK = 4


def may_see(kind: LayerAttention, q: int, k: int, anchor: int) -> bool:
    """The table of the frameworks' rules, one pair at a time; a key at or behind the anchor is in the block."""
    inside, w, far = k >= anchor, kind.window, abs(q - k)
    if inside and kind.is_causal and k > q:
        return False
    if w is None:
        return True
    if kind.rule == "ctx_from_anchor":
        return inside or k >= anchor - w
    if kind.rule == "per_slot_ctx":
        return inside or k >= q - (w - 1)
    return far < w if kind.rule == "per_slot_all" else far <= w


def changes(kind: LayerAttention) -> dict:
    """Fields of a config whose first layer is of this kind and whose second sees everything."""
    windows = None if kind.window is None else [kind.window, None]
    return {"attention_windows": windows, "window_rule": kind.rule, "causal_in_block": [kind.is_causal, False]}


def cache_of(lengths: list[int]) -> ContextCache:
    cache = ContextCache(2, [0, 5][: len(lengths)])
    cache.lengths = list(lengths)
    return cache


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [[9], [9, 6], [1, 7]])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_drafting_mask_is_the_table(kind, lengths, attention) -> None:
    config = small.config(block_size=BLOCK, **changes(kind))
    config._attn_implementation = attention
    hidden = torch.zeros(len(lengths), BLOCK, 32)
    mask, plain = draft_masks(config, hidden, cache_of(lengths))
    allowed = mask[:, 0] if attention == "sdpa" else mask[:, 0] == 0
    assert (plain is None) == (len(set(lengths)) == 1)
    for b, anchor in enumerate(lengths):
        for slot in range(BLOCK):
            seen = [k for k in range(anchor + BLOCK) if may_see(kind, anchor + slot, k, anchor)]
            assert allowed[b, slot].nonzero()[:, 0].tolist() == seen


def test_no_mask_where_nothing_is_cut() -> None:
    wide = small.config(attention_windows=[64, 64], window_rule="per_slot_all")
    wide._attn_implementation = "sdpa"
    assert draft_masks(wide, torch.zeros(1, BLOCK, 32), cache_of([9])) == [None, None]
    assert draft_masks(wide, torch.zeros(1, BLOCK, 32), cache_of([61]))[0] is not None
    wide._attn_implementation = "flash_attention_2"
    assert draft_masks(wide, torch.zeros(1, BLOCK, 32), cache_of([9])) == [None, None]
    with pytest.raises(
        ValueError, match=r"have windows or causal blocks, .*'flash_attention_2' does not take.*'sdpa'"
    ):
        draft_masks(wide, torch.zeros(1, BLOCK, 32), cache_of([61]))


@pytest.mark.parametrize("kind", KINDS)
def test_training_mask_is_the_table(kind) -> None:
    anchors, keep = torch.tensor([[2, 7, 0]]), torch.tensor([[True, True, False]])
    shape = {"context_length": 10, "block_size": BLOCK}
    sight = Sight(partial(sees_context, kind), partial(sees_block, kind))
    mask = block_attention_mask(anchors, keep, **shape, sight=sight)[0, 0]
    for block, anchor in enumerate(anchors[0].tolist()):
        for slot in range(BLOCK):
            row, q = mask[block * BLOCK + slot], anchor + slot
            context = [k for k in range(anchor) if keep[0, block] and may_see(kind, q, k, anchor)]
            own = [10 + block * BLOCK + j for j in range(BLOCK) if may_see(kind, q, anchor + j, anchor)]
            assert row.nonzero()[:, 0].tolist() == context + own
    flex = flex_block_mask(anchors, keep, **shape, sight=sight)
    grid = torch.tensor([
        [bool(flex.mask_mod(torch.tensor(0), torch.tensor(0), torch.tensor(q), torch.tensor(k))) for k in range(22)]
        for q in range(12)
    ])  # fmt: skip
    assert torch.equal(grid, mask)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("from_anchor", [True, False])
def test_trained_blocks_are_drafted_blocks(kind, from_anchor) -> None:
    """The hidden states and the recurrent head's features of training are those of drafting at each anchor."""
    model = small.drafter(
        sample_from_anchor=from_anchor, markov_head_type="rnn", block_size=BLOCK, **changes(kind)
    )  # fmt: skip
    model.share_with(small.target())
    ids = torch.randint(0, 60, (1, 14), generator=torch.Generator().manual_seed(1))
    states, anchors = small.states(1, 14), torch.tensor([[3, 8]])
    shared, everywhere = model.shared_modules(None), torch.ones_like(ids)
    blocks = build_blocks(ids, everywhere, anchors, torch.ones_like(anchors).bool(), model.config.num_draft_tokens)
    with torch.no_grad():
        trained = block_hidden(model, ids, states, blocks, shared)[0]
        for n, anchor in enumerate(anchors[0].tolist()):
            cache = ContextCache(2, [0])
            model.extend_context(cache, model.project_context(states[:, :anchor]))
            block = model.draft_block(ids[:, anchor], cache, shared)
            first = 0 if from_anchor else 1
            torch.testing.assert_close(trained[n : n + 1, first:], block.hidden, atol=1e-5, rtol=1e-5)
            labels = blocks.labels[0, n].tolist()
            walk = model.walk_block(block, ids[:, anchor], lambda k, _l, _t, labels=labels: torch.tensor([labels[k]]))
            at_anchor = None if from_anchor else trained[n : n + 1, 0]
            bias = model.markov_head.block_bias(blocks.previous_ids[:, n], trained[n : n + 1, first:], at_anchor)
            torch.testing.assert_close(block.base_logits + bias, walk.logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_batch_draft_as_alone(kind) -> None:
    model = small.drafter(block_size=BLOCK, **changes(kind))
    model.share_with(small.target())
    states, anchors = small.states(2, 9), torch.tensor([5, 17])
    cache = ContextCache(2, [0, 0])
    with torch.no_grad():
        model.extend_context(cache, model.project_context(states), [9, 4])
        both = model.draft_block(anchors, cache, model.shared_modules(None)).base_logits
    for b, length in enumerate((9, 4)):
        alone = model.draft(anchors[b : b + 1], states[b : b + 1, :length]).base_logits
        torch.testing.assert_close(both[b : b + 1], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("window", [1, 2, 5, 40])
@pytest.mark.parametrize("kind", [LayerAttention(None, None, False), *KINDS])
def test_a_context_window_hides_all_older_rows(kind, window, attention, monkeypatch) -> None:
    """Blocks behind a windowed cache are those behind a whole one under a mask that hides what is older."""

    def hiding(config, hidden, cache):
        masks, anchors = [], cache.lengths
        for layer in (kind, LayerAttention(None, None, False)):
            mask = torch.zeros(len(anchors), 1, BLOCK, max(anchors) + BLOCK, dtype=torch.bool)
            for b, anchor in enumerate(anchors):
                for slot in range(BLOCK):
                    for k in range(max(anchor - window, 0), anchor + BLOCK):
                        mask[b, 0, slot, k] = may_see(layer, anchor + slot, k, anchor)
            masks.append(mask if attention == "sdpa" else torch.zeros(mask.shape).masked_fill(~mask, -1e30))
        return masks

    monkeypatch.setattr("dspark.context_cache._GROWTH", 4)
    model = small.drafter(block_size=BLOCK, **changes(kind))
    model.set_attn_implementation(attention)
    shared = model.shared_modules(small.target())
    whole, windowed = ContextCache(2, [0, 7]), ContextCache(2, [0, 7], window=window)
    for step, counts in enumerate([(9, 4), (1, 3), (2, 2), (5, 9), (0, 1), (8, 8), (3, 1)]):
        states = small.states(2, 9, seed=step)
        with torch.no_grad():
            features = model.project_context(states)
            for cache in (whole, windowed):
                model.extend_context(cache, features, counts)
            found = model.draft_block(torch.tensor([5, 17]), windowed, shared)
            with monkeypatch.context() as patch:
                patch.setattr("dspark.modeling_dspark.draft_masks", hiding)
                wanted = model.draft_block(torch.tensor([5, 17]), whole, shared)
        torch.testing.assert_close(found.base_logits, wanted.base_logits, atol=1e-4, rtol=1e-4)
    assert (windowed.offsets != [0, 7]) == (window < 40)


@pytest.fixture
def _compiled_apart():
    """Flex attention compiled again for another shape is made for all shapes, which torch 2.13 cannot on a CPU."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("_compiled_apart")
def test_training_runs_through_windows() -> None:
    model = small.drafter(sample_from_anchor=False, markov_head_type="rnn", **changes(KINDS[1]))
    model.share_with(small.target())
    ids = torch.randint(0, 60, (1, 14))
    losses, last = [], torch.randn(1, 14, 32)
    for attention in ("sdpa", "eager", "flex_attention"):
        model.set_attn_implementation(attention)
        with torch.set_grad_enabled(attention != "flex_attention"):  # which has no backward pass on a CPU
            out = model(
            ids, small.states(1, 14), torch.ones_like(ids), last,
            anchor_positions=torch.tensor([[3, 8]]),
        )  # fmt: skip
        losses.append(float(out.loss))
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[2] == pytest.approx(losses[0], rel=1e-4)
