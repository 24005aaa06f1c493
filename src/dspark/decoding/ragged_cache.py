"""`RaggedCache`: the target's keys and values of several rows, each row contiguous from slot 0 (steps 6 and 7).

A row's slot is its token's column in the prompt and text minus the row's left padding, so distances between slots are
distances between positions whatever each row accepted. Rejected drafts are overwritten by the next pass: cutting back
is an integer per row. Sliding layers keep everything, and the mask makes the window. It knows nothing of forms and
masks: `RaggedPass` says where tokens go.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from .ragged_pass import RaggedPass

_GROWTH = 256  # slots; growth is at least this and at least half the present capacity, so writes copy O(1) per token


class RaggedCache(Cache):
    """Keys and values of R rows of different lengths.

    Args:
        source: Stock cache of the prompt's pass, dynamic layers only; it is emptied layer by layer.
        starts: Left padding per row.
        num_columns: Width of the prompt, padding included. A sliding layer may hold the last columns only: earlier
            ones are outside every later window.
        windows: Sliding window per layer of `source`; None: full attention.
    """

    def __init__(
        self, source: Cache, starts: Sequence[int], *, num_columns: int, windows: Sequence[int | None]
    ) -> None:
        super().__init__(layers=[DynamicLayer() for _ in source.layers])
        self.lengths = [num_columns - start for start in starts]
        self.windows = list(windows)
        self.current: RaggedPass | None = None
        for layer, given in zip(self.layers, source.layers, strict=True):
            if given.keys is None or given.keys.numel() == 0:
                continue  # a layer that shares another's keys
            layer.lazy_initialization(given.keys, given.values)
            layer.keys = _by_slot(given.keys, starts, num_columns)
            layer.values = _by_slot(given.values, starts, num_columns)
            given.keys = given.values = None  # both caches are never alive as a whole

    # --- what the model calls, with the arguments of `Cache` ------------------------------------------------------

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a pass's tokens behind their rows and return what the pass reads.

        Args:
            key_states: `[1, KV, N, head_dim]` of a flattened pass, else `[R, KV, q, head_dim]`.
            value_states: Likewise; its head_dim may differ.
            layer_idx: Layer.

        Returns:
            Keys and values `[R, KV, W', head_dim]`, W' the slots from the first in sight to the last written.
        """
        assert self.current is not None
        layer, window = self.layers[layer_idx], self.windows[layer_idx]
        layer.keys = self._written(layer.keys, key_states)
        layer.values = self._written(layer.values, value_states)
        return self._read(layer.keys, window), self._read(layer.values, window)

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        """Slots of the longest row."""
        return max(self.lengths)

    def get_query_offset(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        """Slot of the first new token of the longest row."""
        return max(self.lengths)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:  # noqa: ARG002
        """Length and offset of what `update` returns, for masks that a model makes itself (aligned passes only)."""
        return max(self.lengths) + query_length, 0

    # --- what the loop calls --------------------------------------------------------------------------------------

    def keep(self, counts: Sequence[int]) -> None:
        """After a pass row r keeps the first `counts[r]` of its new tokens; the rest will be overwritten."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        for layer in self.layers:
            if layer.is_initialized:
                index = torch.tensor(rows, device=layer.keys.device)
                layer.keys, layer.values = layer.keys[index], layer.values[index]
        self.lengths = [self.lengths[row] for row in rows]

    def join(self, other: RaggedCache) -> None:
        """Take the rows of another cache of the same target behind these; the other is not to be used any more."""
        capacity = max(*self.lengths, *other.lengths) + _GROWTH
        for layer, new in zip(self.layers, other.layers, strict=True):
            if new.is_initialized:
                layer.keys, layer.values = (
                    torch.cat([_roomier(states[:, :, :capacity], capacity) for states in pair])
                    for pair in ((layer.keys, new.keys), (layer.values, new.values))
                )
        self.lengths += other.lengths

    def _written(self, room: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        assert self.current is not None
        needed, capacity = self.current.num_slots, room.shape[2]
        if needed > capacity:
            room = _roomier(room, max(needed, capacity + max(_GROWTH, capacity // 2)))
        indices = self.current.indices(room.device)
        room[indices.rows, :, indices.slots] = new.transpose(1, 2).flatten(0, 1)  # [N, KV, head_dim]
        return room

    def _read(self, room: torch.Tensor, window: int | None) -> torch.Tensor:
        assert self.current is not None
        if self.current.form == "aligned":
            return self.current.aligned(room)
        return room[:, :, self.current.first_slot(window) : self.current.num_slots]


def _by_slot(states: torch.Tensor, starts: Sequence[int], num_columns: int) -> torch.Tensor:
    """The last columns `[R, KV, n, x]` of a left-padded prompt by slot, `[R, KV, capacity, x]`."""
    room = _roomier(states[:, :, :0], num_columns + _GROWTH)
    missing = num_columns - states.shape[2]
    if not any(starts):
        room[:, :, missing:num_columns] = states
        return room
    columns = torch.arange(num_columns) + torch.tensor(starts)[:, None]
    # Slots behind a row's end, and those before a window, get any column: nothing attends to them.
    index = (columns - missing).clamp(0, states.shape[2] - 1).to(states.device)
    index = index[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
    room[:, :, :num_columns] = states.gather(2, index)
    return room


def _roomier(room: torch.Tensor, capacity: int) -> torch.Tensor:
    # Zeros: a masked slot is multiplied by a zero weight, and zero times an uninitialised NaN would be NaN.
    roomier = room.new_zeros(room.shape[0], room.shape[1], capacity, room.shape[3])
    roomier[:, :, : room.shape[2]] = room
    return roomier


__all__ = ["RaggedCache"]
