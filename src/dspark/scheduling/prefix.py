"""Algorithm 1 of the paper: how many drafts of each row to verify, given survival and the speed of the target.

Candidates are all (row, slot) by falling survival; a prefix of that order is a prefix of every row, since survival
never rises along a row. Pure: no model, no clock, no randomness.
Shape letters: `R` rows, `g` slots of a block, `N` candidates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias, TypeGuard, cast

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
    ranked, row_of = _ranked(survival, limits)
    rows = survival.shape[0]
    if rows == 0:
        return torch.zeros(0, dtype=torch.long, device=survival.device)
    expected = torch.cat([ranked.new_tensor([float(rows)]), ranked]).cumsum(0)  # [N + 1]
    if early_stop and not _takes_counts(steps_per_second):
        admitted = _first_fall(expected.tolist(), rows, cast(Callable[[int], float], steps_per_second))
    else:
        throughput = expected * speeds(steps_per_second, rows, len(ranked))
        admitted = _leading(throughput[1:] > throughput[:-1]) if early_stop else int(throughput.argmax())
    return _lengths(row_of, admitted, rows).to(survival.device)


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
    ranked, row_of = _ranked(survival, limits)
    rows, slots = survival.shape
    if len(usual) != slots or not all(0 < value <= 1 for value in usual):
        raise ValueError(f"`usual` must hold one survival in (0, 1] per slot ({slots}), got {list(usual)}.")
    if not len(ranked):
        return torch.zeros(rows, dtype=torch.long, device=survival.device)
    # How many candidates there could be. Not how many have survival above 0: that looks at slots not yet reached.
    total = rows * slots if limits is None else int(_limits(limits, rows, slots).sum())
    profile = torch.tensor(usual, dtype=torch.float64).repeat_interleave(rows)[:total]
    profile_sum = torch.cat([profile.new_zeros(1), profile.cumsum(0)])  # [total + 1]
    speed = speeds(steps_per_second, rows, total)
    expected = torch.cat([ranked.new_tensor([float(rows)]), ranked]).cumsum(0)[:-1]  # before each candidate, [N]
    at = torch.arange(len(ranked))
    ends = torch.cat([(at + 1)[:, None], _ends(total).expand(len(ranked), -1)], dim=1)  # [N, E]
    scale = ranked / profile[at]
    hoped = (expected[:, None] + scale[:, None] * (profile_sum[ends] - profile_sum[at][:, None])) * speed[ends]
    hoped = hoped.masked_fill(ends <= at[:, None], 0.0).amax(1)
    return _lengths(row_of, _leading(hoped > expected * speed[at]), rows).to(survival.device)


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
    _, row_of = _ranked(survival, limits)
    return _lengths(row_of, capacity, survival.shape[0]).to(survival.device)


def speeds(steps_per_second: Speed, rows: int, count: int) -> torch.Tensor:
    """Steps per second with 0 to `count` drafts verified over `rows` rows, float64 `[count + 1]`.

    Raises:
        ValueError: A speed is not a positive finite number.
    """
    tokens = torch.arange(rows, rows + count + 1)
    if _takes_counts(steps_per_second):
        values = steps_per_second.at_counts(tokens).double()
    else:
        speed = cast(Callable[[int], float], steps_per_second)
        values = torch.tensor([float(speed(n)) for n in tokens.tolist()], dtype=torch.float64)
    least, most = values.aminmax()  # NaN if any is
    if least > 0 and most < math.inf:
        return values
    worst = int((~((values > 0) & values.isfinite())).long().argmax())
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


def _leading(rises: torch.Tensor) -> int:
    """Length of the leading run of True, `[N]`."""
    return int(rises.long().cumprod(0).sum())


def _lengths(row_of: torch.Tensor, admitted: int, rows: int) -> torch.Tensor:
    return torch.bincount(row_of[:admitted], minlength=rows)


def _ends(total: int) -> torch.Tensor:
    """Prefix lengths that a schedule may aim at."""
    if total <= _ALL_ENDS:
        return torch.arange(1, total + 1)
    return torch.logspace(0, math.log10(total), _ALL_ENDS, dtype=torch.float64).round().long()


def _ranked(survival: torch.Tensor, limits: Sequence[int] | torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Candidates in order: their survival, float64 `[N]`, and their rows, int64 `[N]`, both on the CPU."""
    values = _checked(survival)
    rows, slots = values.shape
    flat = values.T.reshape(-1)  # slot by slot: a stable sort then breaks ties by slot, then by row
    if limits is not None:
        allowed = torch.arange(slots)[:, None] < _limits(limits, rows, slots)
        flat = flat.where(allowed.reshape(-1), 0.0)
    ranked, order = flat.sort(descending=True, stable=True)
    count = int((ranked > 0).sum())
    return ranked[:count], order[:count] % max(rows, 1)


def _checked(survival: torch.Tensor) -> torch.Tensor:
    """Survival as float64 on the CPU, free of rises by rounding."""
    if not isinstance(survival, torch.Tensor) or survival.dim() != 2 or not survival.is_floating_point():
        found = (
            f"{survival.dtype} of shape {tuple(survival.shape)}" if isinstance(survival, torch.Tensor) else survival
        )
        raise ValueError(f"`survival` must be a floating tensor of shape [rows, slots], got {found}.")
    values = survival.detach().to("cpu", torch.float64)
    if values.numel() == 0:
        return values
    least, most = values.aminmax()  # NaN if any is
    if not (least >= 0 and most <= 1):
        bad = values[~((values >= 0) & (values <= 1))][0]
        raise ValueError(f"`survival` must lie in [0, 1], got {float(bad)}. It is a product of confidences.")
    lowest = values.cummin(1).values
    if (values - lowest).max() > _RISE:
        row = int((values - lowest > _RISE).any(1).long().argmax())
        raise ValueError(
            f"`survival` must never rise along a row, got {[round(v, 4) for v in values[row].tolist()]} in row {row}. "
            "Pass the running product of confidences, not the confidences."
        )
    return lowest


def _limits(limits: Sequence[int] | torch.Tensor, rows: int, slots: int) -> torch.Tensor:
    """Most drafts per row, int64 `[R]`, 0 to g."""
    values = torch.as_tensor(limits, dtype=torch.long, device="cpu")
    if values.shape != (rows,) or bool((values < 0).any()):
        raise ValueError(f"`limits` must hold one number of at least 0 per row ({rows}), got {values.tolist()}.")
    return values.clamp(max=slots)


__all__ = ["Speed", "SpeedOfCounts", "foresighted_schedule", "prefix_schedule", "ranked_prefixes", "speeds"]
