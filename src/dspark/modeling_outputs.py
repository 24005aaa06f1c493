"""What the parts of a drafter's pass return: the parallel block, the walk along it, and the two forwards' outputs.

Shape letters as in `modeling_dspark`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers.utils import ModelOutput


class DraftBlock(NamedTuple):
    """One parallel pass (step 2).

    Attributes:
        hidden: `[B, g, D]`, after the final norm.
        base_logits: `[B, g, Vd]` (U_k).
        anchor_hidden: `[B, D]` of an anchor slot that drafts nothing; None where it drafts.
    """

    hidden: torch.Tensor
    base_logits: torch.Tensor
    anchor_hidden: torch.Tensor | None = None


def split_anchor(config: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Hidden states `[..., q, D]` of all slots as those that draft `[..., g, D]` and the anchor's if it does not."""
    return (hidden, None) if config.sample_from_anchor else (hidden[..., 1:, :], hidden[..., 0, :])


class Walk(NamedTuple):
    """One left-to-right walk of the sequential head (step 3).

    Attributes:
        token_ids: int64 `[B, g]`, target ids.
        logits: `[B, g, Vd]`, base logits plus transition bias along the chosen tokens.
        previous_ids: int64 `[B, g]`, the token before each slot.
    """

    token_ids: torch.Tensor
    logits: torch.Tensor
    previous_ids: torch.Tensor


@dataclass
class DraftOutput(ModelOutput):
    """One stateless round of drafting.

    Attributes:
        token_ids: int64 `[B, g]`, target ids.
        base_logits: `[B, g, Vd]`, before the sequential head.
        logits: `[B, g, Vd]`, after it; with a reduced vocabulary column j is token `draft_token_ids[j]`.
        confidence_logits: float32 `[B, g]`, or None without a confidence head.
        hidden_states: `[B, g, D]`, after the final norm.
        context_features: `[B, S, D]`.
    """

    token_ids: torch.Tensor | None = None
    base_logits: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    confidence_logits: torch.Tensor | None = None
    hidden_states: torch.Tensor | None = None
    context_features: torch.Tensor | None = None


@dataclass
class DSparkTrainingOutput(ModelOutput):
    """Result of the training forward.

    Attributes:
        loss: Scalar.
        ce_loss, l1_loss, confidence_loss: Scalar terms, detached.
        acceptance: Analytic acceptance `1 - L1 / 2`, float32 `[B, A, g]`, detached; None without the target's law.
        supervised: bool `[B, A, g]`, positions that count.
        logits: Teacher-forced logits `[B, A, g, Vd]`, detached.
        confidence_logits: float32 `[B, A, g]`, detached, or None.
    """

    loss: torch.Tensor | None = None
    ce_loss: torch.Tensor | None = None
    l1_loss: torch.Tensor | None = None
    confidence_loss: torch.Tensor | None = None
    acceptance: torch.Tensor | None = None
    supervised: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    confidence_logits: torch.Tensor | None = None


__all__ = ["DSparkTrainingOutput", "DraftBlock", "DraftOutput", "Walk", "split_anchor"]
