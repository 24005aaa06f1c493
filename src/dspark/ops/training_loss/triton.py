"""The vocabulary-wide loss terms in Triton: one launch, one program per position, no tensor but the gradient written.

A program walks its row's tiles for the normaliser, for the distance and, if wanted, for the gradient. Sums are kept
per lane, so that their rounding does not grow with the number of tiles times lanes.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..dispatch import device_of

_BLOCK, _WARPS = 2048, 8


@triton.jit
def _log_sum_exp(x_ptr, columns, BLOCK: tl.constexpr):
    """Of one row, by running maxima per lane; NaN where an entry is NaN or +inf."""
    lanes = tl.arange(0, BLOCK)
    largest, total = tl.full([BLOCK], -float("inf"), tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        x = tl.load(x_ptr + start + lanes, mask=start + lanes < columns, other=-float("inf")).to(tl.float32)
        above = tl.maximum(largest, x)
        # A lane that has seen nothing but -inf has no number to subtract.
        shift = tl.where(above == -float("inf"), 0.0, above)
        total = total * tl.exp(largest - shift) + tl.exp(x - shift)
        largest = above
    top = tl.max(largest, axis=0)
    shift = tl.where(top == -float("inf"), 0.0, top)
    return shift + tl.log(tl.sum(total * tl.exp(largest - shift), axis=0))


@triton.jit
def _signed(x, norm, target, inside):
    """Draft probabilities, their difference to the target's, and its sign."""
    probs = tl.where(inside, tl.exp(x - norm), 0)
    difference = probs - target
    sign = tl.where(difference > 0, 1.0, tl.where(difference < 0, -1.0, 0.0))
    return probs, difference, sign


@triton.jit
def _training_loss_kernel(
    logits_ptr, labels_ptr, weights_ptr, target_ptr, ce_ptr, distance_ptr, gradient_ptr, columns, ce, l1,
    stride_logits, stride_target, BLOCK: tl.constexpr,
):  # fmt: skip
    """Cross-entropy, distance and gradient of one position."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr, t_ptr = logits_ptr + row * stride_logits, target_ptr
    norm = _log_sum_exp(x_ptr, columns, BLOCK)
    label = tl.load(labels_ptr + row)
    known = label >= 0
    at_label = tl.load(x_ptr + tl.maximum(label, 0)).to(tl.float32)
    tl.store(ce_ptr + row, tl.where(known, norm - at_label, 0))

    lanes = tl.arange(0, BLOCK)
    inner = 0.0
    if target_ptr is not None:
        t_ptr = target_ptr + row * stride_target
        distances, masses = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        inners = tl.zeros([BLOCK], tl.float32)
        for start in range(0, columns, BLOCK):
            inside = start + lanes < columns
            x = tl.load(x_ptr + start + lanes, mask=inside, other=0).to(tl.float32)
            target = tl.load(t_ptr + start + lanes, mask=inside, other=0)
            probs, difference, sign = _signed(x, norm, target, inside)
            distances += tl.abs(difference)
            masses += target
            inners += probs * sign
        inner = tl.sum(inners, axis=0)
        missing = 1 - tl.sum(masses, axis=0)
        tl.store(distance_ptr + row, tl.sum(distances, axis=0) + tl.where(missing < 0, 0, missing))

    if gradient_ptr is not None:
        weight, ce_row = tl.load(weights_ptr + row), tl.where(known, ce, 0.0)
        for start in range(0, columns, BLOCK):
            inside = start + lanes < columns
            x = tl.load(x_ptr + start + lanes, mask=inside, other=0).to(tl.float32)
            if target_ptr is not None:
                target = tl.load(t_ptr + start + lanes, mask=inside, other=0)
                probs, difference, sign = _signed(x, norm, target, inside)
                slope = probs * (l1 * sign + (ce_row - l1 * inner))
            else:
                slope = tl.where(inside, tl.exp(x - norm), 0) * ce_row
            slope = tl.where(start + lanes == label, slope - ce_row, slope)
            tl.store(gradient_ptr + row * columns + start + lanes, slope * weight, mask=inside)


def training_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    target_probs: torch.Tensor | None,
    ce: float,
    l1: float,
    with_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Sums of both terms, acceptance and gradient; arguments as the torch form's."""
    (rows, columns), device = logits.shape, logits.device
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    if target_probs is not None and target_probs.stride(-1) != 1:
        target_probs = target_probs.contiguous()
    ce_rows = torch.empty(rows, dtype=torch.float32, device=device)
    distance = None if target_probs is None else torch.empty_like(ce_rows)
    gradient = torch.empty(rows, columns, dtype=logits.dtype, device=device) if with_gradient else None
    if rows:
        with device_of(logits):
            _training_loss_kernel[(rows,)](
                logits, labels.contiguous(), weights.contiguous(), target_probs, ce_rows, distance, gradient, columns,
                float(ce), float(l1), logits.stride(0), 0 if target_probs is None else target_probs.stride(0),
                BLOCK=_BLOCK, num_warps=_WARPS,
            )  # fmt: skip
    nothing = weights.new_zeros(())
    ce_sum = (ce_rows * weights).sum() if ce else nothing
    if distance is None:
        return ce_sum, nothing, None, gradient
    l1_sum = (distance * weights).sum() if l1 else nothing
    return ce_sum, l1_sum, (1 - 0.5 * distance).clamp(0, 1), gradient


__all__ = ["training_loss"]
