"""What the Markov step takes and gives, and the checks of what can be checked without looking at values."""

from __future__ import annotations

from typing import NamedTuple

import torch

MAX_CANDIDATES = 1024  # more would not restrict the step enough to pay for gathering rows of W2
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class GatedFeatures(NamedTuple):
    """Features of the gated head, `sigmoid(weight e + hidden_k) * e` with `e = W1[previous]`.

    Attributes:
        weight: What the gate makes of `e`, `[r, r]`, dtype of `w1`.
        hidden: What it makes of the slot's hidden state, bias included, `[B, g, r]`, a float dtype.
    """

    weight: torch.Tensor
    hidden: torch.Tensor


class RecurrentFeatures(NamedTuple):
    """Features `tanh(output)` of the recurrent head (eq. 6), whose state goes on to the next slot.

    `[gate; candidate; output] = weight [state; e] + hidden_k` with `e = W1[previous]`; the next state is
    `keep * state + (1 - keep) * tanh(candidate)`, `keep = sigmoid(gate)`.

    Attributes:
        weight: What the head makes of state and embedding, `[3r, 2r]`, dtype of `w1`.
        hidden: What it makes of the slot's hidden state, bias included, `[B, g, 3r]`, a float dtype.
        state: State before the first slot, float32 `[B, r]`.
    """

    weight: torch.Tensor
    hidden: torch.Tensor
    state: torch.Tensor


class MarkovTables(NamedTuple):
    """The head's weights and the vocabulary they speak of.

    Attributes:
        w1: Embedding of the previous token, `[V, r]`, float32, float16 or bfloat16.
        w2: Read-out to the draft columns, `[Vd, r]`, dtype of `w1`.
        draft_token_ids: Target id of each column, int64 `[Vd]`; None: columns are target ids.
        forbidden: True on columns that must not be chosen, bool `[Vd]`; at least one must be False. None: none is.
        features: What `w2` is applied to where that is more than `W1[previous]`; rounded to the dtype of `w2`.
    """

    w1: torch.Tensor
    w2: torch.Tensor
    draft_token_ids: torch.Tensor | None = None
    forbidden: torch.Tensor | None = None
    features: GatedFeatures | RecurrentFeatures | None = None


class Sampling(NamedTuple):
    """How to draw instead of taking the largest: `argmax(logits / temperature + Gumbel noise)`.

    Noise comes from `seeds` and `offsets`, or is given (`noise`). Counters make draws repeatable and independent of
    the batch: the noise of a column is a function of its row's seed, the row's offset and the column alone. A block of
    `g` steps uses up the offsets `o .. o + g - 1`; a caller that moves on by `g` never uses noise twice.

    Attributes:
        temperature: Positive number, or float32 `[B]`, one per row.
        seeds: int64 `[B]`; required unless `noise` is given.
        offsets: int64 `[B]`, 0 or more; None: 0.
        noise: Standard Gumbel noise, float32 `[B, Vd]` for a step and `[B, g, Vd]` for a block.
    """

    temperature: float | torch.Tensor = 1.0
    seeds: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    noise: torch.Tensor | None = None


class MarkovDraw(NamedTuple):
    """Tokens and the law each was chosen from; a step's fields lack the dimension `g`.

    Attributes:
        token_ids: Target ids, int64 `[B, g]`.
        log_probs: Log-probability of each token under its law, float32 `[B, g]`.
        law_logits: Their softmax over columns is the law, float32 `[B, g, Vd]`; None unless asked for.
        state: State of a recurrent head behind the block, float32 `[B, r]`; None for the others.
    """

    token_ids: torch.Tensor
    log_probs: torch.Tensor
    law_logits: torch.Tensor | None
    state: torch.Tensor | None = None


class Draws(NamedTuple):
    """`Sampling`, complete: temperatures float32 `[B]`, and noise or both counters."""

    temperatures: torch.Tensor
    seeds: torch.Tensor | None
    offsets: torch.Tensor | None
    noise: torch.Tensor | None


