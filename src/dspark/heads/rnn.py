"""Recurrent head (paper eq. 6): a small state carries the whole drafted prefix, not only its last token.

With `e = W1[x_{k-1}]` and `[g, c, o] = J [s; e; h_k]`: `s' = sigmoid(g) s + (1 - sigmoid(g)) tanh(c)`,
`B_k = W2 tanh(o)`, `s = 0` at the block's start. The output of a slot uses the state before it, as DeepSpec.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..ops.markov_step import MarkovTables, RecurrentFeatures
from ..ops.markov_step.torch import recurrent_features
from .base import SequentialHead
from .plain import plain_weight


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
        return recurrent_features(self.joint_proj(torch.cat([state, previous, hidden], dim=-1)), state)

    def op_tables(self, hidden: torch.Tensor, state: torch.Tensor | None) -> MarkovTables | None:
        """Both tables and the recurrence, split by what it reads; see [`SequentialHead.op_tables`]."""
        weight = plain_weight(self.joint_proj, hidden)
        if weight is None or state is None:
            return None
        of_state_and_previous, of_hidden = weight.split([2 * self.rank, hidden.shape[-1]], dim=-1)
        part = nn.functional.linear(hidden, of_hidden, self.joint_proj.bias)
        return self._plain_tables(hidden, RecurrentFeatures(of_state_and_previous, part, state.float()))

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
