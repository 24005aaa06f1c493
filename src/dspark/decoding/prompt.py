"""Before the first round: the prompt's pass, the drafter's first context, the first token.

The first context is the features of ALL prompt tokens, or of those in the context window. Where a user's cache already
holds some of them, their hidden states do not exist any more: the prefix is forwarded once more for them (recorded in
the statistics), or, when its tokens are unknown, the drafter starts with the context it can see.
"""

from __future__ import annotations

import time

import torch
from transformers import GenerationConfig
from transformers.utils import logging

from .context import PromptContext
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
    session = run.session
    given = input_ids if (embeds := session.kwargs.get("inputs_embeds")) is None else embeds
    lost, offset = _lost_prefix(run, input_ids, generation_config)
    context = PromptContext(run, given.shape[1], session.kwargs.get("attention_mask"), offset=offset)
    if context.skips(lost):
        context.skip(lost)
    else:
        _rebuild(run, lost, input_ids, context)
    outputs = session.prefill(input_ids, generation_config, context.take)
    run.requests[run.rows[0]].recorder.prompt_pass(outputs)
    logits = outputs.logits[:, -1].to(run.device, torch.float32)
    verdicts = [_first_token(run, row, logits[b : b + 1]) for b, row in enumerate(run.rows)]
    run.stats.prefill_seconds += time.perf_counter() - start
    return verdicts


def _first_token(run: DecodingRun, row: int, logits: torch.Tensor) -> RowVerdict:
    logits = logits.clone()  # as plain decoding: processors may write in place, and the prompt's logits are freed
    request = run.requests[row]
    own = row - request.first_row
    scores = request.processors.process_target(own, run.text.prefix(row), logits)
    token = int(request.draws.tokens([own], scores.softmax(-1)) if request.do_sample else scores.argmax(-1))
    return RowVerdict([token], 0, scores=scores, logits=logits)


def _lost_prefix(run: DecodingRun, input_ids: torch.Tensor, generation_config: GenerationConfig) -> tuple[int, int]:
    """Prompt tokens whose states are lost in a user's cache but can be had, and the position of the first such one."""
    session = run.session
    cached = session.cached_before()
    if cached == 0:
        return 0, 0
    # Embeddings are always those of the whole prompt.
    is_known = "inputs_embeds" in session.kwargs or session.has_whole_prompt(input_ids, generation_config)
    if cached is not None and is_known:
        return cached, 0
    run.stats.fallback_reason = (
        "the cache holds tokens whose ids are unknown, so the drafter sees only what follows them"
    )
    logger.warning_once(f"dspark: {run.stats.fallback_reason}. Output is unchanged; pass the whole `input_ids`.")
    return 0, cached or 0


def _rebuild(run: DecodingRun, lost: int, input_ids: torch.Tensor, context: PromptContext) -> None:
    run.stats.fallback_reason = f"the {lost} cached prompt tokens were forwarded again for the drafter's context"
    logger.warning_once(f"dspark: {run.stats.fallback_reason}. Output is unchanged.")
    run.session.forward_plain(lost, input_ids, context.take)


__all__ = ["read_prompt"]
