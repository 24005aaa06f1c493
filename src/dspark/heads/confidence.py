"""Confidence head (paper eq. 7): how likely slot k is accepted, given that all slots before it are.

It sees the slot's hidden state and, optionally, the Markov embedding of the token BEFORE the slot, never the slot's
own token: a cut that looked at it would bias the output (paper Appendix A).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..ops.confidence import ConfidenceWeights
from .plain import plain_weight


class ConfidenceHead(nn.Module):
    """Linear read-out `w . [h_k; W1[x_{k-1}]] + b`."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.with_markov: bool = config.confidence_head_with_markov
        width = config.hidden_size + (config.markov_rank if self.with_markov else 0)
        self.proj = nn.Linear(width, 1, bias=config.confidence_head_bias)

    def forward(self, hidden: torch.Tensor, previous: torch.Tensor | None) -> torch.Tensor:
        """Confidence logits.

        Args:
            hidden: Hidden states after the final norm, `[..., D]`.
            previous: Markov embedding of the token before each slot `[..., r]`; unused (may be None) without Markov.

        Returns:
            Logits `[...]`, float32; the conditional acceptance probability is their sigmoid.
        """
        if self.with_markov:
            if previous is None:
                raise ValueError("The confidence head takes the Markov embedding of the previous token, got None.")
            hidden = torch.cat([hidden, previous.to(hidden.dtype)], dim=-1)
        return self.proj(hidden).squeeze(-1).float()

    def op_weights(self, hidden: torch.Tensor, embedding: nn.Module | None) -> ConfidenceWeights | None:
        """The head as the confidence op takes it; None where it is more than plain weights.

        Args:
            hidden: Hidden states it is to read.
            embedding: Of the previous token, that of the sequential head; None without one.
        """
        weight, w1 = plain_weight(self.proj, hidden), None
        if self.with_markov and embedding is not None:
            w1 = plain_weight(embedding, hidden)
        if weight is None or (self.with_markov and w1 is None):
            return None
        return ConfidenceWeights(weight[0], self.proj.bias, w1)
