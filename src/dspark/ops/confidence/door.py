"""The door of the confidence op: its contract, and which implementation runs.

    c_k = sigmoid((w . [h_k; W1[x_{k-1}]] + b) / T_k),   survival a_k = c_1 ... c_k     (paper eq. 7)

A slot's score sees its hidden state and the token before it, never its own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..dispatch import Implementation, choose
from . import torch as torch_form

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class ConfidenceWeights(NamedTuple):
    """The confidence head.

    Attributes:
        weight: Of hidden state and, with `w1`, embedding behind it: `[D]` or `[D + r]`, float32, float16 or bfloat16.
        bias: One number, `[1]`, dtype of `weight`; None: 0.
        w1: Embedding of the previous token, `[V, r]`, dtype of `weight`; None: the hidden state alone counts.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    w1: torch.Tensor | None = None


class ConfidenceScores(NamedTuple):
    """Scores of blocks, float32 `[B, g]` each.

    Attributes:
        logits: Before calibration; NaN is given as -inf, infinities as the largest finite numbers.
        own: Their sigmoid.
        survival: Running product of the calibrated confidences.
    """

    logits: torch.Tensor
    own: torch.Tensor
    survival: torch.Tensor


@torch.no_grad()
def confidence_scores(
    hidden: torch.Tensor,
    previous_ids: torch.Tensor,
    weights: ConfidenceWeights,
    *,
    temperatures: torch.Tensor | None = None,
    implementation: Implementation = "auto",
) -> ConfidenceScores:
    """Scores of every slot, from float32 sums of products of what is stored.

    Args:
        hidden: Hidden states after the final norm, `[B, g, D]`, float32, float16 or bfloat16.
        previous_ids: Token before each slot, int64 `[B, g]`, target ids (rows of `w1`, not checked).
        weights: The head.
        temperatures: Calibration, float32 `[>= g]` or `[B, >= g]`, positive; None: 1.
        implementation: `"auto"`, `"torch"` or `"triton"`; see `dispatch.choose`.

    Raises:
        ValueError: Shapes or dtypes that do not fit together; Triton asked for where it cannot run.
        ImportError: Triton asked for and not installed.
    """
    _check(hidden, previous_ids, weights)
    rows, slots = previous_ids.shape
    temperatures = _fitted(temperatures, rows, slots)
    if choose(implementation, hidden) == "torch":
        form = torch_form.confidence_scores
    else:
        from .triton import confidence_scores as form  # triton is an optional dependency
    return ConfidenceScores(*form(hidden, previous_ids, *weights, temperatures))


def scores_of_logits(logits: torch.Tensor, temperatures: torch.Tensor | None) -> ConfidenceScores:
    """Scores of logits float32 `[B, g]` that a head of another kind gave; temperatures as in [`confidence_scores`]."""
    return ConfidenceScores(*torch_form.scores_of_logits(logits, _fitted(temperatures, *logits.shape)))


def _fitted(temperatures: torch.Tensor | None, rows: int, slots: int) -> torch.Tensor | None:
    """Temperatures `[B, g]`."""
    if temperatures is None:
        return None
    is_float = temperatures.dtype == torch.float32
    if not is_float or temperatures.shape[:-1] not in ((), (rows,)) or temperatures.shape[-1] < slots:
        raise ValueError(
            f"`temperatures` must be float32, [{slots}] or [{rows}, {slots}] or longer, got {temperatures.dtype} "
            f"{list(temperatures.shape)}."
        )
    return temperatures[..., :slots].expand(rows, slots)


def _check(hidden: torch.Tensor, previous_ids: torch.Tensor, weights: ConfidenceWeights) -> None:
    weight, bias, w1 = weights
    if hidden.dim() != 3 or hidden.dtype not in _FLOATS:
        raise ValueError(
            f"`hidden` must be float32, float16 or bfloat16 [B, g, D], got {hidden.dtype} {list(hidden.shape)}."
        )
    if previous_ids.shape != hidden.shape[:2] or previous_ids.dtype != torch.int64:
        raise ValueError(
            f"`previous_ids` must be int64 {list(hidden.shape[:2])}, got {previous_ids.dtype} "
            f"{list(previous_ids.shape)}."
        )
    width = hidden.shape[2] + (0 if w1 is None else w1.shape[1])
    if weight.shape != (width,) or weight.dtype not in _FLOATS:
        raise ValueError(
            f"`weights.weight` must be float32, float16 or bfloat16 of shape [{width}] (hidden state"
            f"{'' if w1 is None else ', then embedding'}), got {weight.dtype} {list(weight.shape)}."
        )
    if any(part is not None and part.dtype != weight.dtype for part in (bias, w1)):
        raise ValueError(f"`weights.bias` and `weights.w1` must have the dtype of `weights.weight`, {weight.dtype}.")


__all__ = ["ConfidenceScores", "ConfidenceWeights", "confidence_scores", "scores_of_logits"]
