"""What the ops may read of a drafter: its heads' weights, where tensors are on a GPU and a head is nothing but them.

None stands for everything else: the CPU, quantised or adapted heads, kinds of heads or drafters from elsewhere. They
are called as modules.
"""

from __future__ import annotations

import torch

from ..heads import SEQUENTIAL_HEADS
from ..modeling_dspark import DraftBlock, DSparkDrafter
from ..ops.confidence import ConfidenceWeights
from ..ops.dispatch import choose
from ..ops.markov_step import MarkovTables


def markov_tables(drafter: DSparkDrafter, block: DraftBlock, anchors: torch.Tensor) -> MarkovTables | None:
    """The sequential head of a block behind `anchors [B]`, with the draft vocabulary."""
    head = drafter.markov_head
    is_known = head is not None and type(head) in SEQUENTIAL_HEADS.values() and not _has_own(drafter, "walk_block")
    if not is_known or choose("auto", block.base_logits) == "torch":
        return None
    assert head is not None
    tables = head.op_tables(block.hidden, head.start(anchors, block.anchor_hidden, like=block.hidden))
    return None if tables is None else tables._replace(draft_token_ids=drafter.draft_token_ids)


def confidence_weights(drafter: DSparkDrafter, block: DraftBlock) -> ConfidenceWeights | None:
    """The confidence head of a block."""
    head, markov = drafter.confidence_head, drafter.markov_head
    if head is None or _has_own(drafter, "confidence_logits") or choose("auto", block.hidden) == "torch":
        return None
    return head.op_weights(block.hidden, None if markov is None else markov.markov_w1)


def _has_own(drafter: DSparkDrafter, method: str) -> bool:
    """Whether a subclass or an assignment replaced the method that the op stands for."""
    return method in vars(drafter) or getattr(type(drafter), method) is not getattr(DSparkDrafter, method)


__all__ = ["confidence_weights", "markov_tables"]
