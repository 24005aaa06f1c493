"""The training loss: cross-entropy + L1 to the target's law + confidence, weighted along the block.

`loss = ce * CE + l1 * ||p_d - p_t||_1 + confidence * BCE(c, 1 - L1 / 2)`, each a mean weighted `exp(-k / decay)` over
supervised positions (paper section 3.3; constants and the unhalved L1 from the reference). Pure tensors.
Shape letters: `N` block positions of a batch (any leading shape), `Vd` width of the drafter's logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional as F  # noqa: N812 - the usual name

from ..ops.training_loss.torch import missing_mass

_EPSILON = 1e-6  # on the denominators, as the reference: an unsupervised batch gives 0, not NaN


@dataclass(frozen=True)
class Objective:
    """Weights of the loss terms and the anchors per sequence.

    Attributes:
        ce: Weight of the cross-entropy against the text's tokens.
        l1: Weight of the L1 distance between draft and target law.
        confidence: Weight of the confidence head's binary cross-entropy (unused without a confidence head).
        decay: Positions k = 0, 1, ... weigh `exp(-k / decay)`; None: all weigh 1. The reference's block-7 recipes use
            4.0, the paper the block size.
        num_anchors: Most blocks drawn per sequence.
        num_drafts: Drafts of a block, at least 1; None: all that the drafter gives. Narrower blocks teach it the
            widths that the `auto` policy runs.
        detach_confidence: Whether the confidence loss leaves the backbone alone (the reference: no).
        heads_only: Whether only the sequential and confidence heads learn; the backbone then runs without gradient.
        chunk_size: Block positions whose vocabulary-wide tensors exist at a time; None: all of them, and the training
            forward returns their logits. Values and gradients do not depend on it.
    """

    ce: float = 0.1
    l1: float = 0.9
    confidence: float = 1.0
    decay: float | None = 4.0
    num_anchors: int = 512
    detach_confidence: bool = False
    heads_only: bool = False
    chunk_size: int | None = 256
    num_drafts: int | None = None

    def __post_init__(self) -> None:
        if min(self.ce, self.l1, self.confidence) < 0 or not (self.ce or self.l1 or self.confidence):
            raise ValueError(
                f"Loss weights must be at least 0 and not all 0, got ce={self.ce}, l1={self.l1}, "
                f"confidence={self.confidence}."
            )
        if self.decay is not None and self.decay <= 0:
            raise ValueError(f"`decay` must be positive or None, got {self.decay}.")
        if self.num_anchors < 1:
            raise ValueError(f"`num_anchors` must be at least 1, got {self.num_anchors}.")
        if self.num_drafts is not None and self.num_drafts < 1:
            raise ValueError(f"`num_drafts` must be at least 1 or None, got {self.num_drafts}.")
        if self.chunk_size is not None and self.chunk_size < 1:
            raise ValueError(f"`chunk_size` must be at least 1 or None, got {self.chunk_size}.")

    @property
    def needs_target_law(self) -> bool:
        """Whether the target's distribution is needed at all (cross-entropy alone does without)."""
        return bool(self.l1 or self.confidence)

    def require_law(self, has_law: bool, has_confidence: bool) -> None:
        """Refuse an objective that compares with a law that is not there.

        Raises:
            ValueError: The target's law is needed and missing.
        """
        if not has_law and (self.l1 or (self.confidence and has_confidence)):
            raise ValueError(
                f"The objective (l1={self.l1}, confidence={self.confidence}) compares with the target's law, but no "
                "target hidden states were given. Pass `target_last_hidden_states`, or use Objective(ce=1, l1=0, "
                "confidence=0)."
            )


class TargetLaw(NamedTuple):
    """The target's probabilities on the draft vocabulary at block positions.

    Attributes:
        probs: float32 `[N, Vd]`; sums to less than 1 when the draft vocabulary leaves tokens out.
    """

    probs: torch.Tensor

    @classmethod
    def from_logits(
        cls, logits: torch.Tensor, draft_token_ids: torch.Tensor | None, logsumexp: torch.Tensor | None = None
    ) -> TargetLaw:
        """Law of target logits.

        Args:
            logits: `[N, V]`, or `[N, Vd]` already restricted when `logsumexp` is given.
            draft_token_ids: int64 `[Vd]`, the draft vocabulary; None: all of V.
            logsumexp: float32 `[N]` over all of V; None: computed here.
        """
        logits = logits.float()
        if logsumexp is None:
            logsumexp = logits.logsumexp(-1)
            if draft_token_ids is not None:
                logits = logits[..., draft_token_ids]
        return cls((logits - logsumexp[..., None]).exp())