def check_block(base_logits: torch.Tensor, anchor_ids: torch.Tensor, tables: MarkovTables, top_k: int | None) -> None:
    """Refuse logits `[B, g, Vd]`, anchors, tables and a number of candidates that do not fit together."""
    w1, w2 = tables.w1, tables.w2
    if w1.dim() != 2 or w2.dim() != 2 or w1.shape[1] != w2.shape[1] or w1.dtype != w2.dtype or w1.dtype not in _FLOATS:
        raise ValueError(
            "`tables.w1` and `tables.w2` must be [V, r] and [Vd, r] of one dtype (float32, float16 or bfloat16), got "
            f"{w1.dtype} {list(w1.shape)} and {w2.dtype} {list(w2.shape)}."
        )
    columns = w2.shape[0]
    if base_logits.dim() != 3 or base_logits.shape[2] != columns or base_logits.dtype not in _FLOATS:
        raise ValueError(
            f"`base_logits` must be float32, float16 or bfloat16 with a last dimension of {columns} (the rows of "
            f"`tables.w2`), got {base_logits.dtype} {list(base_logits.shape)}."
        )
    if 0 in base_logits.shape[1:]:
        raise ValueError(f"`base_logits` must have a slot and a column, got {list(base_logits.shape)}.")
    rows = base_logits.shape[0]
    _check("ids of the tokens before the block", anchor_ids, torch.int64, (rows,))
    if tables.features is not None:
        _check_features(tables.features, w1, rows, base_logits.shape[1])
    if tables.draft_token_ids is not None:
        _check("tables.draft_token_ids", tables.draft_token_ids, torch.int64, (columns,))
    if tables.forbidden is not None:
        _check("tables.forbidden", tables.forbidden, torch.bool, (columns,))
    if top_k is not None and not 1 <= top_k <= min(columns, MAX_CANDIDATES):
        raise ValueError(
            f"`candidate_top_k` must be 1 to {min(columns, MAX_CANDIDATES)} for {columns} columns, got {top_k}. Pass "
            "None to let every column see the bias."
        )


def _check_features(features: GatedFeatures | RecurrentFeatures, w1: torch.Tensor, rows: int, slots: int) -> None:
    rank = w1.shape[1]
    parts, inputs = (3, 2) if isinstance(features, RecurrentFeatures) else (1, 1)
    _check("tables.features.weight", features.weight, w1.dtype, (parts * rank, inputs * rank))
    if features.hidden.dtype not in _FLOATS:
        raise ValueError(
            f"`tables.features.hidden` must be float32, float16 or bfloat16, got {features.hidden.dtype}."
        )
    _check("tables.features.hidden", features.hidden, features.hidden.dtype, (rows, slots, parts * rank))
    if isinstance(features, RecurrentFeatures):
        _check("tables.features.state", features.state, torch.float32, (rows, rank))


def complete(sampling: Sampling, base_logits: torch.Tensor) -> Draws:
    """Checked sampling arguments for logits `[B, g, Vd]`."""
    rows, slots, columns = base_logits.shape
    temperature, seeds, offsets, noise = sampling
    if isinstance(temperature, torch.Tensor):
        _check("sampling.temperature", temperature, torch.float32, (rows,))
    elif not temperature > 0:
        raise ValueError(f"`sampling.temperature` must be positive, got {temperature}. Pass no sampling for arg-max.")
    else:
        temperature = torch.full((rows,), temperature, dtype=torch.float32, device=base_logits.device)
    if noise is not None:
        _check("sampling.noise", noise, torch.float32, (rows, slots, columns))
        return Draws(temperature, None, None, noise)
    if seeds is None:
        raise ValueError("`sampling` needs `seeds` (int64, one per row) or `noise`, got neither.")
    _check("sampling.seeds", seeds, torch.int64, (rows,))
    offsets = torch.zeros_like(seeds) if offsets is None else offsets
    _check("sampling.offsets", offsets, torch.int64, (rows,))
    return Draws(temperature, seeds, offsets, None)


def _check(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tensor.shape != shape:
        raise ValueError(f"`{name}` must be {dtype} of shape {list(shape)}, got {tensor.dtype} {list(tensor.shape)}.")


__all__ = [
    "MAX_CANDIDATES",
    "Draws",
    "GatedFeatures",
    "MarkovDraw",
    "MarkovTables",
    "RecurrentFeatures",
    "Sampling",
    "check_block",
    "complete",
]
