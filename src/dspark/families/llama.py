"""Llama-like draft layers: the base form as it stands. Fits targets without QK-norm (Llama, SmolLM, Mistral)."""

from __future__ import annotations

from .base import DraftLayer


class LlamaDraftLayer(DraftLayer):
    """Nothing differs from [`DraftLayer`]."""
