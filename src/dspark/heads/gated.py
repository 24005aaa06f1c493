"""Gated Markov head: the slot's hidden state decides how much of each bigram direction counts.

`B_k = W2 (sigmoid(G [h_k; e]) * e)` with `e = W1[x_{k-1}]`; concatenation order hidden, then embedding, as DeepSpec.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..ops.markov_step import GatedFeatures, MarkovTables
from ..ops.markov_step.torch import gated_features
from .base import SequentialHead
from .plain import plain_weight


class GatedMarkovHead(SequentialHead):
    """Markov head with a gate from the hidden state."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.gate_proj = nn.Linear(config.hidden_size + self.rank, self.rank)

    def features(
        self,
        previous: torch.Tensor,
        hidden: torch.Tensor,
        state: torch.Tensor | None,  # noqa: ARG002
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Gated embedding; see [`SequentialHead.features`]."""
        return gated_features(self.gate_proj(torch.cat([hidden, previous], dim=-1)), previous), None

    def op_tables(self, hidden: torch.Tensor, state: torch.Tensor | None) -> MarkovTables | None:  # noqa: ARG002
        """Both tables and the gate, split by what it reads; see [`SequentialHead.op_tables`]."""
        weight = plain_weight(self.gate_proj, hidden)
        if weight is None:
            return None
        of_hidden, of_previous = weight.split([hidden.shape[-1], self.rank], dim=-1)
        part = nn.functional.linear(hidden, of_hidden, self.gate_proj.bias)
        return self._plain_tables(hidden, GatedFeatures(of_previous, part))
