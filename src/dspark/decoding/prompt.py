"""Before the first round: the prompt's pass, the drafter's first context, the first token.

The first context is the features of ALL prompt tokens. Where a user's cache already holds a prefix, its hidden states
do not exist any more: the prefix is forwarded once more for them (recorded in the statistics), or, when its tokens are
unknown, the drafter starts with the context it can see.
"""

from __future__ import annotations

import time
from collections.abc import Callable

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
    features: list[torch.Tensor] = []

    def sink(states: torch.Tensor) -> None:
        features.append(drafter.project_context(states))

    offset = _rebuild_prefix(run, input_ids, generation_config, sink)
    outputs = session.prefill(input_ids, generation_config, sink)
    run.requests[run.rows[0]].recorder.prompt_pass(outputs)
    start_context(run, features, mask, offset=offset)
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


def _rebuild_prefix(
    run: DecodingRun,
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    sink: Callable[[torch.Tensor], None],
) -> int:
    """Features of what the user's cache already holds; returns the position the context starts at."""
    session = run.session
    cached = session.cached_before()
    if cached == 0:
        return 0
    # Embeddings are always those of the whole prompt.
    is_known = "inputs_embeds" in session.kwargs or session.has_whole_prompt(input_ids, generation_config)
    if cached is None or not is_known:
        run.stats.fallback_reason = (
            "the cache holds tokens whose ids are unknown, so the drafter sees only what follows them"
        )
        logger.warning_once(f"dspark: {run.stats.fallback_reason}. Output is unchanged; pass the whole `input_ids`.")
        return cached or 0
    run.stats.fallback_reason = f"the {cached} cached prompt tokens were forwarded again for the drafter's context"
    logger.warning_once(f"dspark: {run.stats.fallback_reason}. Output is unchanged.")
    session.forward_plain(cached, input_ids, sink)
    return 0


__all__ = ["read_prompt"]
