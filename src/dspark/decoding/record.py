"""What a caller of `generate` gets besides the tokens: streamed tokens, scores, logits, hidden states, attentions.

Everything comes out token by token in the shapes plain decoding gives, so code that reads the output needs no change.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig
from transformers.cache_utils import Cache, StaticLayer

_WITHOUT_ATTENTION = ("linear_attention", "conv", "mamba")  # kinds of layers that give no attention weights


class Recorder:
    """Collects per-token outputs of one row (a batch of several can only be streamed or scored without a drafter).

    Args:
        generation_config: The prepared config: which outputs are wanted.
        streamer: transformers streamer, or None.
    """

    def __init__(self, generation_config: GenerationConfig, streamer: Any) -> None:
        wanted = bool(generation_config.return_dict_in_generate)
        self.scores: tuple[torch.Tensor, ...] | None = () if wanted and generation_config.output_scores else None
        self.logits: tuple[torch.Tensor, ...] | None = () if wanted and generation_config.output_logits else None
        self.attentions: tuple[Any, ...] | None = () if wanted and generation_config.output_attentions else None
        self.hidden_states: tuple[Any, ...] | None = () if wanted and generation_config.output_hidden_states else None
        self.streamer = streamer

    @property
    def wants_scores(self) -> bool:
        """Whether scores or logits are to be kept."""
        return self.scores is not None or self.logits is not None

    @property
    def is_single_row(self) -> bool:
        """Whether anything is wanted that only a single row can give."""
        wants_states = self.attentions is not None or self.hidden_states is not None
        return self.wants_scores or wants_states or self.streamer is not None

    def token(self, token: int, scores: torch.Tensor | None, logits: torch.Tensor | None) -> None:
        """One emitted token with its scores and logits, each `[1, V]` float32."""
        # Copies here and below: a view would keep its whole pass alive, rejected slots included.
        if self.scores is not None and scores is not None:
            self.scores += (scores.clone(),)
        if self.logits is not None and logits is not None:
            self.logits += (logits.clone(),)
        if self.streamer is not None:
            self.streamer.put(torch.tensor([token]))

    def outputs(self) -> dict[str, Any]:
        """What was kept, by the field names of transformers' output."""
        return {name: getattr(self, name) for name in ("scores", "logits", "attentions", "hidden_states")}

    def prompt_pass(self, outputs: Any) -> None:
        """Attentions and hidden states of the prompt's pass, as they are."""
        if self.attentions is not None:
            self.attentions += (outputs.attentions,)
        if self.hidden_states is not None:
            self.hidden_states += (outputs.hidden_states,)

    def verify_pass(self, outputs: Any, slots: range, widths: list[int | None]) -> None:
        """Split a verification pass into tokens.

        Args:
            outputs: The target's output.
            slots: Slots of the pass whose successors were emitted.
            widths: See `attention_widths`.
        """
        for slot in slots:
            if self.attentions is not None:
                layers = zip(outputs.attentions, widths, strict=True)
                self.attentions += (tuple(_step_weights(weights, slot, width) for weights, width in layers),)
            if self.hidden_states is not None:
                self.hidden_states += (
                    tuple(None if h is None else h[:, slot : slot + 1].clone() for h in outputs.hidden_states),
                )


def attention_widths(config: Any, cache: Cache, count: int) -> list[int | None]:
    """Most keys that one step of plain decoding attends to, per layer with attention weights.

    Args:
        config: Of the target's text decoder.
        cache: The target's cache.
        count: Layers with attention weights.

    Returns:
        The window of a sliding layer, None for a layer that keeps everything, 0 for a static one: its width never
        changes.
    """
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * count
    width_of: dict[str, int | None] = {}
    # Layers that share another's keys come last and have no cache layer of their own.
    for kind, layer in zip(kinds, cache.layers, strict=False):
        width_of.setdefault(kind, _width(layer))
    widths = [width_of[kind] for kind in kinds if kind in width_of and kind not in _WITHOUT_ATTENTION]
    return widths if len(widths) == count else [None] * count


def _width(layer: Any) -> int | None:
    if isinstance(layer, StaticLayer):
        return 0
    return layer.sliding_window if getattr(layer, "is_sliding", False) else None


def _step_weights(weights: torch.Tensor, slot: int, width: int | None) -> torch.Tensor:
    """Of a pass's attention weights `[1, heads, q, keys]`, those of one slot up to its own key, `[1, heads, 1, n]`."""
    end = weights.shape[-1] - (weights.shape[-2] - 1 - slot) if width != 0 else None
    start = max(end - width, 0) if end is not None and width is not None else 0
    return weights[:, :, slot : slot + 1, start:end].clone()


__all__ = ["Recorder", "attention_widths"]
