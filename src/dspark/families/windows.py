"""Which keys a block slot may attend to where a draft layer has a window or is causal inside the block.

Plain DSpark layers see the whole context and the whole block. Other trainers cut: each by a rule of its own, which the
config names, as another rule costs acceptance without an error. Positions are absolute; `q` is a slot's, `k` a key's,
`a` the anchor's, `W` the window.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class LayerAttention(NamedTuple):
    """What one draft layer sees.

    Attributes:
        window: W, or None for the whole context.
        rule: Member of `WindowRule` (see `DSparkConfig`); None without a window.
        is_causal: Whether a slot sees only the slots up to itself.
    """

    window: int | None
    rule: str | None
    is_causal: bool

    @property
    def is_plain(self) -> bool:
        """Whether it sees everything, so that no mask is needed."""
        return self.window is None and not self.is_causal

    def cuts(self, context: int, block: int) -> bool:
        """Whether anything is hidden from a block of `block` slots behind `context` positions."""
        if self.is_causal and block > 1:
            return True
        return self.window is not None and context + block > self.window


def layer_attention(config: Any) -> list[LayerAttention]:
    """Of each draft layer of a `DSparkConfig`."""
    layers = config.num_hidden_layers
    windows = config.attention_windows or [None] * layers
    causal = config.causal_in_block or [False] * layers
    return [
        LayerAttention(window, config.window_rule if window is not None else None, is_causal)
        for window, is_causal in zip(windows, causal, strict=True)
    ]


def sees_context(
    layer: LayerAttention, slots: torch.Tensor, keys: torch.Tensor, anchors: torch.Tensor
) -> torch.Tensor:
    """Whether slots at positions q see context keys at positions k; all int64 and broadcastable, result bool."""
    visible = keys < anchors
    window = layer.window
    if window is None:
        return visible
    if layer.rule == "ctx_from_anchor":
        return visible & (keys >= anchors - window)
    reach = window if layer.rule == "abs_all" else window - 1
    return visible & (keys >= slots - reach)


def sees_block(layer: LayerAttention, slots: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Whether slots at positions q see slots at positions k of their own block; broadcastable, result bool."""
    ahead = keys - slots
    reach = None if layer.window is None else layer.window if layer.rule == "abs_all" else layer.window - 1
    if reach is None or layer.rule in ("ctx_from_anchor", "per_slot_ctx"):
        return (ahead <= 0) if layer.is_causal else torch.ones_like(ahead, dtype=torch.bool)
    return (ahead >= -reach) & (ahead <= (0 if layer.is_causal else reach))


__all__ = ["LayerAttention", "layer_attention", "sees_block", "sees_context"]
