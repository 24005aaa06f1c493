"""The cache and the geometry of ragged passes, against the plainest bookkeeping: one list of tokens per row.

Catches slots off by a row's padding, rejected tokens that stay, growth that loses rows or copies at every pass, masks
that count slots of another row, indices that do not undo each other.
"""

from __future__ import annotations

import random

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from dspark.compat import cache_name
from dspark.decoding.ragged_cache import RaggedCache
from dspark.decoding.ragged_pass import RaggedPass, saves_by_flattening
from dspark.target import text_config
from tests import zoo
from tests.decoding.equality import left_padded

FORMS = ("flattened", "padded", "aligned")
HEADS, WIDTH = 2, 3


def key(token: int) -> torch.Tensor:
    """What stands for a token's key in every head, `[HEADS, 1, WIDTH]`."""
    return torch.full((HEADS, 1, WIDTH), float(token))


def filled(rows: list[list[int]], windows: tuple[int | None, ...] = (None,)) -> RaggedCache:
    """A cache behind a left-padded prompt of these tokens; sliding layers kept what a stock layer keeps."""
    columns = max(map(len, rows))
    starts = [columns - len(row) for row in rows]
    padded = [[-7] * start + row for start, row in zip(starts, rows, strict=True)]
    keys = torch.stack([torch.cat([key(token) for token in row], dim=1) for row in padded])
    source = DynamicCache()
    for i, window in enumerate(windows):
        kept = keys if window is None else keys[:, :, -(window - 1) :]
        source.update(kept, kept * 2, i)
    return RaggedCache(source, starts, num_columns=columns, windows=windows)


def run(cache: RaggedCache, new: list[list[int]], form: str, layer: int = 0) -> tuple[RaggedPass, torch.Tensor]:
    """One pass over new tokens per row; returns its keys `[R, HEADS, W, WIDTH]`."""
    plan = RaggedPass(cache.lengths, [len(row) for row in new], form)
    cache.current = plan
    ids = plan.tokens(new, torch.device("cpu"))
    keys = torch.stack([torch.cat([key(token) for token in row], dim=1) for row in ids.tolist()])
    read, values = cache.update(keys, keys * 2, layer, {"any": "keywords"})
    assert torch.equal(values, read * 2)
    return plan, read


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", range(3))
def test_rows_are_as_lists(form: str, seed: int) -> None:
    """Random counts, accepted prefixes and rows that leave, through several growths."""
    rng = random.Random(seed)
    rows = [[rng.randrange(99) for _ in range(rng.randrange(1, 9))] for _ in range(5)]
    cache = filled(rows)
    for _ in range(150):
        new = [[rng.randrange(99) for _ in range(rng.randrange(1, 8))] for _ in rows]
        _, read = run(cache, new, form)
        for row, more, seen, length in zip(rows, new, read, cache.lengths, strict=True):
            whole = row + more
            if form == "aligned":
                end = max(cache.lengths) + len(more)
                assert seen[0, end - len(whole) : end, 0].tolist() == whole
            else:
                assert seen[1, : len(whole), 2].tolist() == whole
            assert length == len(row)
        kept = [rng.randrange(1, len(more) + 1) for more in new]
        cache.keep(kept)
        rows = [row + more[:count] for row, more, count in zip(rows, new, kept, strict=True)]
        if len(rows) > 2 and rng.random() < 0.05:
            live = sorted(rng.sample(range(len(rows)), len(rows) - 1))
            cache.select(live)
            rows = [rows[b] for b in live]
    assert cache.get_seq_length() == cache.get_query_offset() == max(map(len, rows)) > 300  # beyond the first growth
    assert cache.get_mask_sizes(4, 0) == (max(map(len, rows)) + 4, 0)
    assert not cache.is_compileable


def test_memory_grows_in_few_steps_and_by_half_at_most() -> None:
    cache = filled([[1] * 700, [2] * 3])
    sizes = []
    for _ in range(100):
        run(cache, [[5] * 8, [6]], "flattened")
        cache.keep([8, 1])
        sizes.append(cache.layers[0].keys.shape[2])
    assert len(set(sizes)) <= 3
    assert max(sizes) <= 1.5 * max(cache.lengths)


def test_the_stock_cache_is_given_up() -> None:
    source = DynamicCache()
    source.update(torch.zeros(2, 1, 4, 2), torch.zeros(2, 1, 4, 2), 0)
    source.layers.append(DynamicLayer())  # shares another layer's keys
    cache = RaggedCache(source, [0, 1], num_columns=4, windows=[None, None])
    assert source.layers[0].keys is None
    assert [layer.is_initialized for layer in cache.layers] == [True, False]
    cache.select([1])
    assert cache.lengths == [3]