def l1_distance(draft_probs: torch.Tensor, target: TargetLaw) -> torch.Tensor:
    """`||p_d - p_t||_1` over all of V, `[N]`: tokens outside the draft vocabulary count with the target's mass."""
    return (draft_probs - target.probs).abs().sum(-1) + missing_mass(target.probs)


class LossTerms(NamedTuple):
    """Loss and what it is made of; scalars unless said otherwise.

    Attributes:
        loss: Weighted sum of the three means.
        ce, l1, confidence: The means themselves.
        weight: Sum of position weights, the denominator of the means.
        acceptance: `1 - L1 / 2` per position, `[..., K]` in [0, 1]; None without a target law.
    """

    loss: torch.Tensor
    ce: torch.Tensor
    l1: torch.Tensor
    confidence: torch.Tensor
    weight: torch.Tensor
    acceptance: torch.Tensor | None


def position_weights(supervised: torch.Tensor, decay: float | None) -> torch.Tensor:
    """`exp(-k / decay)` on supervised positions, 0 elsewhere: float32, shape of `supervised [..., K]`."""
    weights = supervised.float()
    if decay is None:
        return weights
    k = torch.arange(supervised.shape[-1], device=supervised.device, dtype=torch.float32)
    return weights * torch.exp(-k / decay)


def block_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    supervised: torch.Tensor,
    *,
    objective: Objective,
    target: TargetLaw | None,
    confidence_logits: torch.Tensor | None,
) -> LossTerms:
    """Loss of teacher-forced blocks whose logits are all there; `fused.vocabulary_loss` is the form for training.

    Args:
        logits: Draft logits after the sequential head, `[..., K, Vd]`.
        labels: Index of each label in the draft vocabulary, int64 `[..., K]`; -1 where the vocabulary lacks it (such a
            position has no cross-entropy but keeps its L1, where the missing mass is counted).
        supervised: bool `[..., K]`.
        objective: Weights.
        target: Target law `[..., K, Vd]`; required unless only the cross-entropy counts.
        confidence_logits: `[..., K]`, or None without a confidence head.

    Raises:
        ValueError: The objective needs the target's law and none was given.
    """
    objective.require_law(target is not None, confidence_logits is not None)
    logits = logits.float()
    weights = position_weights(supervised, objective.decay)
    ce = l1 = logits.new_zeros(())
    acceptance = None
    if objective.ce:
        flat = F.cross_entropy(logits.flatten(0, -2), labels.clamp(min=0).flatten(), reduction="none")
        ce = (flat.view_as(labels) * (labels >= 0) * weights).sum()
    if target is not None:
        distance = l1_distance(logits.softmax(-1), target)
        acceptance = (1 - 0.5 * distance.detach()).clamp(0, 1)
        if objective.l1:
            l1 = (distance * weights).sum()
    main = objective.ce * ce + objective.l1 * l1
    return combine_terms(main, ce, l1, weights, acceptance, confidence_logits, objective)


def combine_terms(
    main: torch.Tensor,
    ce: torch.Tensor,
    l1: torch.Tensor,
    weights: torch.Tensor,
    acceptance: torch.Tensor | None,
    confidence_logits: torch.Tensor | None,
    objective: Objective,
) -> LossTerms:
    """Weighted sums over positions to means, plus the confidence term.

    Args:
        main: Weighted sum of `ce * CE + l1 * L1`.
        ce, l1: Weighted sums of the terms.
        weights: Position weights `[..., K]`.
        acceptance: `[..., K]`, or None without a target law.
        confidence_logits: `[..., K]`, or None without a confidence head.
        objective: Weights of the terms.
    """
    total = weights.sum()
    loss, confidence = main / (total + _EPSILON), main.new_zeros(())
    if objective.confidence and confidence_logits is not None and acceptance is not None:
        scores = F.binary_cross_entropy_with_logits(confidence_logits.float(), acceptance, reduction="none")
        confidence = (scores * weights).sum() / (total + _EPSILON)
        loss = loss + objective.confidence * confidence
    return LossTerms(loss, ce / (total + _EPSILON), l1 / (total + _EPSILON), confidence, total, acceptance)
