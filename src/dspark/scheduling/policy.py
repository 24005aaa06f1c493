"""What the decoding loop and a simulator drive: a policy decides how much to draft and verify, and is told the rounds.

Every decision is lossless by construction, because no policy is shown a drawn token: `slots` sees past rounds only,
`lengths` sees scores, and whether slot k is verified may depend on scores of slots up to k (which see tokens before k)
and on past rounds, never on slot k's draw or a later score. What each policy does within that is said at each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from .throughput import ThroughputCurve


@dataclass(frozen=True)
class RoundObservation:
    """One finished round.

    Attributes:
        rows: Live rows.
        slots: Draft slots per row that the drafter ran; 0: none were drafted.
        tokens: Tokens in the target's forward, the sum of 1 + verified.
        draft_seconds: Everything before the target's forward.
        verify_seconds: The target's forward and what follows it.
        verified: Drafts verified per row.
        accepted: Drafts accepted per row.
        survival: Per row, of the drafted slots, as given to `lengths`, nested or a CPU tensor; None without scores.
    """

    rows: int
    slots: int
    tokens: int
    draft_seconds: float
    verify_seconds: float
    verified: Sequence[int]
    accepted: Sequence[int]
    survival: Sequence[Sequence[float]] | torch.Tensor | None


class VerifyPolicy:
    """Verifies every draft; the base of the others. A policy keeps state over rounds, so a call needs one of its own
    unless what was learnt is to be used again."""

    needs_confidence = False
    """Whether `lengths` looks at scores."""

    def slots(self, rows: int, most: int, remaining: Mapping[int, int] | None = None) -> int:  # noqa: ARG002
        """How many slots to draft this round; asked before drafting, so it knows past rounds only.

        Args:
            rows: Live rows.
            most: Slots at most.
            remaining: Tokens each live row may still get, by a name it keeps, where the batch is done when its last
                row is; None: rows come and go, so every row's tokens count alike.

        Returns:
            0 to `most`.
        """
        return most

    def lengths(
        self,
        own: torch.Tensor | None,  # noqa: ARG002
        survival: torch.Tensor | None,  # noqa: ARG002
        limits: Sequence[int],
    ) -> list[int]:
        """Drafts to verify per row.

        Args:
            own: Each slot's own confidence, floating `[R, slots]`; None without scores.
            survival: Running product of calibrated confidences, likewise.
            limits: Most drafts per row, `[R]`.
        """
        return list(limits)

    def observe(self, observation: RoundObservation) -> None:
        """Take a finished round into account."""


class RoundSpeed:
    """Rounds per second by tokens in the target's forward, with the drafting time of the round in it.

    Args:
        curve: Of the target.
        rows: Live rows.
        draft_seconds: What the round costs before the forward, however much is verified.
    """

    def __init__(self, curve: ThroughputCurve, rows: int, draft_seconds: float) -> None:
        self.curve = curve
        self.rows = rows
        self.draft_seconds = draft_seconds

    def at_counts(self, tokens: torch.Tensor) -> torch.Tensor:
        """Float64 `[n]` for `tokens` int64 `[n]`."""
        target_seconds = self.curve.seconds_of(tokens.numpy(), rows=self.rows)
        return torch.from_numpy(1.0 / (self.draft_seconds + target_seconds))


__all__ = ["RoundObservation", "RoundSpeed", "VerifyPolicy"]
