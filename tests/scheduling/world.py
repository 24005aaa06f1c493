"""A world with known costs and acceptances that drives a policy as the decoding loop does, without a model."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from dspark.scheduling import RoundObservation, VerifyPolicy


@dataclass
class World:
    """Costs and acceptances.

    Attributes:
        target_seconds: Of tokens in the target's forward.
        draft_seconds: Of rows and slots, 0 slots included.
        accepts: Per slot, the chance that it is accepted given that all before it were.
        scores: What the drafter says of it, from the true chance; None: no confidence head.
        rows: Live rows.
        noise: Relative deviation of a timing, upwards; first calls take five times as long.
        seed: Of acceptances and noise.
    """

    target_seconds: Callable[[int], float]
    draft_seconds: Callable[[int, int], float]
    accepts: Sequence[float]
    scores: Callable[[float], float] | None = None
    rows: int = 1
    noise: float = 0.03
    seed: int = 0
    rounds: list[tuple[int, int]] = field(default_factory=list)  # slots and tokens of each round

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.tokens = self.seconds = 0.0

    def run(self, policy: VerifyPolicy, rounds: int) -> float:
        """Expected tokens per second over these rounds, at the costs without noise."""
        tokens, seconds = self.tokens, self.seconds
        for _ in range(rounds):
            self.round(policy)
        return (self.tokens - tokens) / (self.seconds - seconds)

    def round(self, policy: VerifyPolicy) -> None:
        slots = policy.slots(self.rows, len(self.accepts))
        chances = torch.tensor(self.accepts[:slots], dtype=torch.float64).expand(self.rows, -1)
        own = None
        if self.scores is not None and slots:
            own = torch.tensor([self.scores(c) for c in self.accepts[:slots]], dtype=torch.float64)
            own = own.expand(self.rows, -1)
        survival = None if own is None else own.cumprod(1)
        lengths = policy.lengths(own, survival, [slots] * self.rows) if slots else [0] * self.rows
        accepted = [self._accepted(length) for length in lengths]
        tokens = self.rows + sum(lengths)
        draft, verify = self.draft_seconds(self.rows, slots), self.target_seconds(tokens)
        late = 1.0 if self.rounds else 5.0
        policy.observe(
            RoundObservation(
                self.rows, slots, tokens, draft * self._noisy() * late, verify * self._noisy() * late, lengths,
                accepted, None if survival is None else survival.tolist(),
            )
        )  # fmt: skip
        reached = torch.cat([torch.ones(self.rows, 1).double(), chances.cumprod(1)], 1)
        self.tokens += sum(float(row[: length + 1].sum()) for row, length in zip(reached, lengths, strict=True))
        self.seconds += draft + verify
        self.rounds.append((slots, tokens))

    def rate(self, width: int) -> float:
        """Tokens per second of drafting and verifying `width` slots in every round."""
        gain, reached = 1.0, 1.0
        for chance in self.accepts[:width]:
            reached *= chance
            gain += reached
        seconds = self.draft_seconds(self.rows, width) + self.target_seconds(self.rows * (1 + width))
        return self.rows * gain / seconds

    def best_rate(self) -> float:
        return max(self.rate(width) for width in range(len(self.accepts) + 1))

    def _accepted(self, length: int) -> int:
        count = 0
        while count < length and self.random.random() < self.accepts[count]:
            count += 1
        return count

    def _noisy(self) -> float:
        return 1 + abs(self.random.gauss(0, self.noise))


def flat(tokens: int) -> float:
    """A target with room: more tokens cost little."""
    return 1 + 0.02 * (tokens - 1)


def steep(tokens: int) -> float:
    """A busy target: every token costs."""
    return 0.5 + 0.5 * tokens


def two_is_worst(tokens: int) -> float:
    """A cliff behind the first token, as plain fp32 linears on a CPU have it."""
    return 1.0 if tokens == 1 else 1.9 if tokens == 2 else 1.6 + 0.02 * tokens


def cliffs(tokens: int) -> float:
    """Steps every four tokens."""
    return 1.0 + (tokens - 1) // 4


def block_draft(rows: int, slots: int) -> float:
    """A drafter whose pass costs about the same however wide."""
    return 0.25 + 0.01 * slots if slots else 0.01


def serial_draft(rows: int, slots: int) -> float:
    """A drafter that pays per slot."""
    return 0.01 + 0.04 * slots
