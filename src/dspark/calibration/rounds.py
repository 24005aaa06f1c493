"""The data of calibration: confidence logits of rounds, and which slots their verification decided on.

Slot k of a round says something about survival when it was verified. It was not when the block was cut before it, the
token budget ended, or the draft had an end-of-sequence token before it; the reference leaves out slots behind an
*accepted* end, and then those rounds whose draft broke off before its end weigh too much.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .ece import as_float64


class ScoredRounds(NamedTuple):
    """Checked rounds, on the CPU.

    Attributes:
        logits: float64 `[N, g]`, raw confidence logits.
        accepted: int64 `[N]`, accepted drafts, 0..`verified`.
        verified: int64 `[N]`, verified drafts, 0..g.
    """

    logits: torch.Tensor
    accepted: torch.Tensor
    verified: torch.Tensor

    @property
    def num_positions(self) -> int:
        """Draft positions g."""
        return self.logits.shape[1]

    def is_decided(self, k: int) -> torch.Tensor:
        """bool `[N]`: rounds that verified draft position k (0-based)."""
        return self.verified > k

    def survived(self, k: int) -> torch.Tensor:
        """bool `[N]`: rounds in which position k and all before it were accepted."""
        return self.accepted > k

    def is_reached(self, k: int) -> torch.Tensor:
        """bool `[N]`: rounds that verified position k and accepted all before it, the ones that tell about c_k."""
        return (self.verified > k) & (self.accepted >= k)


def check_rounds(
    confidence_logits: torch.Tensor | Sequence[Sequence[float]],
    accepted_lengths: torch.Tensor | Sequence[int],
    verified_lengths: torch.Tensor | Sequence[int] | None = None,
) -> ScoredRounds:
    """Rounds as tensors, held to the rules.

    Args:
        confidence_logits: Raw logits `[N, g]`, finite. Positions at or after `verified_lengths` are never looked at,
            but must be finite too.
        accepted_lengths: Accepted drafts `[N]`.
        verified_lengths: Verified drafts `[N]`; None: all g in every round.

    Raises:
        ValueError: Shapes, ranges or values; names the argument, what was found and the rule.
    """
    logits = as_float64(confidence_logits)
    if logits.dim() != 2 or not logits.shape[1]:
        raise ValueError(
            f"`confidence_logits` must be [N, g], a row of logits per round, got shape {tuple(logits.shape)}."
        )
    is_bad = ~logits.isfinite()
    if bool(is_bad.any()):
        n, k = is_bad.nonzero()[0].tolist()
        raise ValueError(
            f"`confidence_logits` must be finite, got {logits[n, k].item()} at round {n}, position {k} ("
            f"{int(is_bad.sum())} of {logits.numel()} in all). The drafter's activations overflow: run it in float32."
        )
    count, width = logits.shape
    verified = torch.full((count,), width) if verified_lengths is None else _lengths(verified_lengths, "verified")
    accepted = _lengths(accepted_lengths, "accepted")
    for name, values, most, limit in (
        ("verified_lengths", verified, torch.tensor(width), f"g = {width}"),
        ("accepted_lengths", accepted, verified, "the round's verified length"),
    ):
        if len(values) != count:
            raise ValueError(
                f"`{name}` must be [N] with N = {count} as `confidence_logits`, got {len(values)} values."
            )
        is_off = (values < 0) | (values > most)
        if bool(is_off.any()):
            n = int(is_off.nonzero()[0])
            raise ValueError(f"`{name}` must lie between 0 and {limit}, got {int(values[n])} at round {n}.")
    return ScoredRounds(logits, accepted, verified)


def _lengths(values: torch.Tensor | Sequence[int], name: str) -> torch.Tensor:
    tensor = torch.as_tensor(values).detach().cpu()
    if tensor.dim() != 1:
        raise ValueError(f"`{name}_lengths` must be one-dimensional [N], got shape {tuple(tensor.shape)}.")
    if tensor.numel() and (tensor.is_floating_point() or tensor.dtype == torch.bool):
        raise ValueError(f"`{name}_lengths` must be integers, got {tensor.dtype}.")
    return tensor.long()


def survival(
    confidence_logits: torch.Tensor, temperatures: torch.Tensor | Sequence[float] | None = None
) -> torch.Tensor:
    """Survival a_k: running product of `sigmoid(logit_k / T_k)`.

    Args:
        confidence_logits: Raw logits `[..., g]`.
        temperatures: Positive `[g]`; None: 1 everywhere.

    Returns:
        `[..., g]` in the dtype and on the device of the logits.
    """
    if temperatures is not None:
        confidence_logits = confidence_logits / torch.as_tensor(temperatures).to(confidence_logits)
    return confidence_logits.sigmoid().cumprod(-1)


__all__ = ["ScoredRounds", "check_rounds", "survival"]
