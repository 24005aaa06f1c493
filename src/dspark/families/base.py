"""The parts every draft layer is made of. A family file states only what differs (see `qwen3.py`, `gemma4.py`).

Attention goes through transformers' attention interface, so eager, sdpa, flash and flex are the library's own. A draft
layer attends from the block to two kinds of keys: context keys, made from projected target features, and the block's
own keys. Both pass the same `k_proj`/`v_proj`; context features do not pass `input_layernorm` (paper eq. 3).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the usual name
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, eager_attention_forward, rotate_half

Rotary = tuple[torch.Tensor, torch.Tensor]
_UNSHARED = SimpleNamespace(is_causal=False)  # what sdpa reads of a layer without shared key heads


class KeyValueSource(Protocol):
    """Where a layer finds the context keys its block attends to (a cache when drafting, plain tensors in training)."""

    def extend(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Context keys and values followed by the block's own, each `[B, KV, W, head_dim]`."""
        ...


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32; `with_scale=False` has no weight (Gemma 4's value norm)."""

    def __init__(self, dim: int, eps: float, *, with_scale: bool = True) -> None:
        super().__init__()
        self.dim = (dim,)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim)) if with_scale else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension; dtype and shape stay."""
        weight = self.weight
        if weight is None or weight.dtype == hidden.dtype:
            return F.rms_norm(hidden, self.dim, weight, self.eps)
        # Under autocast activations are narrower than weights, which torch's fused norm does not take as they are.
        return F.rms_norm(hidden.to(weight.dtype), self.dim, weight, self.eps).to(hidden.dtype)


class DraftRotaryEmbedding(Qwen3RotaryEmbedding):
    """Rotary tables of every family; the frequencies stay float32 when the model is cast.

    Rounded to bfloat16 they would be off by about two radians at position 1000, which shows as low acceptance only.
    """

    def _apply(self, fn: Any, recurse: bool = True) -> DraftRotaryEmbedding:
        exact = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in exact.items():
            moved = self._buffers[name]
            if buffer is not None and moved is not None and moved.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(moved.device)
        return self


class GatedMLP(nn.Module):
    """`down(act(gate(x)) * up(x))` without biases."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[..., D]` to `[..., D]`."""
        return self.down_proj(self.act_fn(self.gate_proj(hidden)) * self.up_proj(hidden))


def rotate(states: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Rotate-half position embedding of `states [B, H, S, head_dim]` by `cos, sin [B, S, head_dim]`."""
    cos, sin = (table.unsqueeze(1) for table in rotary)
    return states * cos + rotate_half(states) * sin


class DraftAttention(nn.Module):
    """Bidirectional attention from a block to context and block; Llama-like: no norm on queries and keys."""

    is_causal = False

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        width, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(width, config.num_attention_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * self.head_dim, bias=bias)
        self.v_proj: nn.Linear | None = nn.Linear(width, config.num_key_value_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, width, bias=bias)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        self.v_norm: nn.Module = nn.Identity()

    def keys_values(self, hidden: torch.Tensor, rotary: Rotary) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (normed, rotated) and values of `hidden [B, S, D]`, each `[B, KV, S, head_dim]`."""
        heads = (-1, self.head_dim)
        projected = self.k_proj(hidden).unflatten(-1, heads)
        values = projected if self.v_proj is None else self.v_proj(hidden).unflatten(-1, heads)
        keys = rotate(self.k_norm(projected).transpose(1, 2), rotary)
        return keys, self.v_norm(values).transpose(1, 2)

    def forward(
        self, hidden: torch.Tensor, rotary: Rotary, context: KeyValueSource, attention_mask: Any
    ) -> torch.Tensor:
        """Attend from the block `hidden [B, q, D]` to `context` and to itself; returns `[B, q, D]`."""
        queries = self.q_proj(hidden).unflatten(-1, (-1, self.head_dim))
        queries = rotate(self.q_norm(queries).transpose(1, 2), rotary)
        keys, values = context.extend(self.layer_idx, *self.keys_values(hidden, rotary))
        implementation = self.config._attn_implementation
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        layer: Any = self
        rows, heads, width, head_dim = queries.shape
        if implementation == "sdpa" and attention_mask is None:
            # Query heads of one key head become queries of that head: sdpa would copy keys and values once per query
            # head. The same sums.
            layer, queries = _UNSHARED, queries.reshape(rows, keys.shape[1], -1, head_dim)
        output, _ = attend(
            layer,
            queries,
            keys,
            values,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            is_causal=False,
        )
        if layer is _UNSHARED:
            output = output.transpose(1, 2).reshape(rows, heads, width, -1).transpose(1, 2)
        return self.o_proj(output.reshape(*hidden.shape[:-1], -1))


class DraftLayer(GradientCheckpointingLayer):
    """Pre-norm draft layer, the Llama form."""

    attention_class: type[DraftAttention] = DraftAttention

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = self.attention_class(config, layer_idx)
        self.mlp = GatedMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, hidden: torch.Tensor, rotary: Rotary, context: KeyValueSource, attention_mask: Any
    ) -> torch.Tensor:
        """One layer over the block `hidden [B, q, D]`; returns `[B, q, D]`."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotary, context, attention_mask)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))
