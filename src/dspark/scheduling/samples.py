"""Seconds of one kind of step, kept so that first calls and hiccups do not count; lines through measured points."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import ArrayLike

WINDOW = 15  # recent samples of one kind: the median forgets a warm-up at once and follows drift within a dozen rounds
BELIEVED = 3  # samples from which on a median has outvoted one outlier
_PRIOR_SPREAD = 0.2  # relative deviation of a single timing before anything is known about it
_MAD_TO_DEVIATION = 1.4826  # of a normal law
_SPARSE = 16  # places per one asked for, from which on a table of them all is not worth while
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
    medians = np.array([one.median for one in samples])
    least = np.minimum.accumulate(medians[::-1])[::-1]  # of a count and all after it
    return np.where([len(one) >= BELIEVED for one in samples], medians, least).tolist()


def envelope(seconds: Sequence[float]) -> list[float]:
    """The largest rising sequence below `seconds`: entry i is the least of it and all after it."""
    return list(accumulate(reversed(seconds), min))[::-1]


def check_timing(count: int, seconds: float, name: str, *, least: int) -> None:
    """Refuse a count below its least, or seconds that are no time.

    Raises:
        ValueError: Names what is wrong.
    """
    if count < least:
        raise ValueError(f"`{name}` must be at least {least}, got {count}.")
    if not 0 < seconds < math.inf:
        raise ValueError(f"`seconds` must be positive and finite, got {seconds}.")


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
        self.places = places
        self.values = values
        self._table = np.zeros(0)  # values at 0, 1, ..., as far as `at_counts` was asked

    def at(self, place: float) -> float:
        """Value at one place."""
        x, y = self.places, self.values
        left = max(bisect_right(x, place) - 1, 0)
        is_last = left == len(x) - 1
        slope = self._last_slope if is_last else (y[left + 1] - y[left]) / (x[left + 1] - x[left])
        value = y[left] + slope * (place - x[left])
        return value if place >= x[0] else min(max(value, y[0] / 2), y[0])

    def up_to_last(self, place: float | None) -> float:
        """Value at a place, but not beyond the last (None)."""
        return self.at(self.places[-1] if place is None else min(place, self.places[-1]))

    def at_many(self, places: ArrayLike) -> np.ndarray:
        """Values at `places [n]`, float64 `[n]`."""
        x, y, slopes = self._arrays
        at = np.asarray(places, np.float64)
        left = np.maximum(x.searchsorted(at, side="right") - 1, 0)
        values = y[left] + slopes[left] * (at - x[left])
        return np.where(at >= x[0], values, np.clip(values, y[0] / 2, y[0]))

    def at_counts(self, counts: np.ndarray) -> np.ndarray:
        """Values at whole places `[n]`, int64, at least 0; looked up where about the same ones are asked again."""
        end = int(counts.max(initial=0)) + 1
        if end > _SPARSE * len(counts):
            return self.at_many(counts)
        if end > len(self._table):
            self._table = self.at_many(np.arange(end))
        return self._table[counts]

    @cached_property
    def _last_slope(self) -> float:
        x, y = self.places, self.values
        left = max(bisect_right(x, x[-1] / 2) - 1, 0)
        return max((y[-1] - y[left]) / (x[-1] - x[left]), 0.0) if x[-1] > x[left] else 0.0

    @cached_property
    def _arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Places, values and the slopes behind each."""
        x, y = np.array(self.places, np.float64), np.array(self.values, np.float64)
        return x, y, np.append(np.diff(y) / np.diff(x), self._last_slope)


__all__ = ["BELIEVED", "WINDOW", "Line", "Samples", "believed_seconds", "check_timing", "envelope"]
