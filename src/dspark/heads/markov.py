"""Vanilla Markov head (paper eq. 5): `B_k = W1[x_{k-1}] W2`. The bias sees the previous token and nothing else."""

from __future__ import annotations

import torch

from ..ops.markov_step import MarkovTables
from .base import SequentialHead


class MarkovHead(SequentialHead):
    """Low-rank bigram bias."""

    def features(
        self,
        previous: torch.Tensor,
        hidden: torch.Tensor,  # noqa: ARG002
        state: torch.Tensor | None,  # noqa: ARG002
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The Markov embedding itself; see [`SequentialHead.features`]."""
        return previous, None

    def op_tables(self, hidden: torch.Tensor, state: torch.Tensor | None) -> MarkovTables | None:  # noqa: ARG002
        """Both tables; see [`SequentialHead.op_tables`]."""
        return self._plain_tables(hidden)
