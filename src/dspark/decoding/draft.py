"""Step 2: one bidirectional pass over `[anchor, mask, ...]`, for all live rows at once."""

from __future__ import annotations

import torch

from ..modeling_dspark import DraftBlock
from .state import DecodingRun


def draft_block(run: DecodingRun, num_drafts: int) -> DraftBlock:
    """Hidden states and base logits of every live row's block of `num_drafts` slots."""
    assert run.context is not None
    with run.stats.forward("drafter"):
        anchors = torch.tensor(run.anchors, device=run.drafter.device)
        return run.drafter.draft_block(anchors, run.context, run.shared, num_drafts)


__all__ = ["draft_block"]
