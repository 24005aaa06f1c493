"""Logits processors on both sides of a round, slot by slot on growing prefixes.

Plain decoding calls each processor once per token with the text so far. The target side makes exactly those calls:
slot k is processed only when all drafts before it were accepted, so even a processor with memory (a grammar, a
watermark) sees the same sequence of prefixes as without a drafter. The draft side applies only transformers' own
processors that are functions of their arguments; any draft law is exact, so leaving one out costs acceptance alone.
"""

from __future__ import annotations

import torch
from transformers.generation import logits_process as lp
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList

# Functions of the scores of one row alone: a whole block is processed in one call, and a reduced vocabulary as it is.
_ROW_WISE = (
    lp.TemperatureLogitsWarper, lp.TopKLogitsWarper, lp.TopPLogitsWarper, lp.MinPLogitsWarper, lp.TypicalLogitsWarper,
    lp.EpsilonLogitsWarper, lp.EtaLogitsWarper, lp.InfNanRemoveLogitsProcessor, lp.LogitNormalization,
)  # fmt: skip
# transformers' own, but with memory between calls or a model inside: target side only.
_STATEFUL = (
    lp.UnbatchedClassifierFreeGuidanceLogitsProcessor, lp.SynthIDTextWatermarkLogitsProcessor,
)  # fmt: skip


def _is_row_wise(processor: LogitsProcessor) -> bool:
    return type(processor) in _ROW_WISE


def _is_stateless(processor: LogitsProcessor) -> bool:
    own = type(processor).__module__.startswith("transformers.")
    return own and not isinstance(processor, _STATEFUL)


class Processors:
    """The processors of one `generate` call.

    Args:
        processors: The list `generate` prepared, in order.
    """

    def __init__(self, processors: LogitsProcessorList) -> None:
        self.target = processors
        self.draft = LogitsProcessorList([p for p in processors if _is_stateless(p)])
        self.target_is_row_wise = all(_is_row_wise(p) for p in self.target)
        self.draft_is_row_wise = all(_is_row_wise(p) for p in self.draft)

    def process_target(self, prefix_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Scores `[1, V]` of one slot of one row behind `prefix_ids [1, n]`, as plain decoding computes them."""
        return self.target(prefix_ids, logits)

    def process_target_rows(self, logits: torch.Tensor) -> torch.Tensor:
        """Scores `[N, V]` of any slots at once; only when `target_is_row_wise`."""
        return self.target(None, logits)

    def process_draft(
        self, prefix_ids: list[torch.Tensor], logits: torch.Tensor, draft_token_ids: torch.Tensor | None, vocab: int
    ) -> torch.Tensor:
        """Draft scores of one slot in every row.

        Args:
            prefix_ids: Per row, the text before the slot, `[1, n_b]`; rows may differ in length.
            logits: `[B, Vd]`, float32.
            draft_token_ids: int64 `[Vd]`, or None for the whole vocabulary.
            vocab: V, rows of the target's logits.

        Returns:
            Scores `[B, Vd]`.
        """
        if self.draft_is_row_wise:
            return self.draft(None, logits) if self.draft else logits
        full = logits
        if draft_token_ids is not None:
            # Processors address tokens by target id.
            full = logits.new_full((logits.shape[0], vocab), -torch.inf)
            full[:, draft_token_ids] = logits
        rows = [self.draft(ids, full[b : b + 1]) for b, ids in enumerate(prefix_ids)]
        scores = torch.cat(rows)
        return scores if draft_token_ids is None else scores[:, draft_token_ids]


__all__ = ["Processors"]
