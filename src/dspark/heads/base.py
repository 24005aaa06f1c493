"""The sequential stage: what makes a drafted block one sentence instead of independent guesses (step 3 of the round).

A head turns the previous token (and, for some, the slot's hidden state and a recurrent state) into a transition bias
that is added to the base logits (paper eq. 4-6). `block_bias` is the teacher-forced form for training, `step` the form
for drafting; both give the same numbers. Shape letters: `B` rows, `K` draft positions, `D` drafter width, `r` head
rank, `Vd` width of the drafter's logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..ops.markov_step import GatedFeatures, MarkovTables, RecurrentFeatures
from .plain import plain_weight


class SequentialHead(nn.Module):
    """Base of the sequential heads. Tensor names follow DeepSpec (`markov_w1`, `markov_w2`)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.rank: int = config.markov_rank
        self.markov_w1 = nn.Embedding(config.vocab_size, self.rank)  # previous token, in TARGET ids
        self.markov_w2 = nn.Linear(self.rank, config.num_logits, bias=False)

    def embed_previous(self, previous_ids: torch.Tensor) -> torch.Tensor:
        """Markov embedding `W1[x_{k-1}]` of previous tokens `[...]` (target ids): `[..., r]`."""
        return self.markov_w1(previous_ids)

    def initial_state(self, batch_size: int, *, like: torch.Tensor) -> torch.Tensor | None:  # noqa: ARG002
        """State before the first slot of a block; None for heads without memory."""
        return None

    def start(
        self, anchor_ids: torch.Tensor, anchor_hidden: torch.Tensor | None, *, like: torch.Tensor
    ) -> torch.Tensor | None:
        """State before the first slot that drafts.

        Args:
            anchor_ids: int64 `[B]`, target ids.
            anchor_hidden: `[B, D]` of an anchor slot that drafts nothing: a head with memory has seen it all the same,
                with the anchor as the token before it, as in training. None where the anchor slot drafts.
            like: Hidden states, for dtype and device.
        """
        state = self.initial_state(len(anchor_ids), like=like)
        if state is None or anchor_hidden is None:
            return state
        return self.features(self.embed_previous(anchor_ids), anchor_hidden, state)[1]

    def features(
        self, previous: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What `W2` is applied to, for one slot.

        Args:
            previous: `embed_previous` of the token before the slot, `[..., r]`.
            hidden: The slot's hidden state after the final norm, `[..., D]`.
            state: The head's state before the slot, or None.

        Returns:
            Features `[..., r]` and the state after the slot.
        """
        raise NotImplementedError

    def step(
        self, previous_ids: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Transition bias of one slot.

        Args:
            previous_ids: Token before the slot, int64 `[B]`, target ids.
            hidden: The slot's hidden state, `[B, D]`.
            state: State from the slot before (`initial_state` at the block's start).

        Returns:
            Bias `[B, Vd]` and the new state.
        """
        features, state = self.features(self.embed_previous(previous_ids), hidden, state)
        return self.markov_w2(features), state

    def correct(
        self,
        base_logits: torch.Tensor,
        previous_ids: torch.Tensor,
        hidden: torch.Tensor,
        state: torch.Tensor | None,
        candidates: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits of one slot with its transition bias.

        Args:
            base_logits: U_k, `[B, Vd]`.
            previous_ids, hidden, state: See [`SequentialHead.step`].
            candidates: Columns that see the bias, int64 `[B, n]`, none twice in a row; the others become -inf. None:
                all.

        Returns:
            Logits `[B, Vd]` and the new state.
        """
        if candidates is None:
            bias, state = self.step(previous_ids, hidden, state)
            return base_logits + bias, state
        features, state = self.features(self.embed_previous(previous_ids), hidden, state)
        weight = plain_weight(self.markov_w2, features)
        if weight is None:  # of a layer that is more than its weight only the module knows the numbers
            bias = self.markov_w2(features).gather(1, candidates)
        else:
            bias = torch.bmm(weight[candidates], features[..., None])[..., 0]
        chosen = base_logits.gather(1, candidates) + bias
        return chosen.new_full(base_logits.shape, -torch.inf).scatter_(1, candidates, chosen), state

    def op_tables(self, hidden: torch.Tensor, state: torch.Tensor | None) -> MarkovTables | None:  # noqa: ARG002
        """The head as the Markov op takes it; None where it is more than plain weights, or of a kind the op lacks.

        Args:
            hidden: Hidden states of a block, `[B, K, D]`.
            state: State before its first slot, as `start` gives it.
        """
        return None

    def _plain_tables(
        self, like: torch.Tensor, features: GatedFeatures | RecurrentFeatures | None = None
    ) -> MarkovTables | None:
        """Both tables with what `features` adds, or None."""
        w1, w2 = plain_weight(self.markov_w1, like), plain_weight(self.markov_w2, like)
        return None if w1 is None or w2 is None else MarkovTables(w1, w2, features=features)

    def block_features(
        self,
        previous_ids: torch.Tensor,
        hidden: torch.Tensor,
        anchor_hidden: torch.Tensor | None = None,  # noqa: ARG002 - for heads with memory
    ) -> torch.Tensor:
        """What `W2` is applied to, for whole teacher-forced blocks.

        Args:
            previous_ids: Token before each drafting slot, int64 `[..., K]` (the first: the anchor), target ids.
            hidden: Hidden states `[..., K, D]`.
            anchor_hidden: `[..., D]`, see [`SequentialHead.start`].

        Returns:
            Features `[..., K, r]`.
        """
        return self.features(self.embed_previous(previous_ids), hidden, None)[0]

    def block_bias(
        self, previous_ids: torch.Tensor, hidden: torch.Tensor, anchor_hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Teacher-forced bias `[..., K, Vd]` of whole blocks; arguments as `block_features`."""
        return self.markov_w2(self.block_features(previous_ids, hidden, anchor_hidden))
