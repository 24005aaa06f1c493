"""Logits processors on both sides of a round, slot by slot on growing prefixes.

Plain decoding calls each processor once per token with the text so far. The target side makes exactly those calls:
slot k is processed only when all drafts before it were accepted, so even a processor with memory (a grammar, a
watermark) sees the same sequence of prefixes as without a drafter. The draft side applies only transformers' own
processors that are functions of their arguments; any draft law is exact, so leaving one out costs acceptance alone.
Rows of a batch have prefixes of different lengths and are processed one at a time, so whatever transformers' own
processors hold per row (prompts, memory, a cache) is dealt out to the rows first.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from transformers.generation import logits_process as lp
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList

# Functions of the scores of one row alone: a whole block is processed in one call, and a reduced vocabulary as it is.
_ROW_WISE = (
    lp.TemperatureLogitsWarper, lp.TopKLogitsWarper, lp.TopPLogitsWarper, lp.MinPLogitsWarper, lp.TypicalLogitsWarper,
    lp.EpsilonLogitsWarper, lp.EtaLogitsWarper, lp.InfNanRemoveLogitsProcessor, lp.LogitNormalization,
)  # fmt: skip
# transformers' own, but with memory between calls, a model or a function of the caller's inside: target side only.
_STATEFUL = (
    lp.UnbatchedClassifierFreeGuidanceLogitsProcessor, lp.SynthIDTextWatermarkLogitsProcessor,
    lp.PrefixConstrainedLogitsProcessor,
)  # fmt: skip


def _is_row_wise(processor: LogitsProcessor) -> bool:
    return type(processor) in _ROW_WISE


def _is_stateless(processor: LogitsProcessor) -> bool:
    own = type(processor).__module__.startswith("transformers.")
    return own and not isinstance(processor, _STATEFUL)


def _for_row(processor: LogitsProcessor, row: int, num_rows: int) -> LogitsProcessor:
    """What serves row `row` of a batch of `num_rows` and is called with that row alone."""
    own: Any = copy.copy(processor)
    kind = type(processor)
    if kind is lp.PrefixConstrainedLogitsProcessor:
        # "Beams" are also the sequences of one prompt, which the caller's function knows by one number.
        allowed, prompt = own._prefix_allowed_tokens_fn, row // own._num_beams
        own._prefix_allowed_tokens_fn, own._num_beams = lambda _, prefix: allowed(prompt, prefix), 1
    elif kind is lp.RepetitionPenaltyLogitsProcessor and isinstance(own.prompt_ignore_length, torch.Tensor):
        own.prompt_ignore_length = _row_of(own.prompt_ignore_length, row, num_rows)
    elif kind is lp.EncoderRepetitionPenaltyLogitsProcessor:
        own.encoder_input_ids = _row_of(own.encoder_input_ids, row, num_rows)
    elif kind is lp.EncoderNoRepeatNGramLogitsProcessor:
        own.generated_ngrams, own.batch_size = [own.generated_ngrams[row * own.batch_size // num_rows]], 1
    elif kind is lp.UnbatchedClassifierFreeGuidanceLogitsProcessor:
        own.unconditional_context = {
            name: _row_of(value, row, num_rows) if isinstance(value, torch.Tensor) else value
            for name, value in own.unconditional_context.items()
        }
    elif kind is not lp.SynthIDTextWatermarkLogitsProcessor:  # a copy has a memory of its own
        return processor
    return own


def _row_of(values: torch.Tensor, row: int, num_rows: int) -> torch.Tensor:
    """The entry `[1, ...]` of `values [N, ...]` for one row; sequences of one prompt may share an entry."""
    index = row * values.shape[0] // num_rows
    return values[index : index + 1]


class Processors:
    """The processors of one `generate` call.

    Args:
        processors: The list `generate` prepared, in order.
        num_rows: Rows of the batch.
    """

    def __init__(self, processors: LogitsProcessorList, *, num_rows: int) -> None:
        self.target = processors
        self.draft = LogitsProcessorList([p for p in processors if _is_stateless(p)])
        self.target_is_row_wise = all(_is_row_wise(p) for p in self.target)
        self.draft_is_row_wise = all(_is_row_wise(p) for p in self.draft)
        self._target_of = [processors] * num_rows
        if num_rows > 1 and not self.target_is_row_wise:
            self._target_of = [
                LogitsProcessorList([_for_row(p, row, num_rows) for p in processors]) for row in range(num_rows)
            ]
        self._draft_of = [LogitsProcessorList([p for p in own if _is_stateless(p)]) for own in self._target_of]

    @property
    def temperature(self) -> float:
        """What the temperature warpers divide by, together; 1.0 without one."""
        return math.prod(p.temperature for p in self.target if isinstance(p, lp.TemperatureLogitsWarper))

    @property
    def draft_only_scales(self) -> bool:
        """Whether draft scores are the logits divided by `temperature` and nothing else."""
        return all(type(p) is lp.TemperatureLogitsWarper for p in self.draft)

    def process_target(self, row: int, prefix_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Scores `[1, V]` of one slot of `row` behind its text `prefix_ids [1, n]`, as plain decoding has them."""
        return self._target_of[row](prefix_ids, logits)

    def process_target_rows(self, logits: torch.Tensor) -> torch.Tensor:
        """Scores `[N, V]` of any slots at once; only when `target_is_row_wise`."""
        return self.target(None, logits)

    def process_draft(
        self,
        prefix_ids: dict[int, torch.Tensor],
        logits: torch.Tensor,
        draft_token_ids: torch.Tensor | None,
        vocab: int,
    ) -> torch.Tensor:
        """Draft scores of one slot in every live row.

        Args:
            prefix_ids: Row to the text before the slot, `[1, n_b]`, in the order of `logits`; lengths may differ.
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
        rows = [self._draft_of[row](ids, full[b : b + 1]) for b, (row, ids) in enumerate(prefix_ids.items())]
        scores = torch.cat(rows)
        return scores if draft_token_ids is None else scores[:, draft_token_ids]


__all__ = ["Processors"]
