"""Seconds of one kind of step, kept so that first calls and hiccups do not count; lines through measured points."""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate, pairwise

import torch

WINDOW = 15  # recent samples of one kind: the median forgets a warm-up at once and follows drift within a dozen rounds
BELIEVED = 3  # samples from which on a median has outvoted one outlier
_PRIOR_SPREAD = 0.2  # relative deviation of a single timing before anything is known about it
_MAD_TO_DEVIATION = 1.4826  # of a normal law
_MEDIAN_COST = 1.2533  # a median's standard error over a mean's, for a normal law


class Samples:
    """Recent seconds of one kind of step.

    Args:
        values: Seconds, oldest first; the last `WINDOW` are kept.
    """

    def __init__(self, values: Iterable[float] = ()) -> None:
        self.values: deque[float] = deque(values, maxlen=WINDOW)
        self._median: float | None = None

    def add(self, seconds: float) -> None:
        """Take one more."""
        self.values.append(seconds)
        self._median = None

    def __len__(self) -> int:
        return len(self.values)

    @property
    def median(self) -> float:
        """Seconds; of an even number the lower one, since what disturbs a timing adds to it."""
        if self._median is None:
            self._median = statistics.median_low(self.values)
        return self._median

    @property
    def relative_error(self) -> float:
        """Standard error of the median over the median."""
        count, median = len(self.values), self.median
        deviation = _MAD_TO_DEVIATION * statistics.median(abs(v - median) for v in self.values) / median
        spread = ((_PRIOR_SPREAD**2 + count * deviation**2) / (count + 1)) ** 0.5
        return _MEDIAN_COST * spread / count**0.5


def believed_seconds(samples: Sequence[Samples]) -> list[float]:
    """Medians of rising token counts, where one seen too rarely is not believed to be slower than a larger count.

    Otherwise a count whose only timing was a hiccup would look like a cliff, never be chosen and never be corrected.
    """
    values, least = [], float("inf")
    for one in reversed(samples):
        values.append(one.median if len(one) >= BELIEVED else min(one.median, least))
        least = min(least, values[-1])
    return values[::-1]


def envelope(seconds: Sequence[float]) -> list[float]:
    """The largest rising sequence below `seconds`: entry i is the least of it and all after it."""
    return list(accumulate(reversed(seconds), min))[::-1]


class Line:
    """A line through measured points.

    Beyond the last point it goes on with the slope between it and the last point at half its place or less (else the
    first one), so that two close, noisy points do not give the slope. Below the first it goes on with the first slope,
    to no less than half the first value. Going on, times never fall with more tokens.

    Args:
        places: Rising, at least one.
        values: At them.
    """

    def __init__(self, places: Sequence[float], values: Sequence[float]) -> None:
        self.places = list(places)
        self.values = list(values)
        points = list(zip(self.places, self.values, strict=True))
        self.slopes = [(d - b) / (c - a) for (a, b), (c, d) in pairwise(points)]
        (x, y), last = points[max(bisect_right(self.places, places[-1] / 2) - 1, 0)], points[-1]
        self.slopes.append(max((last[1] - y) / (last[0] - x), 0.0) if last[0] > x else 0.0)

    def at(self, place: float) -> float:
        """Value at one place."""
        left = max(bisect_right(self.places, place) - 1, 0)
        value = self.values[left] + self.slopes[left] * (place - self.places[left])
        return value if place >= self.places[0] else min(max(value, self.values[0] / 2), self.values[0])

    def at_many(self, places: torch.Tensor) -> torch.Tensor:
        """Values at `places [n]`, float64 `[n]`."""
        x, y, slopes = self._tensors
        left = (torch.searchsorted(x, places.double(), right=True) - 1).clamp_(min=0)
        values = y[left] + slopes[left] * (places - x[left])
        return values.where(places >= x[0], values.clamp(y[0] / 2, y[0]))

    @cached_property
    def _tensors(self) -> torch.Tensor:
        return torch.tensor([self.places, self.values, self.slopes], dtype=torch.float64)


__all__ = ["BELIEVED", "WINDOW", "Line", "Samples", "believed_seconds", "envelope"]
