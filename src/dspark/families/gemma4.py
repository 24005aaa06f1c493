"""Gemma 4 draft layers: sandwich norms, value norm, unit attention scale, a stored scalar on each layer's output.

The draft uses the target's full-attention geometry (`global_head_dim`, `num_global_key_value_heads`), which the config
reader folds into `head_dim` and `num_key_value_heads`. With `attention_k_eq_v` there is no value projection.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .base import DraftAttention, DraftLayer, KeyValueSource, RMSNorm, Rotary


class Gemma4DraftAttention(DraftAttention):
    """QK-norm, weightless value norm, scale 1."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.scaling = 1.0
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.v_norm = RMSNorm(self.head_dim, config.rms_norm_eps, with_scale=False)
        if config.attention_k_eq_v:
            self.v_proj = None


class Gemma4DraftLayer(DraftLayer):
    """Norms before and after each sub-layer; the output is multiplied by `layer_scalar`."""

    attention_class = Gemma4DraftAttention
    layer_scalar: torch.Tensor

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.pre_feedforward_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.register_buffer("layer_scalar", torch.ones(1))

    def forward(
        self, hidden: torch.Tensor, rotary: Rotary, context: KeyValueSource, attention_mask: Any
    ) -> torch.Tensor:
        """One layer over the block `hidden [B, q, D]`; returns `[B, q, D]`."""
        attended = self.self_attn(self.input_layernorm(hidden), rotary, context, attention_mask)
        hidden = hidden + self.post_attention_layernorm(attended)
        fed = self.mlp(self.pre_feedforward_layernorm(hidden))
        return (hidden + self.post_feedforward_layernorm(fed)) * self.layer_scalar


def reset_layer_scalar(module: nn.Module) -> None:
    """Set a new layer's scalar to one (buffers come back uninitialised from a meta-device build)."""
    if isinstance(module, Gemma4DraftLayer):
        nn.init.ones_(module.layer_scalar)
