"""Step 5: how many drafts of each row are verified, decided before the target runs.

A cut may look at nothing drawn at or after the slot it drops, or sampled output is biased (paper Appendix A). The one
exception ends a draft behind its own end-of-sequence token: what follows is never part of the text, whatever the
target says.
"""

from __future__ import annotations

import torch

from .confidence import Confidence
from .state import DecodingRun, Proposal


def schedule(
    run: DecodingRun, proposal: Proposal, confidence: Confidence | None, limits: list[int]
) -> list[list[int]]:
    """Drafts to verify, per live row.

    Args:
        run: The call.
        proposal: Drafted tokens.
        confidence: Scores, or None.
        limits: Most drafts per row (`DecodingRun.max_drafts`).
    """
    lengths = limits
    if confidence is not None and run.settings.policy != "fixed":
        lengths = [min(pair) for pair in zip(limits, _confident(run, confidence), strict=True)]
    drafts = []
    for tokens, length in zip(proposal.token_ids.tolist(), lengths, strict=True):
        tokens = tokens[:length]
        end = run.stop_rules.first_eos(tokens)
        drafts.append(tokens if end is None else tokens[: end + 1])
    return drafts


def _confident(run: DecodingRun, confidence: Confidence) -> list[int]:
    """Slots of each row before the first that is below a threshold."""
    settings = run.settings
    passes = (confidence.own >= settings.assistant_confidence_threshold) & (
        confidence.survival >= settings.survival_threshold
    )
    return passes.int().cumprod(-1).sum(-1).tolist()


def pad_drafts(drafts: list[list[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Ragged drafts as tensors: ids int64 `[B, K]` (padded with 0) and lengths int64 `[B]`, K the longest."""
    width = max(map(len, drafts), default=0)
    ids = torch.tensor([row + [0] * (width - len(row)) for row in drafts], dtype=torch.long, device=device)
    return ids.view(len(drafts), width), torch.tensor([len(row) for row in drafts], device=device)


__all__ = ["pad_drafts", "schedule"]
