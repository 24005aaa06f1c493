"""Confidence and survival in Triton: one launch, one program walks the slots of a row."""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..dispatch import device_of

_BLOCK = 1024
LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def _dot(a_ptr, b_ptr, size, BLOCK: tl.constexpr):
    """Sum of products of two rows, one partial sum per lane."""
    lanes = tl.arange(0, BLOCK)
    partial = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        ok = start + lanes < size
        a = tl.load(a_ptr + start + lanes, mask=ok, other=0).to(tl.float32)
        partial += a * tl.load(b_ptr + start + lanes, mask=ok, other=0).to(tl.float32)
    return partial


@triton.jit(do_not_specialize=["slots"])
def _confidence_kernel(
    hidden_ptr, previous_ptr, weight_ptr, bias_ptr, w1_ptr, temperatures_ptr, scores_ptr, batch, slots, width, rank,
    stride_hidden, stride_hidden_slot, stride_w1, stride_temperatures, BLOCK: tl.constexpr,
):  # fmt: skip
    """Logits, own confidence and survival of one row; scores are `[3, B, g]`."""
    row = tl.program_id(0).to(tl.int64)
    field = batch.to(tl.int64) * slots
    survival = 1.0
    for k in range(slots):
        partial = _dot(hidden_ptr + row * stride_hidden + k * stride_hidden_slot, weight_ptr, width, BLOCK)
        if w1_ptr is not None:
            previous = tl.load(previous_ptr + row * slots + k)
            partial += _dot(w1_ptr + previous * stride_w1, weight_ptr + width, rank, BLOCK)
        logit = tl.sum(partial, axis=0)
        if bias_ptr is not None:
            logit += tl.load(bias_ptr).to(tl.float32)
        logit = tl.where(logit != logit, -float("inf"), tl.minimum(tl.maximum(logit, -LARGEST), LARGEST))
        scaled = logit
        if temperatures_ptr is not None:
            scaled = logit / tl.load(temperatures_ptr + row * stride_temperatures + k)
        survival = survival / (1 + tl.exp(-scaled))
        out = scores_ptr + row * slots + k
        tl.store(out, logit)
        tl.store(out + field, 1 / (1 + tl.exp(-logit)))
        tl.store(out + 2 * field, survival)


def confidence_scores(
    hidden: torch.Tensor,
    previous_ids: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    w1: torch.Tensor | None,
    temperatures: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, own confidence and survival; arguments as the torch form's."""
    rows, slots, width = hidden.shape
    hidden = hidden if hidden.stride(-1) == 1 else hidden.contiguous()
    w1, temperatures = (t if t is None or t.stride(-1) == 1 else t.contiguous() for t in (w1, temperatures))
    scores = torch.empty(3, rows, slots, dtype=torch.float32, device=hidden.device)
    with device_of(hidden):
        _confidence_kernel[(rows,)](
            hidden, previous_ids.contiguous(), weight.contiguous(), bias, w1, temperatures, scores, rows, slots, width,
            0 if w1 is None else w1.shape[1], hidden.stride(0), hidden.stride(1), 0 if w1 is None else w1.stride(0),
            0 if temperatures is None else temperatures.stride(0), BLOCK=_BLOCK,
        )  # fmt: skip
    return scores[0], scores[1], scores[2]


__all__ = ["confidence_scores"]
