"""Features of the gated and the recurrent head in Triton: one launch per slot, one program per row and tile of `r`."""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from .arguments import MarkovTables, RecurrentFeatures

_BLOCK_F, _BLOCK_I = 8, 128  # features of a program, and inputs it takes at a time: twice as many would spill


@triton.jit
def _product(weight_ptr, input_ptr, outputs, output_ok, size, stride_weight, BLOCK_F: tl.constexpr,
             BLOCK_I: tl.constexpr):  # fmt: skip
    """`weight[outputs, :size] input` in float32, `[BLOCK_F]`."""
    lanes = tl.arange(0, BLOCK_I)
    partial = tl.zeros([BLOCK_F, BLOCK_I], tl.float32)
    for start in range(0, size, BLOCK_I):
        ok = start + lanes < size
        inputs = tl.load(input_ptr + start + lanes, mask=ok, other=0).to(tl.float32)
        weight = tl.load(weight_ptr + outputs[:, None] * stride_weight + start + lanes[None, :],
                         mask=output_ok[:, None] & ok[None, :], other=0)  # fmt: skip
        partial += weight.to(tl.float32) * inputs[None, :]
    return tl.sum(partial, axis=1)


@triton.jit
def _sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def _tanh(x):
    return 2 * _sigmoid(2 * x) - 1


@triton.jit(do_not_specialize=["step", "batch", "slots"])
def _markov_features_kernel(
    tokens_ptr, w1_ptr, weight_ptr, hidden_ptr, states_ptr, features_ptr, step, batch, slots, rank, stride_w1,
    stride_weight, stride_hidden, stride_hidden_slot, RECURS: tl.constexpr, BLOCK_F: tl.constexpr,
    BLOCK_I: tl.constexpr,
):  # fmt: skip
    """Features `[B, r]` of one slot; states are `[g + 1, B, r]`, and slot k reads the k-th and writes the next."""
    row = tl.program_id(0).to(tl.int64)
    outputs = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    ok = outputs < rank
    embedded = w1_ptr + tl.load(tokens_ptr + row * (slots + 1) + step) * stride_w1
    hidden = hidden_ptr + row * stride_hidden + step.to(tl.int64) * stride_hidden_slot + outputs
    if RECURS:
        state = states_ptr + (step.to(tl.int64) * batch + row) * rank
        gate = _product(weight_ptr, state, outputs, ok, rank, stride_weight, BLOCK_F, BLOCK_I)
        gate += _product(weight_ptr + rank, embedded, outputs, ok, rank, stride_weight, BLOCK_F, BLOCK_I)
        candidate = _product(weight_ptr, state, outputs + rank, ok, rank, stride_weight, BLOCK_F, BLOCK_I)
        candidate += _product(weight_ptr + rank, embedded, outputs + rank, ok, rank, stride_weight, BLOCK_F, BLOCK_I)
        output = _product(weight_ptr, state, outputs + 2 * rank, ok, rank, stride_weight, BLOCK_F, BLOCK_I)
        output += _product(weight_ptr + rank, embedded, outputs + 2 * rank, ok, rank, stride_weight, BLOCK_F, BLOCK_I)
        keep = _sigmoid(gate + tl.load(hidden, mask=ok, other=0).to(tl.float32))
        candidate += tl.load(hidden + rank, mask=ok, other=0).to(tl.float32)
        features = _tanh(output + tl.load(hidden + 2 * rank, mask=ok, other=0).to(tl.float32))
        old = tl.load(state + outputs, mask=ok, other=0)
        after = states_ptr + ((step.to(tl.int64) + 1) * batch + row) * rank
        tl.store(after + outputs, keep * old + (1 - keep) * _tanh(candidate), mask=ok)
    else:
        gate = _product(weight_ptr, embedded, outputs, ok, rank, stride_weight, BLOCK_F, BLOCK_I)
        gate += tl.load(hidden, mask=ok, other=0).to(tl.float32)
        features = _sigmoid(gate) * tl.load(embedded + outputs, mask=ok, other=0).to(tl.float32)
    tl.store(features_ptr + row * rank + outputs, features, mask=ok)


class FeatureSteps:
    """Makes the features of a block's slots, one after the other.

    Args:
        tables: With `features`.
        token_ids: int64 `[B, g + 1]`, contiguous; slot k reads the token before it, at k.

    Attributes:
        features: Of the slot launched last, `[B, r]`, in the dtype of the weights.
    """

    def __init__(self, tables: MarkovTables, token_ids: torch.Tensor) -> None:
        assert tables.features is not None
        self.w1, self.how, self.token_ids = tables.w1, tables.features, token_ids
        self.weight, self.hidden = (t if t.stride(-1) == 1 else t.contiguous() for t in self.how[:2])
        self.rows, self.slots = len(token_ids), token_ids.shape[1] - 1
        rank = self.w1.shape[1]
        self.features = torch.empty(self.rows, rank, dtype=self.w1.dtype, device=self.w1.device)
        self.states = None
        if isinstance(self.how, RecurrentFeatures):
            shape = (self.slots + 1, self.rows, rank)
            self.states = torch.empty(shape, dtype=torch.float32, device=self.w1.device)
            self.states[0] = self.how.state

    def launch(self, k: int) -> None:
        """Make the features of slot k from the token before it."""
        rank = self.w1.shape[1]
        _markov_features_kernel[(self.rows, triton.cdiv(rank, _BLOCK_F))](
            self.token_ids, self.w1, self.weight, self.hidden, self.states, self.features, k, self.rows, self.slots,
            rank, self.w1.stride(0), self.weight.stride(0), self.hidden.stride(0), self.hidden.stride(1),
            RECURS=self.states is not None, BLOCK_F=_BLOCK_F, BLOCK_I=_BLOCK_I,
        )  # fmt: skip

    @property
    def last_state(self) -> torch.Tensor | None:
        """The recurrent head's state behind the block, float32 `[B, r]`."""
        return None if self.states is None else self.states[-1]


__all__ = ["FeatureSteps"]
