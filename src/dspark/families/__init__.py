"""What differs between draft backbones, and nothing else: one file per family."""

from __future__ import annotations

from .base import DraftLayer, DraftRotaryEmbedding, GatedMLP, KeyValueSource, RMSNorm, Rotary
from .gemma4 import Gemma4DraftLayer, reset_layer_scalar
from .llama import LlamaDraftLayer
from .qwen3 import Qwen3DraftLayer
from .windows import LayerAttention, layer_attention, sees_block, sees_context

# Beside the literal `Family` of the config; a test holds that the two agree.
FAMILIES: dict[str, type[DraftLayer]] = {
    "qwen3": Qwen3DraftLayer,
    "llama": LlamaDraftLayer,
    "gemma4": Gemma4DraftLayer,
}

__all__ = [
    "FAMILIES",
    "DraftLayer",
    "DraftRotaryEmbedding",
    "GatedMLP",
    "KeyValueSource",
    "LayerAttention",
    "RMSNorm",
    "Rotary",
    "layer_attention",
    "reset_layer_scalar",
    "sees_block",
    "sees_context",
]
