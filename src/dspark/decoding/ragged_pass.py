"""The geometry of one target pass over several rows (step 6): which slot a token goes to and what it attends to.

Row r has `lengths[r]` slots filled in the `RaggedCache` and brings `counts[r]` new tokens. Example: rows with 3 and 5
slots bring 3 and 1 tokens. *padded*: tokens `[2, 3]`, row 1 repeating its last one; *flattened*: tokens `[1, 4]` of
rows 0 0 0 1 for slots 3 4 5 5, so that every linear layer costs 4 tokens instead of 6; *aligned*: as padded, but the
keys are handed out shifted to a common right end, which is what any left-padded batch looks like.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

Form = Literal["flattened", "padded", "aligned"]
_WORTHWHILE = 0.9  # laying queries out per row and back costs about what a tenth of the tokens does


def saves_by_flattening(counts: Sequence[int]) -> bool:
    """Whether rows that bring `counts` tokens are cheaper as one sequence than padded to the longest."""
    return sum(counts) <= _WORTHWHILE * len(counts) * max(counts)


class _Indices(NamedTuple):
    """Index tensors of a pass on one device, int64.

    Attributes:
        rows, slots: `[N]`, row and cache slot of each token of the pass.
        padded: `[R * q]`, token of a flattened pass at each place of the padded one.
        flat: `[N]`, place of each token of a flattened pass in the padded one.
        lengths: `[R]`.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    padded: torch.Tensor
    flat: torch.Tensor
    lengths: torch.Tensor


class RaggedPass:
    """One pass; shape letters: `R` rows, `q` most tokens of a row, `N` tokens of the pass, `W` slots read.

    Args:
        lengths: Slots filled per row.
        counts: New tokens per row, at least 1.
        form: See above.
        is_visible: bool `[R, P]`, False at slots of the prompt that are masked for good; None: there is none.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        counts: Sequence[int],
        form: Form,
        *,
        is_visible: torch.Tensor | None = None,
    ) -> None:
        self.lengths = list(lengths)
        self.counts = list(counts)
        self.form = form
        self.width = max(counts)
        # Slots behind which no row has written after this pass, W; every layer asks.
        ends = [length + count for length, count in zip(lengths, counts, strict=True)]
        self.num_slots = max(ends) if form == "flattened" else max(lengths) + self.width
        self._is_visible = is_visible
        self._indices: dict[torch.device, _Indices] = {}
        self._masks: dict[tuple[int | None, torch.device], torch.Tensor] = {}

    @property
    def num_tokens(self) -> int:
        """Tokens that every linear layer of the target sees."""
        return sum(self.counts) if self.form == "flattened" else len(self.counts) * self.width

    def first_slot(self, window: int | None) -> int:
        """First slot that any token of the pass sees in a layer with this window (None: full attention)."""
        return 0 if window is None or self.form == "aligned" else max(0, min(self.lengths) + 1 - window)

    def indices(self, device: torch.device) -> _Indices:
        """This pass's index tensors on `device`."""
        if device not in self._indices:
            self._indices[device] = _Indices(*(index.to(device) for index in self._build()))
        return self._indices[device]

    def _build(self) -> _Indices:
        lengths, counts = torch.tensor(self.lengths), torch.tensor(self.counts)
        offsets = torch.arange(self.width)
        flat = (offsets < counts[:, None]).flatten().nonzero()[:, 0]
        starts = counts.cumsum(0) - counts
        padded = (starts[:, None] + torch.minimum(offsets, counts[:, None] - 1)).flatten()
        places = flat if self.form == "flattened" else torch.arange(len(self.counts) * self.width)
        rows = places // self.width
        return _Indices(rows, lengths[rows] + places % self.width, padded, flat, lengths)

    def tokens(self, blocks: list[list[int]], device: torch.device) -> torch.Tensor:
        """Ids of the pass, int64 `[1, N]` flattened or `[R, q]`."""
        if self.form == "flattened":
            return torch.tensor([[token for block in blocks for token in block]], device=device)
        return torch.tensor([block + [block[-1]] * (self.width - len(block)) for block in blocks], device=device)

    def per_token(self, values: torch.Tensor) -> torch.Tensor:
        """A value per row `[..., R, 1]` as one per token, `[..., 1, N]` or `[..., R, q]`."""
        if self.form == "flattened":
            return values[..., self.indices(values.device).rows, 0].unsqueeze(-2)
        return values.expand(*values.shape[:-1], self.width)

    def slots(self, device: torch.device) -> torch.Tensor:
        """Cache slot of each token, int64 `[1, N]` or `[R, q]`."""
        return self.indices(device).slots.view(1 if self.form == "flattened" else len(self.counts), -1)

    def by_row(self, values: torch.Tensor) -> torch.Tensor:
        """What a pass gave per token, `[1, N, ...]` or `[R, q, ...]`, as `[R, q, ...]`; padding repeats."""
        if self.form != "flattened":
            return values
        laid_out = values[0].index_select(0, self.indices(values.device).padded)
        return laid_out.unflatten(0, (len(self.counts), self.width))

    def by_token(self, values: torch.Tensor) -> torch.Tensor:
        """The inverse of `by_row`."""
        if self.form != "flattened":
            return values
        return values.flatten(0, 1).index_select(0, self.indices(values.device).flat)[None]

    def mask(self, window: int | None, device: torch.device) -> torch.Tensor:
        """Which slots each token attends to, bool `[R, 1, q, W - first_slot(window)]`; slots are positions."""
        key = (window, device)
        if key not in self._masks:
            own = self.indices(device).lengths[:, None] + torch.arange(self.width, device=device)
            slots = torch.arange(self.first_slot(window), self.num_slots, device=device)
            mask = slots <= own[..., None]
            if window is not None:
                mask = mask & (slots > own[..., None] - window)
            if self._is_visible is not None:
                mask = mask & self._visible(device)[:, None, self.first_slot(window) :]
            self._masks[key] = mask[:, None]
        return self._masks[key]

    def padding_mask(self, device: torch.device) -> torch.Tensor:
        """Mask of the aligned form, int64 `[R, W]`: 0 left of each row's first slot and where the prompt has holes."""
        visible = self.aligned(self._visible(device)[:, None, :, None])[:, 0, :, 0]
        first = max(self.lengths) - self.indices(device).lengths
        return (visible & (torch.arange(self.num_slots, device=device) >= first[:, None])).long()

    def _visible(self, device: torch.device) -> torch.Tensor:
        visible = torch.ones(len(self.counts), self.num_slots, dtype=torch.bool, device=device)
        if self._is_visible is not None:
            visible[:, : self._is_visible.shape[1]] = self._is_visible.to(device)[:, : self.num_slots]
        return visible

    def aligned(self, room: torch.Tensor) -> torch.Tensor:
        """`[R, KV, C, x]` by slot as `[R, KV, W, x]` whose rows all end at the right; left of them anything."""
        room = room[:, :, : self.num_slots]
        if len(set(self.lengths)) == 1:
            return room
        shift = self.indices(room.device).lengths - max(self.lengths)
        index = (torch.arange(self.num_slots, device=room.device) + shift[:, None]).clamp(min=0)
        return room.gather(2, index[:, None, :, None].expand(-1, room.shape[1], -1, room.shape[3]))


__all__ = ["Form", "RaggedPass", "saves_by_flattening"]
