"""Gated Markov head: the slot's hidden state decides how much of each bigram direction counts.

`B_k = W2 (sigmoid(G [h_k; e]) * e)` with `e = W1[x_{k-1}]`; concatenation order hidden, then embedding, as DeepSpec.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .base import SequentialHead


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
        gate = torch.sigmoid(self.gate_proj(torch.cat([hidden, previous], dim=-1)))
        return gate * previous, None
