"""Scalar Markov steps, one row at a time, in Python floats: exact where the inputs have few bits."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

Vector = Sequence[float]


def dot(a: Vector, b: Vector) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def corrected_logits(base: Vector, previous: int, w1: Sequence[Vector], w2: Sequence[Vector]) -> list[float]:
    """`base + W1[previous] W2`, column by column."""
    return with_features(base, w1[previous], w2)


def with_features(base: Vector, features: Vector, w2: Sequence[Vector]) -> list[float]:
    return [b + dot(features, row) for b, row in zip(base, w2, strict=True)]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def gated(embedded: Vector, weight: Sequence[Vector], hidden: Vector) -> list[float]:
    """Features of the gated head."""
    return [sigmoid(dot(row, embedded) + h) * e for row, h, e in zip(weight, hidden, embedded, strict=True)]


def recurrent(
    embedded: Vector, weight: Sequence[Vector], hidden: Vector, state: Vector
) -> tuple[list[float], list[float]]:
    """Features and next state of the recurrent head (paper eq. 6)."""
    joint = [dot(row, [*state, *embedded]) + h for row, h in zip(weight, hidden, strict=True)]
    rank = len(state)
    keep = [sigmoid(x) for x in joint[:rank]]
    after = [k * s + (1 - k) * math.tanh(c) for k, s, c in zip(keep, state, joint[rank : 2 * rank], strict=True)]
    return [math.tanh(x) for x in joint[2 * rank :]], after


def restricted(logits: Vector, columns: Collection[int]) -> list[float]:
    """-inf outside `columns`."""
    return [x if i in columns else -math.inf for i, x in enumerate(logits)]


def arg_max(values: Vector) -> int:
    """Lowest index of the largest value; the first NaN where there is one."""
    best = 0
    for i, value in enumerate(values):
        if math.isnan(value):
            return i
        if value > values[best]:
            best = i
    return best


def law(logits: Vector) -> list[float]:
    top = max(logits)
    weights = [math.exp(x - top) for x in logits]
    return [w / math.fsum(weights) for w in weights]


def largest(base: Vector, count: int) -> set[int]:
    """The columns of the `count` largest values, if no two of them are equal."""
    return set(sorted(range(len(base)), key=lambda i: -base[i])[:count])
