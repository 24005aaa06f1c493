"""`TrainingConfig`: `TrainingArguments` with the DSpark recipe as defaults, plus what only a drafter has."""

from __future__ import annotations

from dataclasses import dataclass, field

from transformers import TrainingArguments

from ..objective import Objective


@dataclass
class TrainingConfig(TrainingArguments):
    """Settings of a training run. Every `TrainingArguments` field works as in transformers.

    Changed defaults are the reference recipe's (DeepSpec): learning rate 6e-4, warm-up over the first 4% of steps, no
    weight decay, gradient clipping at 1.0.

    Attributes:
        ce, l1, confidence: Weights of the loss terms; see [`Objective`].
        decay: Loss weight of draft position k = 0, 1, ... is `exp(-k / decay)`; 0: all weigh 1.
        num_anchors: Most blocks drawn per sequence and step.
        detach_confidence: Keep the confidence loss out of the backbone (the reference does not).
        max_length: Sequences lose what is beyond this many tokens.
        group_by_length: Batch sequences of like length.
        train_lm_head: Also train an LM head the drafter owns (reduced vocabulary). Frozen by default: its rows are the
            target's.
    """

    learning_rate: float = 6e-4
    warmup_steps: float = 0.04  # below 1: a share of all steps
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    lr_scheduler_type: str = "cosine"
    logging_steps: float = 10
    remove_unused_columns: bool = False  # items hold just what the forward takes
    ce: float = field(default=0.1, metadata={"help": "Weight of the cross-entropy against the text."})
    l1: float = field(default=0.9, metadata={"help": "Weight of the L1 distance to the target's law."})
    confidence: float = field(default=1.0, metadata={"help": "Weight of the confidence loss."})
    decay: float = field(default=4.0, metadata={"help": "Decay length of the loss along a block; 0: none."})
    num_anchors: int = field(default=512, metadata={"help": "Most blocks per sequence and step."})
    detach_confidence: bool = field(default=False, metadata={"help": "Keep the confidence loss out of the backbone."})
    max_length: int = field(default=4096, metadata={"help": "Most tokens of a sequence."})
    group_by_length: bool = field(default=True, metadata={"help": "Batch sequences of like length."})
    train_lm_head: bool = field(default=False, metadata={"help": "Also train an LM head the drafter owns."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_length < 3:
            raise ValueError(
                f"`max_length` must be at least 3 (a prompt token, an anchor and its label), got {self.max_length}."
            )
        self.objective  # noqa: B018 - its constructor checks the weights

    @property
    def objective(self) -> Objective:
        """The loss these settings describe."""
        return Objective(
            ce=self.ce,
            l1=self.l1,
            confidence=self.confidence,
            decay=self.decay or None,
            num_anchors=self.num_anchors,
            detach_confidence=self.detach_confidence,
        )


__all__ = ["TrainingConfig"]
