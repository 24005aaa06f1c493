"""Scalar rejection sampling, one row at a time, on floats or fractions."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import TypeAlias

Number: TypeAlias = int | float | Fraction
Law: TypeAlias = Sequence[Number]


def accepts(uniform: Number, target_prob: Number, draft_prob: Number) -> bool:
    """Whether a draft stays; one that cannot have been drawn (`draft_prob` 0) is judged by the limit of the ratio."""
    return target_prob > 0 if draft_prob == 0 else uniform < target_prob / draft_prob


def positive_part(target: Law, draft: Law) -> list[Number]:
    """The residual, not normalised; the target's law where it has no mass (then draft and target agree)."""
    residual = [max(p - q, 0) for p, q in zip(target, draft, strict=True)]
    return residual if sum(residual) > 0 else list(target)


def draw(weights: Law, uniform: Number) -> int:
    """First index whose cumulative weight exceeds `uniform` times the total."""
    threshold, cumulative = uniform * sum(weights), 0
    for index, weight in enumerate(weights):
        cumulative += weight
        if cumulative > threshold:
            return index
    raise ValueError(f"No index reached: weights sum to {cumulative}, uniform {uniform}.")


def one_hot(index: int, size: int) -> list[Number]:
    return [int(i == index) for i in range(size)]


def rejection_sample(
    draft_ids: Sequence[int], draft_laws: Sequence[Law] | None, target_laws: Sequence[Law], uniforms: Sequence[Number]
) -> tuple[int, int]:
    """Accepted count and next token of one row whose drafts are all scheduled.

    Args:
        draft_ids: K drafts.
        draft_laws: The K laws they were drawn from; None for greedy drafts.
        target_laws: K + 1 laws.
        uniforms: K for acceptance and one for the next token.
    """
    if draft_laws is None:
        draft_laws = [one_hot(token, len(target_laws[0])) for token in draft_ids]
    for k, token in enumerate(draft_ids):
        if not accepts(uniforms[k], target_laws[k][token], draft_laws[k][token]):
            return k, draw(positive_part(target_laws[k], draft_laws[k]), uniforms[-1])
    return len(draft_ids), draw(target_laws[len(draft_ids)], uniforms[-1])


def greedy_verify(draft_ids: Sequence[int], target_ids: Sequence[int]) -> tuple[int, int]:
    """Accepted count and next token of one row of greedy verification (one target id more than drafts)."""
    for k, token in enumerate(draft_ids):
        if token != target_ids[k]:
            return k, target_ids[k]
    return len(draft_ids), target_ids[len(draft_ids)]
