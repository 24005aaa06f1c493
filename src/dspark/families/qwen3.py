"""Qwen3 draft layers: the Llama form with an RMSNorm over each query and key head."""

from __future__ import annotations

from typing import Any

from .base import DraftAttention, DraftLayer, RMSNorm


class Qwen3DraftAttention(DraftAttention):
    """Adds QK-norm, over the head dimension only."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)


class Qwen3DraftLayer(DraftLayer):
    """Differs from [`DraftLayer`] in its attention only."""

    attention_class = Qwen3DraftAttention
