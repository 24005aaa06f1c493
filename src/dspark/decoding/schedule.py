"""Step 5: how many drafts of each row are verified, decided by the call's policy before the target runs.

A cut may look at nothing drawn at or after the slot it drops, or sampled output is biased (paper Appendix A). The one
exception ends a draft behind its own end-of-sequence token: what follows is never part of the text, whatever the
target says.
"""

from __future__ import annotations

import time

import torch

from ..scheduling import RoundObservation
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
    own, survival = (None, None) if confidence is None else (confidence.own.cpu(), confidence.survival.cpu())
    lengths = run.policy.lengths(own, survival, limits)
    drafts = []
    for row, tokens, length in zip(run.rows, proposal.token_ids.tolist(), lengths, strict=True):
        tokens = tokens[:length]
        end = run.requests[row].stop_rules.first_eos(tokens)
        drafts.append(tokens if end is None else tokens[: end + 1])
    return drafts


class RoundWatch:
    """Tells the policy, once a round is over, what it cost and brought: the only way a policy learns of draws.

    Args:
        run: The call.
        num_drafts: Slots drafted per row in this round; 0: none.
    """

    def __init__(self, run: DecodingRun, num_drafts: int) -> None:
        self.run, self.num_drafts = run, num_drafts
        self.start = self.middle = time.perf_counter()
        self.drafts: list[list[int]] = []
        self.survival: list[list[float]] | None = None

    def scheduled(self, drafts: list[list[int]], confidence: Confidence | None) -> None:
        """The round is about to be verified."""
        self.middle = time.perf_counter()
        self.drafts = drafts
        self.survival = None if confidence is None else confidence.survival.tolist()

    def committed(self) -> None:
        """The round is over."""
        rows, stats = len(self.drafts), self.run.stats
        self.run.policy.observe(
            RoundObservation(
                rows=rows,
                slots=self.num_drafts,
                tokens=rows + sum(map(len, self.drafts)),
                draft_seconds=self.middle - self.start,
                verify_seconds=time.perf_counter() - self.middle,
                verified=stats.verified[-rows:],
                accepted=stats.accepted[-rows:],
                survival=self.survival,
            )
        )


def pad_drafts(drafts: list[list[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Ragged drafts as tensors: ids int64 `[B, K]` (padded with 0) and lengths int64 `[B]`, K the longest."""
    width = max(map(len, drafts), default=0)
    ids = torch.tensor([row + [0] * (width - len(row)) for row in drafts], dtype=torch.long, device=device)
    return ids.view(len(drafts), width), torch.tensor([len(row) for row in drafts], device=device)


__all__ = ["RoundWatch", "pad_drafts", "schedule"]
