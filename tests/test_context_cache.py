"""The drafter's context cache against plain lists of slots.

Catches: a block's keys kept for the next round, rows of different lengths written over each other, positions that
forget a row's offset, a mask that is one slot off, a copy per append, rows mixed up when some are dropped, a window
that is one too wide, moves positions when old slots are dropped, or lets buffers grow with the text.
"""

from __future__ import annotations

import random

import pytest
import torch

from dspark.context_cache import _GROWTH, ContextCache

HEADS, WIDTH, LAYERS = 2, 3, 2
CPU = torch.device("cpu")


def slots(rows: int, count: int, tag: float = 0.0):
    """Keys and values per layer, all different."""
    shape = (rows, HEADS, count, WIDTH)
    return [(torch.randn(shape) + tag, torch.randn(shape) + tag) for _ in range(LAYERS)]


class Lists:
    """The same cache as Python lists: `rows[b]` has one `[layers, 2, heads, width]` per slot, none ever dropped."""

    def __init__(self, rows: int, window: int | None = None) -> None:
        self.rows: list[list[torch.Tensor]] = [[] for _ in range(rows)]
        self.window = window

    def append(self, keys_values, counts) -> None:
        stacked = torch.stack([torch.stack(pair) for pair in keys_values])  # [layers, 2, B, heads, S, width]
        for b, count in enumerate(counts):
            self.rows[b] += [stacked[:, :, b, :, s] for s in range(count)]

    def check(self, cache: ContextCache, block) -> None:
        """What `extend` returns, and where `valid_slots` looks, is the row's slots and then the block."""
        size = block[0][0].shape[2]
        if self.window is None:
            assert cache.lengths == [len(row) for row in self.rows]
        else:  # these caches start at position 0
            assert cache.next_positions(1, CPU)[:, 0].tolist() == [len(row) for row in self.rows]
        valid = cache.valid_slots(size, CPU)
        width = max(cache.lengths) + size - cache.first_slot
        assert (valid is None) == (len(set(cache.lengths)) == 1)
        valid = torch.ones(len(self.rows), width, dtype=torch.bool) if valid is None else valid
        assert valid.shape == (len(self.rows), width)
        for layer, (keys, values) in enumerate(block):
            for kind, got in enumerate(cache.extend(layer, keys, values)):
                assert got.shape[2] == width
                assert got.isfinite().all()
                for b, row in enumerate(self.rows):
                    seen = row if self.window is None else row[-self.window :]
                    own = [slot[layer, kind] for slot in seen] + [block[layer][kind][b, :, s] for s in range(size)]
                    assert torch.equal(got[b][:, valid[b]], torch.stack(own, dim=1))


@pytest.mark.parametrize("window", [None, 1, 4, 9, 30, 1000])
@pytest.mark.parametrize("seed", range(4))
def test_any_history_equals_lists(seed, window, monkeypatch) -> None:
    """Appends of any width and any count per row, blocks between them, rows dropped and reordered."""
    monkeypatch.setattr("dspark.context_cache._GROWTH", 5)  # so that buffers grow and old slots are dropped
    draw = random.Random(seed)
    rows = 4
    cache, lists = ContextCache(LAYERS, [0] * rows, window=window), Lists(rows, window)
    for round_ in range(40):
        count = draw.randint(1, 9)
        counts = None if draw.random() < 0.3 else [draw.randint(0, count) for _ in range(rows)]
        new = slots(rows, count)
        cache.append(new, counts)
        lists.append(new, [count] * rows if counts is None else counts)
        lists.check(cache, slots(rows, draw.randint(1, 7), tag=1e6))
        if round_ in (15, 30):
            kept = draw.sample(range(rows), rows - 1)
            cache.select(kept)
            lists.rows = [lists.rows[b] for b in kept]
            rows -= 1
            lists.check(cache, slots(rows, 4, tag=1e6))
    assert (sum(cache.offsets) > 0) == (window is not None and window < 100)


def test_block_keys_do_not_survive() -> None:
    """100 rounds of block, then fewer accepted rows: the cache holds committed positions only, without gap."""
    cache, lists = ContextCache(LAYERS, [0]), Lists(1)
    first = slots(1, 5)
    cache.append(first)
    lists.append(first, [5])
    for round_ in range(100):
        block = slots(1, 7, tag=1e6)
        lists.check(cache, block)
        assert cache.lengths == [len(lists.rows[0])]
        accepted = slots(1, 1 + round_ % 8)
        cache.append(accepted)
        lists.append(accepted, [1 + round_ % 8])
    stored = cache.keys[0][:, :, : cache.lengths[0]]
    assert stored.abs().max() < 1e3
    assert cache.next_positions(2, CPU).tolist() == [[cache.lengths[0], cache.lengths[0] + 1]]


def filled(
    counts: list[int], *, offsets: list[int] | None = None, window: int | None = None, times: int = 1
) -> tuple[ContextCache, Lists]:
    """A cache whose rows got `counts` slots so many times, and the same as lists."""
    cache, lists = ContextCache(LAYERS, offsets or [0] * len(counts), window=window), Lists(len(counts), window)
    for _ in range(times):
        new = slots(len(counts), max(counts))
        cache.append(new, counts)
        lists.append(new, counts)
    return cache, lists


def test_rows_of_another_cache_join_behind() -> None:
    joined, wanted = filled([4, 2], offsets=[0, 3])
    other, behind = filled([1, 0, 300], offsets=[0, 0, 1])
    joined.join(other)
    wanted.rows += behind.rows
    assert joined.offsets == [0, 3, 0, 0, 1]
    wanted.check(joined, slots(5, 2))
    new = slots(5, 3)
    joined.append(new, [3, 1, 0, 2, 3])
    wanted.append(new, [3, 1, 0, 2, 3])
    wanted.check(joined, slots(5, 1))


