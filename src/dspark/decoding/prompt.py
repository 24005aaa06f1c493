"""Before the first round: the prompt's pass, the drafter's first context, the first token.

The first context is the features of ALL prompt tokens. Where a user's cache already holds a prefix, its hidden states
do not exist any more: the prefix is forwarded once more for them (recorded in the statistics), or, when its tokens are
unknown, the drafter starts with the context it can see.
"""

from __future__ import annotations

import time

import torch
from transformers import GenerationConfig
from transformers.utils import logging

from .context import start_context
from .state import DecodingRun, RowVerdict

logger = logging.get_logger(__name__)


def read_prompt(run: DecodingRun, input_ids: torch.Tensor, generation_config: GenerationConfig) -> list[RowVerdict]:
    """Forward the prompt and choose each row's first token.

    Args:
        run: The call; its context is opened.
        input_ids: int64 `[B, P]`.
        generation_config: The prepared config.
    """
    start = time.perf_counter()
    session, drafter = run.session, run.drafter
    mask = session.kwargs.get("attention_mask")
    cached = session.cached_before()
    features: list[torch.Tensor] = []

    def sink(states: torch.Tensor) -> None:
        features.append(drafter.project_context(states))

    offset = _rebuild_prefix(run, input_ids, mask, cached, sink)
    outputs = session.prefill(input_ids, generation_config, sink)
    run.recorder.prompt_pass(outputs)
    start_context(run, features, mask, offset=offset)
    logits = outputs.logits[:, -1].to(run.device, torch.float32)
    verdicts = [_first_token(run, row, logits[b : b + 1]) for b, row in enumerate(run.rows)]
    run.stats.prefill_seconds += time.perf_counter() - start
    return verdicts


def _first_token(run: DecodingRun, row: int, logits: torch.Tensor) -> RowVerdict:
    logits = logits.clone()  # as plain decoding: processors may write in place, and the prompt's logits are freed
    scores = run.processors.process_target(run.text.prefix(row), logits)
    if run.do_sample:
        token = int(torch.multinomial(scores.softmax(-1), 1))
    else:
        token = int(scores.argmax(-1))
    return RowVerdict([token], 0, scores=scores, logits=logits)


def _rebuild_prefix(run: DecodingRun, input_ids: torch.Tensor, mask: torch.Tensor | None, cached: int, sink) -> int:  # type: ignore[no-untyped-def]
    """Features of what the user's cache already holds; returns the position the context starts at."""
    if cached == 0:
        return 0
    width = input_ids.shape[1]
    if width <= cached or "inputs_embeds" in run.session.kwargs:
        run.stats.fallback_reason = (
            f"the cache holds {cached} tokens whose ids are unknown, so the drafter sees only what follows them"
        )
        logger.warning_once(f"dspark: {run.stats.fallback_reason}. Output is unchanged; pass the whole `input_ids`.")
        return cached
    run.stats.fallback_reason = f"the {cached} cached prompt tokens were forwarded again for the drafter's context"
    logger.warning_once(f"dspark: {run.stats.fallback_reason}. Output is unchanged.")
    run.session.forward_plain(input_ids[:, :cached], None if mask is None else mask[:, :cached], sink)
    return 0


__all__ = ["read_prompt"]
