"""`ContextCache`: the drafter's keys and values of committed context, one append per new token (steps 1 and 2).

A row's slot is its position minus the row's offset, without holes: rows of a batch may have different lengths. The
block's own keys and values are written behind a row's last slot as scratch, read in the same pass and overwritten by
the next append, so they are never kept, accepted or not (reference: context only, cropped after every draft).

With a window W only a row's last W slots are read. Older ones are dropped together, half a window at a time, and the
row's offset grows by their number: positions stay what they were, and a buffer never has more than
`W + max(256, W / 2)` slots, those of a block and 256 to grow.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_GROWTH = 256  # slots; growth is at least this and at least half the present capacity, so appends copy O(1) per token


class ContextCache:
    """Per-layer context keys (normed, rotated) and values.

    Args:
        num_layers: Draft layers.
        offsets: Position of each row's first slot, one integer per row. 0 unless the context's start is unknown (a
            cache the user filled without a drafter).
        window: Slots of each row that a block attends to, the last ones; None: all.
        expected: Slots per row to make room for at once, growth not counted.
    """

    def __init__(
        self, num_layers: int, offsets: Sequence[int], *, window: int | None = None, expected: int = 0
    ) -> None:
        self.keys: list[torch.Tensor | None] = [None] * num_layers
        self.values: list[torch.Tensor | None] = [None] * num_layers
        self.offsets = list(offsets)
        self.lengths = [0] * len(self.offsets)
        self.window = window
        self._expected = expected

    @property
    def seen(self) -> list[int]:
        """Slots of each row that a block attends to."""
        return self.lengths if self.window is None else [min(length, self.window) for length in self.lengths]

    @property
    def first_slot(self) -> int:
        """The first slot that `extend` returns: no row's block attends to earlier ones."""
        return min(length - seen for length, seen in zip(self.lengths, self.seen, strict=True))

    @property
    def is_uniform(self) -> bool:
        """Whether all rows have the same number of slots (then no mask is needed)."""
        return all(length == self.lengths[0] for length in self.lengths)  # no set: a compiled pass counts lengths

    def next_positions(self, count: int, device: torch.device) -> torch.Tensor:
        """Absolute positions of the next `count` slots of each row, int64 `[B, count]`."""
        starts = [offset + length for offset, length in zip(self.offsets, self.lengths, strict=True)]
        if len(set(starts)) == 1:
            return torch.arange(starts[0], starts[0] + count, device=device).expand(len(starts), -1)
        return torch.tensor(starts, device=device)[:, None] + torch.arange(count, device=device)

    def append(
        self, keys_values: Sequence[tuple[torch.Tensor, torch.Tensor]], counts: Sequence[int] | None = None
    ) -> None:
        """Add the first `counts[b]` of S new slots to each row (None: all S).

        Args:
            keys_values: Per layer, keys and values `[B, KV, S, head_dim]` at `next_positions(S)`.
            counts: New slots per row.

        Raises:
            ValueError: `counts` does not fit the rows or the slots given; nothing is added then.
        """
        size = keys_values[0][0].shape[2]
        counts = [size] * len(self.lengths) if counts is None else list(counts)
        if len(counts) != len(self.lengths) or not all(0 <= count <= size for count in counts):
            raise ValueError(f"`counts` must give each of {len(self.lengths)} rows 0..{size} new slots, got {counts}.")
        if self.window is not None and max(self.lengths) + size > self.window + _slack(self.window):
            self._drop_old()
        for layer_idx, (keys, values) in enumerate(keys_values):
            self._write(layer_idx, keys, values)
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def extend(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Context followed by a block's keys and values, for reading now; the block is not kept.

        Args:
            layer_idx: Draft layer.
            keys: Block keys `[B, KV, q, head_dim]`.
            values: Block values, same shape.

        Returns:
            Views `[B, KV, n, head_dim]` of the slots from `first_slot` to the longest row's block; in shorter rows
            the block follows the row's own last slot, and what is not the row's is to be masked (see `valid_slots`).
        """
        self._write(layer_idx, keys, values)
        read = slice(self.first_slot, max(self.lengths) + keys.shape[2])
        all_keys, all_values = self.keys[layer_idx], self.values[layer_idx]
        assert all_keys is not None
        assert all_values is not None
        return all_keys[:, :, read], all_values[:, :, read]

    def valid_slots(self, block: int, device: torch.device) -> torch.Tensor | None:
        """Which of the n slots `extend` returns count, bool `[B, n]`; None when all do."""
        if self.is_uniform:
            return None
        slots = torch.arange(self.first_slot, max(self.lengths) + block, device=device)
        lengths, seen = (torch.tensor(each, device=device)[:, None] for each in (self.lengths, self.seen))
        return (slots < lengths + block) & (slots >= lengths - seen)

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        index = list(rows)
        self.keys = [None if k is None else k[index] for k in self.keys]
        self.values = [None if v is None else v[index] for v in self.values]
        self.offsets = [self.offsets[row] for row in index]
        self.lengths = [self.lengths[row] for row in index]

    def join(self, other: ContextCache) -> None:
        """Take the rows of another cache of the same drafter behind these; the other is not to be used any more."""
        for mine, theirs in ((self.keys, other.keys), (self.values, other.values)):
            for layer_idx, new in enumerate(theirs):
                if new is not None:
                    present = mine[layer_idx]
                    capacity = max(new.shape[2], 0 if present is None else present.shape[2])
                    parts = [states for states in (present, new) if states is not None]
                    mine[layer_idx] = torch.cat([_grown(states, states, capacity) for states in parts])
        self.offsets += other.offsets
        self.lengths += other.lengths

    def _drop_old(self) -> None:
        """Move every row's last slots to its front; the buffers stay."""
        dropped = [length - seen for length, seen in zip(self.lengths, self.seen, strict=True)]
        for states in (*self.keys, *self.values):
            if states is None:
                continue
            for row, (first, seen) in enumerate(zip(dropped, self.seen, strict=True)):
                if first:  # copied out first, as the two may overlap
                    states[row, :, :seen] = states[row, :, first : first + seen].clone()
        self.offsets = [offset + first for offset, first in zip(self.offsets, dropped, strict=True)]
        self.lengths = self.seen

    def _write(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        size = keys.shape[2]
        self._reserve(layer_idx, keys, values, max(self.lengths) + size)
        all_keys, all_values = self.keys[layer_idx], self.values[layer_idx]
        assert all_keys is not None
        assert all_values is not None
        if self.is_uniform:
            start = self.lengths[0]
            all_keys[:, :, start : start + size] = keys
            all_values[:, :, start : start + size] = values
            return
        for row, start in enumerate(self.lengths):
            all_keys[row, :, start : start + size] = keys[row]
            all_values[row, :, start : start + size] = values[row]

    def _reserve(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor, needed: int) -> None:
        present = self.keys[layer_idx]
        capacity = 0 if present is None else present.shape[2]
        if present is not None and needed <= capacity:
            return
        grown = self._expected + _GROWTH if present is None else capacity + max(_GROWTH, capacity // 2)
        if self.window is not None:
            grown = min(grown, self.window + _slack(self.window) + _GROWTH)
        capacity = max(needed, grown)
        self.keys[layer_idx] = _grown(present, keys, capacity)
        self.values[layer_idx] = _grown(self.values[layer_idx], values, capacity)


def _slack(window: int) -> int:
    """Slots that may be kept behind a window before they are dropped, so that dropping copies O(1) per token."""
    return max(_GROWTH, window // 2)


def _grown(present: torch.Tensor | None, like: torch.Tensor, capacity: int) -> torch.Tensor:
    # Zeros: a masked slot is multiplied by a zero weight, and zero times an uninitialised NaN would be NaN.
    grown = like.new_zeros(like.shape[0], like.shape[1], capacity, like.shape[3])
    if present is not None:
        grown[:, :, : present.shape[2]] = present
    return grown