def test_rows_that_have_dropped_slots_join() -> None:
    joined, wanted = filled([300, 700], window=6, times=2)
    other, behind = filled([3], window=6, times=2)
    assert joined.offsets == [294, 694]
    joined.join(other)
    wanted.rows += behind.rows
    wanted.check(joined, slots(3, 4))
    for _ in range(70):
        new = slots(3, 5)
        joined.append(new, [5, 2, 5])
        wanted.append(new, [5, 2, 5])
    assert joined.offsets[2] > 0
    wanted.check(joined, slots(3, 4))


def test_an_empty_cache_takes_rows() -> None:
    empty, full, wanted = ContextCache(LAYERS, []), ContextCache(LAYERS, [0]), Lists(1)
    new = slots(1, 5)
    full.append(new)
    wanted.append(new, [5])
    empty.join(full)
    wanted.check(empty, slots(1, 2))


def test_positions_are_offset_plus_slot() -> None:
    cache = ContextCache(LAYERS, [0, 10, 3])
    assert cache.next_positions(2, CPU).tolist() == [[0, 1], [10, 11], [3, 4]]
    cache.append(slots(3, 4), [4, 1, 2])
    assert cache.next_positions(3, CPU).tolist() == [[4, 5, 6], [11, 12, 13], [5, 6, 7]]
    assert cache.lengths == [4, 1, 2]
    cache.select([2, 0])
    assert (cache.offsets, cache.lengths) == ([3, 0], [2, 4])
    assert cache.next_positions(1, CPU).tolist() == [[5], [4]]
    equal = ContextCache(LAYERS, [7, 7])
    assert equal.next_positions(2, CPU).tolist() == [[7, 8], [7, 8]]
    assert equal.next_positions(2, CPU).dtype is torch.int64


def test_valid_slots_of_ragged_rows() -> None:
    cache = ContextCache(LAYERS, [0, 0])
    cache.append(slots(2, 3), [3, 1])
    assert cache.valid_slots(2, CPU).int().tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    cache.append(slots(2, 2), [0, 2])
    assert cache.is_uniform
    assert cache.valid_slots(2, CPU) is None


def test_nothing_in_the_cache_yet() -> None:
    cache = ContextCache(LAYERS, [0, 0])
    cache.append(slots(2, 0))
    assert cache.lengths == [0, 0]
    ((keys, values), *_) = block = slots(2, 3)
    got_keys, got_values = cache.extend(0, keys, values)
    assert torch.equal(got_keys, keys)
    assert torch.equal(got_values, values)
    Lists(2).check(cache, block)


@pytest.mark.parametrize("counts", [[1], [1, 2, 3], [4, 0], [-1, 0]])
def test_counts_that_do_not_fit_add_nothing(counts) -> None:
    cache = ContextCache(LAYERS, [0, 0])
    with pytest.raises(ValueError, match=r"each of 2 rows 0\.\.3 new slots, got"):
        cache.append(slots(2, 3), counts)
    assert cache.lengths == [0, 0]


def test_memory_grows_by_half_at_most() -> None:
    cache, grown = ContextCache(1, [0]), 0
    one = slots(1, 1)[:1]
    before = 0
    for length in range(1, 4000):
        cache.append(one)
        capacity = cache.keys[0].shape[2]
        assert capacity <= max(1.5 * length, length) + _GROWTH
        grown += capacity != before
        before = capacity
    # Growing by a fixed step would copy 4000 / 256 times, and quadratically many slots.
    assert grown <= 10


@pytest.mark.parametrize("window", [1, 40, 2000])
def test_a_window_bounds_memory(window) -> None:
    """Old slots are dropped in place and together: the buffer is made a few times, then only written to."""
    cache, buffers, copied = ContextCache(1, [0], window=window), set(), 0
    one, block = slots(1, 1)[:1], slots(1, 8)[0]
    for _ in range(4 * window + 3000):
        before = cache.offsets[0]
        cache.append(one)
        copied += window if cache.offsets[0] > before else 0
        keys, _ = cache.extend(0, *block)
        assert keys.shape[2] <= window + 8
        buffers.add(cache.keys[0].data_ptr())
        assert cache.keys[0].shape[2] <= window + max(_GROWTH, window // 2) + 8 + _GROWTH
    assert len(buffers) <= 8
    assert copied <= 2 * (4 * window + 3000)


def test_expected_slots_are_made_room_for_at_once() -> None:
    cache = ContextCache(1, [0], expected=1000)
    for _ in range(10):
        cache.append(slots(1, 100)[:1])
        cache.extend(0, *slots(1, 8)[0])
        assert cache.keys[0].shape[2] == 1000 + _GROWTH


def test_select_keeps_no_reference_to_dropped_rows() -> None:
    cache = ContextCache(LAYERS, [0] * 4)
    cache.append(slots(4, 5))
    before = cache.keys[0].untyped_storage().nbytes()
    cache.select([1])
    assert cache.keys[0].untyped_storage().nbytes() == before // 4


def test_dtype_is_the_drafter_s() -> None:
    cache = ContextCache(1, [0])
    cache.append([(torch.randn(1, 1, 2, 3).bfloat16(), torch.randn(1, 1, 2, 3).bfloat16())])
    assert cache.keys[0].dtype is torch.bfloat16
