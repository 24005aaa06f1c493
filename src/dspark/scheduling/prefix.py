"""Algorithm 1 of the paper: how many drafts of each row to verify, given survival and the speed of the target.

Candidates are all (row, slot) by falling survival; a prefix of that order is a prefix of every row, since survival
never rises along a row. Pure: no model, no clock, no randomness.
Shape letters: `R` rows, `g` slots of a block, `N` candidates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol, TypeAlias, TypeGuard, cast

import numpy as np
import torch

_RISE = 1e-5  # a parallel scan multiplies in any order, so a product of confidences may rise by rounding
_ALL_ENDS = 16  # up to here every longer prefix is looked at; beyond, as many spread geometrically


class SpeedOfCounts(Protocol):
    """A speed that can be asked for many token counts at once."""

    def at_counts(self, tokens: torch.Tensor) -> torch.Tensor:
        """Steps per second, float64 `[n]`, of forwards over `tokens` int64 `[n]`."""
        ...


# Tokens in the target's forward -> steps per second.
Speed: TypeAlias = SpeedOfCounts | Callable[[int], float]


def prefix_schedule(
    survival: torch.Tensor,
    steps_per_second: Speed,
    *,
    early_stop: bool = True,
    limits: Sequence[int] | torch.Tensor | None = None,
) -> torch.Tensor:
    """Verify lengths that maximise expected tokens per second (paper, Algorithm 1).

    Candidates are admitted by falling survival (ties: lower slot, then lower row) while
    `(R + sum of admitted survival) * steps_per_second(R + admitted)` rises strictly; the first that does not raise it
    ends the schedule.

    The early stop is what makes this lossless: whether a candidate is admitted depends on its own survival and on
    those before it in the order, all of which are known before its token is drawn. A search for the best prefix over
    all scores also looks at later survival, which depends on the drawn token: the token's own fate then decides
    whether it is verified, and the text no longer has the target's law (Appendix A: 0.85/0.15 instead of 0.7/0.3).

    Args:
        survival: Floating `[R, g]` in [0, 1], never rising along a row. A slot of survival 0 is never verified.
        steps_per_second: Tokens in the target's forward to steps per second; an object with `at_counts` is asked once
            for all counts, another callable count by count.
        early_stop: False takes the best prefix of the whole order. Only for scores that belong to no live draft (the
            budget of the `async` policy) and for tests.
        limits: Most drafts per row, `[R]`; None: g.

    Returns:
        Drafts to verify per row, int64 `[R]`, on `survival`'s device.

    Raises:
        ValueError: A shape, value or speed that breaks a rule above.
    """
    ranked, row_of, _ = _ranked(survival, limits)
    rows = survival.shape[0]
    if rows == 0:
        return torch.zeros(0, dtype=torch.long, device=survival.device)
    expected = _expected(ranked, rows)  # [N + 1]
    if early_stop and not _takes_counts(steps_per_second):
        admitted = _first_fall(expected.tolist(), rows, cast(Callable[[int], float], steps_per_second))
    else:
        throughput = expected * _speeds(steps_per_second, rows, len(ranked))
        admitted = _leading(throughput[1:] > throughput[:-1]) if early_stop else int(throughput.argmax())
    return _lengths(row_of, admitted, survival)


def foresighted_schedule(
    survival: torch.Tensor,
    steps_per_second: Speed,
    usual: Sequence[float],
    *,
    limits: Sequence[int] | torch.Tensor | None = None,
) -> torch.Tensor:
    """Algorithm 1 that no cliff of the curve traps: it stops where no longer prefix is expected to be faster.

    Where Algorithm 1 compares with the next prefix only, this compares with all longer ones, whose unseen survival is
    taken to fall from the candidate's own as it usually did in past rounds. With `usual` falling steeply, or a curve
    without cliffs, it is Algorithm 1. Lossless for the same reason: nothing behind the candidate is looked at.

    Args:
        survival: As for [`prefix_schedule`].
        steps_per_second: Likewise.
        usual: Mean survival per slot in past rounds, `[g]`, in (0, 1], never rising.
        limits: As for [`prefix_schedule`].

    Returns:
        Drafts to verify per row, int64 `[R]`, on `survival`'s device.

    Raises:
        ValueError: As [`prefix_schedule`], or `usual` does not have one value in (0, 1] per slot.
    """
    ranked, row_of, total = _ranked(survival, limits)
    rows, slots = survival.shape
    if len(usual) != slots or not all(0 < value <= 1 for value in usual):
        raise ValueError(f"`usual` must hold one survival in (0, 1] per slot ({slots}), got {list(usual)}.")
    if not len(ranked):
        return torch.zeros(rows, dtype=torch.long, device=survival.device)
    profile = np.repeat(np.asarray(usual, np.float64), rows)[:total]
    profile_sum = _expected(profile, 0)  # [total + 1]
    speed = _speeds(steps_per_second, rows, total)
    count = len(ranked)
    expected = _expected(ranked, rows)[:-1]  # before each candidate, [N]
    scale = ranked / profile[:count]
    to_beat = expected * speed[:count]
    hoped = (expected + scale * (profile_sum[1 : count + 1] - profile_sum[:count])) * speed[1 : count + 1]
    rises = hoped > to_beat
    # Only a candidate that does not pay by itself needs what comes behind it.
    at, ends = (~rises).nonzero()[0][:, None], _ends(total)  # [F, 1], [E]
    hoped = (expected[at] + scale[at] * (profile_sum[ends] - profile_sum[at])) * speed[ends]
    rises[at[:, 0]] = ((hoped > to_beat[at]) & (ends > at)).any(1)
    return _lengths(row_of, _leading(rises), survival)


def ranked_prefixes(
    survival: torch.Tensor, capacity: int, limits: Sequence[int] | torch.Tensor | None = None
) -> torch.Tensor:
    """The `capacity` candidates of highest survival, as verify lengths.

    Lossless when `capacity` was fixed without this round's scores: a candidate's rank depends on those before it only.

    Args:
        survival: As for [`prefix_schedule`].
        capacity: Drafts to verify over all rows, at least 0; fewer where there are fewer candidates.
        limits: As for [`prefix_schedule`].

    Returns:
        int64 `[R]`, on `survival`'s device.

    Raises:
        ValueError: An argument breaks a rule above.
    """
    if capacity < 0:
        raise ValueError(f"`capacity` must be at least 0 drafts, got {capacity}.")
    _, row_of, _ = _ranked(survival, limits)
    return _lengths(row_of, capacity, survival)


def _expected(values: np.ndarray, start: float) -> np.ndarray:
    """`start` and what it grows to with each of the values, float64 `[N + 1]`."""
    sums = np.empty(len(values) + 1)
    sums[0], sums[1:] = start, values
    return sums.cumsum(out=sums)


def _speeds(steps_per_second: Speed, rows: int, count: int) -> np.ndarray:
    """Steps per second with 0 to `count` drafts verified over `rows` rows, float64 `[count + 1]`.

    Raises:
        ValueError: A speed is not a positive finite number.
    """
    tokens = torch.arange(rows, rows + count + 1)
    if _takes_counts(steps_per_second):
        values = steps_per_second.at_counts(tokens).double().numpy()
    else:
        speed = cast(Callable[[int], float], steps_per_second)
        values = np.array([float(speed(n)) for n in tokens.tolist()])
    if values.min() > 0 and values.max() < math.inf:  # both NaN if any is
        return values
    worst = int((~((values > 0) & np.isfinite(values))).argmax())
    raise _bad_speed(int(tokens[worst]), float(values[worst]))


def _takes_counts(steps_per_second: Speed) -> TypeGuard[SpeedOfCounts]:
    return hasattr(steps_per_second, "at_counts")  # a protocol's isinstance costs more than the schedule


def _bad_speed(tokens: int, value: float) -> ValueError:
    return ValueError(
        f"`steps_per_second` must give a positive finite number, got {value} for {tokens} tokens. Measure the curve "
        "up to the most tokens a round can verify."
    )


def _first_fall(expected: list[float], rows: int, steps_per_second: Callable[[int], float]) -> int:
    """Candidates admitted, asking for one speed at a time and for none behind the first fall."""
    best = 0.0
    for admitted, tokens in enumerate(expected):
        speed = float(steps_per_second(rows + admitted))
        if not 0 < speed < math.inf:
            raise _bad_speed(rows + admitted, speed)
        if tokens * speed <= best:
            return admitted - 1
        best = tokens * speed
    return len(expected) - 1


def _leading(rises: np.ndarray) -> int:
    """Length of the leading run of True, `[N]`."""
    fall = int(rises.argmin()) if len(rises) else 0
    return len(rises) if len(rises) and rises[fall] else fall


def _lengths(row_of: np.ndarray, admitted: int, survival: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.bincount(row_of[:admitted], minlength=len(survival))).to(survival.device)


@lru_cache
def _ends(total: int) -> np.ndarray:
    """Prefix lengths that a schedule may aim at."""
    if total <= _ALL_ENDS:
        return np.arange(1, total + 1)
    return torch.logspace(0, math.log10(total), _ALL_ENDS, dtype=torch.float64).round().long().numpy()


class _Candidates(NamedTuple):
    """Candidates in order.

    Attributes:
        survival: float64 `[N]`.
        row: int64 `[N]`.
        most: How many there could be. Not how many have survival above 0: that looks at slots not yet reached.
    """

    survival: np.ndarray
    row: np.ndarray
    most: int


def _ranked(survival: torch.Tensor, limits: Sequence[int] | torch.Tensor | None) -> _Candidates:
    values = _checked(survival)
    slots, rows = values.shape
    most = values.size
    if limits is not None:
        allowed = _limits(limits, rows, slots)
        most = int(allowed.sum())
        if most < values.size:
            values = np.where(np.arange(slots)[:, None] < allowed, values, 0.0)
    flat = values.reshape(-1)  # slot by slot: a stable sort then breaks ties by slot, then by row
    order = np.argsort(-flat, kind="stable")[: np.count_nonzero(flat)]
    return _Candidates(flat[order], order % max(rows, 1), most)


def _checked(survival: torch.Tensor) -> np.ndarray:
    """Survival slot by slot, float64 `[g, R]`, free of rises by rounding."""
    if not isinstance(survival, torch.Tensor) or survival.dim() != 2 or not survival.is_floating_point():
        found = (
            f"{survival.dtype} of shape {tuple(survival.shape)}" if isinstance(survival, torch.Tensor) else survival
        )
        raise ValueError(f"`survival` must be a floating tensor of shape [rows, slots], got {found}.")
    values = np.ascontiguousarray(survival.detach().to("cpu", torch.float64).numpy().T)
    if values.size == 0:
        return values
    lowest = np.minimum.accumulate(values)
    if not ((lowest >= 0) & (values <= 1) & (values - lowest <= _RISE)).all():  # NaN is none of it
        raise _bad_survival(values, lowest)
    return lowest


def _bad_survival(values: np.ndarray, lowest: np.ndarray) -> ValueError:
    bad = values[~((values >= 0) & (values <= 1))]
    if len(bad):
        return ValueError(f"`survival` must lie in [0, 1], got {float(bad[0])}. It is a product of confidences.")
    row = int((values - lowest > _RISE).any(0).argmax())
    found = [round(v, 4) for v in values[:, row].tolist()]
    return ValueError(
        f"`survival` must never rise along a row, got {found} in row {row}. Pass the running product of confidences, "
        "not the confidences."
    )


def _limits(limits: Sequence[int] | torch.Tensor, rows: int, slots: int) -> np.ndarray:
    """Most drafts per row, int64 `[R]`, 0 to g."""
    values = np.asarray(limits.cpu() if isinstance(limits, torch.Tensor) else limits, np.int64)
    if values.shape != (rows,) or values.min(initial=0) < 0:
        raise ValueError(f"`limits` must hold one number of at least 0 per row ({rows}), got {values.tolist()}.")
    return np.minimum(values, slots)


__all__ = ["Speed", "SpeedOfCounts", "foresighted_schedule", "prefix_schedule", "ranked_prefixes"]