@pytest.mark.parametrize("form", ["flattened", "padded"])
def test_a_sliding_layer_reads_from_its_window_on(form: str) -> None:
    rows = [list(range(10, 22)), list(range(30, 47))]
    cache = filled(rows, (None, 6))
    plan, read = run(cache, [[1, 2], [3]], form, layer=1)
    assert plan.first_slot(6) == 12 + 1 - 6
    assert read[0, 0, : 12 - 7, 0].tolist() == rows[0][7:]
    seen = plan.mask(6, torch.device("cpu"))[1, 0, 0]
    assert read[1, 0, seen, 0].tolist() == [*rows[1][-5:], 3]


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma 4 (shared keys)"])
def test_a_models_prompt_by_slot(name: str) -> None:
    """Every slot that a layer's window can still reach holds what the row alone has there."""
    if zoo.TARGETS[name].absent:
        pytest.skip("not in this transformers")
    model, prompts = zoo.target(name), [zoo.prompt(length) for length in (3, 12, 20)]

    def stock(**call: torch.Tensor) -> DynamicCache:
        cache = DynamicCache(config=text_config(model))
        with torch.no_grad():
            model(**call, **{cache_name(model): cache})
        return cache

    call = left_padded(*prompts)
    positions = (call["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    source = stock(**call, position_ids=positions)
    windows = [layer.sliding_window if layer.is_sliding else None for layer in source.layers if layer.keys is not None]
    windows += [None] * (len(source.layers) - len(windows))
    cache = RaggedCache(source, [17, 8, 0], num_columns=20, windows=windows)
    assert cache.lengths == [3, 12, 20]
    for row, ids in enumerate(prompts):
        for mine, theirs in zip(cache.layers, stock(input_ids=ids).layers, strict=True):
            if theirs.keys is not None:
                own = theirs.keys[0]
                end = ids.shape[1]
                found = mine.keys[row, :, end - own.shape[1] : end]
                assert torch.allclose(found, own, atol=1e-4)


# --- passes -------------------------------------------------------------------------------------------------------


def test_the_worked_example() -> None:
    flat, padded = (RaggedPass([3, 5], [3, 1], form) for form in ("flattened", "padded"))
    cpu = torch.device("cpu")
    blocks = [[10, 11, 12], [20]]
    assert flat.tokens(blocks, cpu).tolist() == [[10, 11, 12, 20]]
    assert flat.slots(cpu).tolist() == [[3, 4, 5, 5]]
    assert flat.indices(cpu).rows.tolist() == [0, 0, 0, 1]
    assert (flat.num_tokens, flat.num_slots) == (4, 6)
    assert padded.tokens(blocks, cpu).tolist() == [[10, 11, 12], [20, 20, 20]]
    assert padded.slots(cpu).tolist() == [[3, 4, 5], [5, 6, 7]]
    assert (padded.num_tokens, padded.num_slots) == (6, 8)
    assert flat.per_token(torch.tensor([[7], [9]])).tolist() == [[7, 7, 7, 9]]
    assert padded.per_token(torch.tensor([[7], [9]])).tolist() == [[7, 7, 7], [9, 9, 9]]
    assert flat.per_token(torch.tensor([[[7], [9]]] * 3)).shape == (3, 1, 4)
    assert flat.by_row(torch.tensor([[10, 11, 12, 20]])).tolist() == [[10, 11, 12], [20, 20, 20]]
    assert flat.by_token(torch.tensor([[1, 2, 3], [4, 5, 6]])).tolist() == [[1, 2, 3, 4]]


@pytest.mark.parametrize("form", ["flattened", "padded"])
@pytest.mark.parametrize("window", [None, 1, 4, 50])
@pytest.mark.parametrize("holes", [False, True])
def test_masks_token_by_token(form: str, window: int | None, holes: bool) -> None:
    lengths, counts = [3, 9, 6], [3, 1, 2]
    visible = torch.ones(3, 4, dtype=torch.bool)
    visible[1, 2] = False
    plan = RaggedPass(lengths, counts, form, is_visible=visible if holes else None)
    mask = plan.mask(window, torch.device("cpu"))
    first = plan.first_slot(window)
    assert mask.shape == (3, 1, 3, plan.num_slots - first)
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        for k in range(count):
            right = {
                slot
                for slot in range(length + k + 1)
                if (window is None or length + k - slot < window) and not (holes and (row, slot) == (1, 2))
            }
            assert {first + slot for slot in mask[row, 0, k].nonzero()[:, 0].tolist()} == right


def test_the_aligned_mask_is_left_padding_and_holes() -> None:
    visible = torch.tensor([[True, False, True], [True, True, True]])
    plan = RaggedPass([5, 3], [2, 1], "aligned", is_visible=visible)
    assert plan.padding_mask(torch.device("cpu")).tolist() == [[1, 0, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1]]
    assert RaggedPass([5, 3], [2, 1], "aligned").padding_mask(torch.device("cpu")).sum().item() == 12


@pytest.mark.parametrize(
    ("counts", "saves"), [([8, 8], False), ([8, 1], True), ([8, 8, 8, 6], False), ([8, 8, 8, 1], True), ([3], False)]
)
def test_flattening_saves_a_tenth_or_is_left(counts: list[int], saves: bool) -> None:
    assert saves_by_flattening(counts) is saves
