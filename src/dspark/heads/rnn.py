"""Recurrent head (paper eq. 6): a small state carries the whole drafted prefix, not only its last token.

With `e = W1[x_{k-1}]` and `[g, c, o] = J [s; e; h_k]`: `s' = sigmoid(g) s + (1 - sigmoid(g)) tanh(c)`,
`B_k = W2 tanh(o)`, `s = 0` at the block's start. The output of a slot uses the state before it, as DeepSpec.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .base import SequentialHead


class RecurrentHead(SequentialHead):
    """Gated recurrent transition head."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.joint_proj = nn.Linear(config.hidden_size + 2 * self.rank, 3 * self.rank)

    def initial_state(self, batch_size: int, *, like: torch.Tensor) -> torch.Tensor:
        """Zero state `[B, r]` in the dtype and on the device of `like`."""
        return like.new_zeros(batch_size, self.rank)

    def features(
        self, previous: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One recurrence; see [`SequentialHead.features`]."""
        if state is None:
            state = torch.zeros_like(previous)
        gate, candidate, output = self.joint_proj(torch.cat([state, previous, hidden], dim=-1)).chunk(3, dim=-1)
        keep = torch.sigmoid(gate)
        return torch.tanh(output), keep * state + (1 - keep) * torch.tanh(candidate)

    def block_features(
        self, previous_ids: torch.Tensor, hidden: torch.Tensor, anchor_hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Slot after slot, with the state carried along; see [`SequentialHead.block_features`]."""
        previous = self.embed_previous(previous_ids)
        state: torch.Tensor | None = torch.zeros_like(previous[..., 0, :])
        if anchor_hidden is not None:  # the anchor stands before the first drafting slot, and before itself
            state = self.features(previous[..., 0, :], anchor_hidden, state)[1]
        outputs = []
        for k in range(previous_ids.shape[-1]):
            features, state = self.features(previous[..., k, :], hidden[..., k, :], state)
            outputs.append(features)
        return torch.stack(outputs, dim=-2)
