"""`TrainingConfig`: `TrainingArguments` with the DSpark recipe as defaults, plus what only a drafter has."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from transformers import TrainingArguments

from ..modeling_dspark import DSparkDrafter
from ..objective import Objective

# transformers 5.24 renamed the field; the old name still works there, with a warning.
_NAMES = {field.name for field in fields(TrainingArguments)}
CHECKPOINTING = "activation_checkpointing" if "activation_checkpointing" in _NAMES else "gradient_checkpointing"
DECAYING = "warmup_stable_decay"


@dataclass
class TrainingConfig(TrainingArguments):
    """Settings of a training run. Every `TrainingArguments` field works as in transformers.

    Changed defaults are the reference recipe's (DeepSpec): learning rate 6e-4, warm-up over the first 4% of steps, no
    weight decay, gradient clipping at 1.0.

    Attributes:
        ce, l1, confidence: Weights of the loss terms; see [`Objective`].
        decay: Loss weight of draft position k = 0, 1, ... is `exp(-k / decay)`; 0: all weigh 1.
        num_anchors: Most blocks drawn per sequence and step.
        block_widths: Drafts of a step's blocks, one width per step in turn; empty: whole blocks. Steps of narrower
            blocks draw more of them, so that all steps cost alike.
        detach_confidence: Keep the confidence loss out of the backbone (the reference does not).
        decay_share: With the schedule `"warmup_stable_decay"`: the last share of all steps, in which the rate falls.
        head_only_steps: In the first so many steps only the sequential and confidence heads learn.
        eval_every: Steps between evaluations, where there is something to evaluate; 0: a tenth of the run.
        eval_new_tokens: Tokens decoded per evaluation prompt.
        keep_best: Keep the weights of the best evaluation and end with them.
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
    block_widths: list[int] = field(default_factory=list, metadata={"help": "Drafts per block, in turn by step."})
    detach_confidence: bool = field(default=False, metadata={"help": "Keep the confidence loss out of the backbone."})
    decay_share: float = field(
        default=0.2, metadata={"help": "Share of the steps in which warmup_stable_decay falls."}
    )
    head_only_steps: int = field(default=0, metadata={"help": "First steps in which only the heads learn."})
    eval_every: int = field(default=0, metadata={"help": "Steps between evaluations; 0: a tenth of the run."})
    eval_new_tokens: int = field(default=64, metadata={"help": "Tokens decoded per evaluation prompt."})
    keep_best: bool = field(default=False, metadata={"help": "End with the weights of the best evaluation."})
    max_length: int = field(default=4096, metadata={"help": "Most tokens of a sequence."})
    group_by_length: bool = field(default=True, metadata={"help": "Batch sequences of like length."})
    train_lm_head: bool = field(default=False, metadata={"help": "Also train an LM head the drafter owns."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_length < 3:
            raise ValueError(
                f"`max_length` must be at least 3 (a prompt token, an anchor and its label), got {self.max_length}."
            )
        for name, least in (("head_only_steps", 0), ("eval_every", 0), ("eval_new_tokens", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"`{name}` must be at least {least}, got {getattr(self, name)}.")
        if not 0 < self.decay_share <= 1:
            raise ValueError(f"`decay_share` must lie in (0, 1], a share of all steps, got {self.decay_share}.")
        # Where a step gives some parameters no gradient, DDP has to be told.
        leaves_out = self.head_only_steps or not (self.confidence and (self.ce or self.l1))
        if leaves_out and self.ddp_find_unused_parameters is None:  # type: ignore[has-type]
            self.ddp_find_unused_parameters = True
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


def check_settings(args: TrainingConfig, drafter: DSparkDrafter, *, has_evaluation: bool) -> None:
    """Refuse settings that a drafter or what there is to evaluate cannot follow.

    Raises:
        ValueError: Says which, and the way out.
    """
    has_head = drafter.markov_head is not None or (drafter.confidence_head is not None and args.confidence)
    if args.head_only_steps and not has_head:
        raise ValueError(
            f"`head_only_steps` {args.head_only_steps} trains the sequential and confidence heads alone, and this "
            "drafter has none with a loss. Set it to 0."
        )
    most = drafter.config.num_draft_tokens
    if bad := [width for width in args.block_widths if not 1 <= width <= most]:
        raise ValueError(f"`block_widths` must lie in 1..{most}, the drafts of a whole block, got {bad[0]}.")
    if args.keep_best and not has_evaluation:
        raise ValueError(
            "`keep_best` needs something to evaluate: prompts to decode (--eval-prompts) or held-out sequences "
            "(--held-out)."
        )


__all__ = ["CHECKPOINTING", "DECAYING", "TrainingConfig", "check_settings"]
