"""Verify lengths by brute force, and the joint law of a batch whose lengths one rule decides from all its blocks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import product
from typing import TypeAlias

from . import law
from .law import DraftLaw, TargetLaw, Text

# Blocks of all rows -> drafts to verify per row.
BatchRule: TypeAlias = Callable[[Sequence[Text]], Sequence[int]]


def throughput(survival: Sequence[Sequence[float]], lengths: Sequence[int], speed: Callable[[int], float]) -> float:
    """Expected tokens per second of verifying `lengths`."""
    rows = len(survival)
    tokens = rows + sum(sum(row[:length]) for row, length in zip(survival, lengths, strict=True))
    return tokens * speed(rows + sum(lengths))


def all_lengths(survival: Sequence[Sequence[float]]) -> list[tuple[int, ...]]:
    """Every length vector, slots of survival 0 left out."""
    return list(product(*(range(sum(a > 0 for a in row) + 1) for row in survival)))


def best_of(survival: Sequence[Sequence[float]], total: int) -> float:
    """Most expected accepted drafts of any length vector with that many drafts."""
    return max(
        sum(sum(row[:length]) for row, length in zip(survival, lengths, strict=True))
        for lengths in all_lengths(survival)
        if sum(lengths) == total
    )


def early_stop_total(survival: Sequence[Sequence[float]], speed: Callable[[int], float]) -> int:
    """Drafts that Algorithm 1 admits: the best vector of each total, up to the first that is not faster."""
    rows, most = len(survival), sum(sum(a > 0 for a in row) for row in survival)
    value = rows * speed(rows)
    for total in range(1, most + 1):
        following = (rows + best_of(survival, total)) * speed(rows + total)
        if following <= value:
            return total - 1
        value = following
    return most


def batch_law(
    target: TargetLaw, draft: DraftLaw, starts: Sequence[Text], rule: BatchRule, horizon: int, *, block_size: int
) -> dict[tuple[Text, ...], float]:
    """Joint law of the next `horizon` tokens of every row: one round by `rule`, then plain sampling.

    Args:
        target: Law of the next token.
        draft: Law of the drafts.
        starts: Text of each row so far.
        rule: Decides all rows' lengths at once.
        horizon: Tokens per row.
        block_size: Drafts per row.
    """
    per_row = [law.target_law(lambda drafted, s=start: draft(s, drafted), block_size) for start in starts]
    joint: dict[tuple[Text, ...], float] = defaultdict(float)
    known: dict[tuple[int, Text, int], dict[Text, float]] = {}
    for blocks in product(*per_row):
        chance = 1.0
        for row, block in enumerate(blocks):
            chance *= per_row[row][block]
        laws = []
        for row, (start, block, length) in enumerate(zip(starts, blocks, rule(blocks), strict=True)):
            key = (row, block, length)
            if key not in known:
                known[key] = _row_law(target, draft, start, block[:length], horizon)
            laws.append(known[key])
        for texts in product(*laws):
            mass = chance
            for row, text in enumerate(texts):
                mass *= laws[row][text]
            joint[texts] += mass
    return dict(joint)


def independent_law(target: TargetLaw, starts: Sequence[Text], horizon: int) -> dict[tuple[Text, ...], float]:
    """Joint law of plain sampling."""
    return batch_law(target, lambda *_: [1.0], starts, lambda blocks: [0] * len(blocks), horizon, block_size=0)


def _row_law(target: TargetLaw, draft: DraftLaw, start: Text, drafts: Text, horizon: int) -> dict[Text, float]:
    told = [draft(start, drafts[:k]) for k in range(len(drafts))]
    targets = [target(start + drafts[:k]) for k in range(len(drafts) + 1)]
    result: dict[Text, float] = defaultdict(float)
    for tokens, share in law.EXACT(drafts, told, targets).items():
        if not share:
            continue
        tokens = tokens[:horizon]
        tails = law.target_law(lambda tail, s=start + tokens: target(s + tail), horizon - len(tokens))
        for tail, mass in tails.items():
            result[tokens + tail] += float(share * mass)
    return dict(result)
