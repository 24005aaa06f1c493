"""What a caller of `generate` gets besides the tokens: streamed tokens, scores, logits, hidden states, attentions.

Everything comes out token by token in the shapes plain decoding gives, so code that reads the output needs no change.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig


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
        if self.scores is not None and scores is not None:
            self.scores += (scores,)
        if self.logits is not None and logits is not None:
            self.logits += (logits,)
        if self.streamer is not None:
            self.streamer.put(torch.tensor([token]))

    def prompt_pass(self, outputs: Any) -> None:
        """Attentions and hidden states of the prompt's pass, as they are."""
        if self.attentions is not None:
            self.attentions += (outputs.attentions,)
        if self.hidden_states is not None:
            self.hidden_states += (outputs.hidden_states,)

    def verify_pass(self, outputs: Any, slots: range, key_lengths: range) -> None:
        """Split a verification pass into tokens.

        Args:
            outputs: The target's output.
            slots: Slots of the pass whose successors were emitted.
            key_lengths: Keys each of these slots attended to.
        """
        for slot, keys in zip(slots, key_lengths, strict=True):
            if self.attentions is not None:
                self.attentions += (tuple(a[:, :, slot : slot + 1, :keys] for a in outputs.attentions),)
            if self.hidden_states is not None:
                self.hidden_states += (tuple(h[:, slot : slot + 1] for h in outputs.hidden_states),)


__all__ = ["Recorder"]
