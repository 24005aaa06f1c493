"""What every round of one row did, token by token; kept where `SpeculationConfig.record_trace` asks for it.

Numbers and ids only, a few per token: nothing as wide as a vocabulary outlives its round. `dspark.trace` puts these
records into files and on pages. Shape letter: `g` drafts of the round's block.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Kind = Literal["first", "accepted", "recovered", "bonus"]
Outcome = Literal["accepted", "rejected", "discarded", "ended", "unverified"]


class Candidate(NamedTuple):
    """A token a law thought of.

    Attributes:
        token_id: Its id in the target's vocabulary.
        prob: Its probability.
    """

    token_id: int
    prob: float


@dataclass(frozen=True)
class Rejection:
    """The slot whose draft was refused: the likeliest tokens of each law there, the likeliest first.

    Attributes:
        draft_prob: Probability of the refused draft under the target's law.
        target: By the target's law.
        base: By the drafter before its sequential head.
        head: By the drafter after it.
    """

    draft_prob: float
    target: list[Candidate]
    base: list[Candidate]
    head: list[Candidate]


@dataclass(frozen=True)
class RoundTrace:
    """One round of one row.

    The target's law is the one that decided: after processors and temperature. The drafter's two are its own, before
    any processor; what a sampled draft was drawn from is `draft_probs`. A law that is no law (NaN) counts as 0.

    Attributes:
        anchor: Place of the anchor among the new tokens, 0 for the first one.
        draft_ids: The block as drafted, `[g]`; empty in a round without drafts.
        base_probs: Probability of each draft before the sequential head, `[g]`.
        head_probs: After it, `[g]`.
        draft_probs: Under the exact law each draft was drawn from, `[g]`; None for greedy drafts.
        confidence: Each slot's own confidence, uncalibrated, `[g]`; None without a confidence head.
        survival: Running product of calibrated confidences, `[g]`; None likewise.
        num_verified: Drafts verified, as [`SpeculationStats`] counts them.
        num_accepted: Drafts accepted.
        emitted_ids: The round's tokens: the accepted drafts and, unless the text ended at one, the target's own.
        emitted_probs: Their probabilities under the target's law.
        rejection: What stood at the refused slot; None when all verified drafts were accepted.
        step_seconds: Seconds per step; of all rows together, like the round itself.
        model_seconds: Seconds inside the forward passes of `"target"` and `"drafter"`.
    """

    anchor: int
    draft_ids: list[int]
    base_probs: list[float]
    head_probs: list[float]
    draft_probs: list[float] | None
    confidence: list[float] | None
    survival: list[float] | None
    num_verified: int
    num_accepted: int
    emitted_ids: list[int]
    emitted_probs: list[float]
    rejection: Rejection | None
    step_seconds: dict[str, float]
    model_seconds: dict[str, float]

    @property
    def ends_inside(self) -> bool:
        """Whether the text ended at an accepted draft, so that the target added no token of its own."""
        return len(self.emitted_ids) == self.num_accepted

    def kinds(self) -> list[Kind]:
        """Kind of each emitted token; in a round that verified nothing the target's token is a bonus token."""
        own: Kind = "recovered" if self.rejection is not None else "bonus"
        return [*(["accepted"] * self.num_accepted), *([] if self.ends_inside else [own])]  # type: ignore[list-item]

    def outcome(self, slot: int) -> Outcome:
        """What became of a slot's draft: `"discarded"` behind a refused one, `"ended"` behind the text's end."""
        if slot < self.num_accepted:
            return "accepted"
        if slot < self.num_verified:
            return "rejected" if slot == self.num_accepted else "discarded"
        return "ended" if self.ends_inside else "unverified"


@dataclass
class RowTrace:
    """One row from its first token on.

    Attributes:
        first_id: The token the prompt's own pass gave.
        first_prob: Its probability under the target's law.
        rounds: In order.
    """

    first_id: int
    first_prob: float
    rounds: list[RoundTrace] = field(default_factory=list)

    def token_ids(self) -> list[int]:
        """All new tokens."""
        return [self.first_id, *(token for entry in self.rounds for token in entry.emitted_ids)]

    def kinds(self) -> list[Kind]:
        """Kind of each new token."""
        return ["first", *(kind for entry in self.rounds for kind in entry.kinds())]


__all__ = ["Candidate", "Kind", "Outcome", "Rejection", "RoundTrace", "RowTrace"]
