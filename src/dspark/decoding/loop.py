"""The loop: the prompt's pass, then rounds of seven steps until every row has stopped."""

from __future__ import annotations

import torch
from transformers import GenerationConfig

from .commit import commit, count_tokens, drop_finished
from .confidence import estimate_confidence
from .context import extend_context
from .draft import draft_block
from .prompt import read_prompt
from .propose import propose
from .schedule import RoundWatch, schedule
from .state import DecodingRun, RowVerdict
from .tracing import RoundTracer, trace_first
from .verify import verify

_MOST_PENDING = 128  # rounds without drafts whose states wait: a text that never drafts again need not project them


def decode(run: DecodingRun, input_ids: torch.Tensor, generation_config: GenerationConfig) -> None:
    """Decode all rows of `input_ids [B, P]` to their ends; the text and outputs are in `run`."""
    first = read_prompt(run, input_ids, generation_config)
    commit_first(run, first)
    while run.rows:
        decode_round(run)


def decode_round(run: DecodingRun) -> None:
    """One round: context, draft, propose, confidence, schedule, verify, commit."""
    step = run.stats.step
    limits = run.max_drafts()
    num_drafts = 0
    if max(limits) > 0:
        num_drafts = run.policy.slots(len(run.rows), run.most_slots(limits), run.remaining())
    block = proposal = confidence = None
    drafts: list[list[int]] = [[] for _ in run.rows]
    watch = RoundWatch(run, num_drafts)
    tracer = RoundTracer(run) if run.settings.record_trace else None
    if num_drafts or len(run.pending) >= _MOST_PENDING:
        with step("context"):
            extend_context(run)
    if num_drafts:
        with step("draft"):
            block = draft_block(run, num_drafts)
        with step("propose"):
            proposal = propose(run, block)
        with step("confidence"):
            confidence = estimate_confidence(run, block, proposal)
        with step("schedule"):
            drafts = schedule(run, proposal, confidence, limits)
    watch.scheduled(drafts, confidence)
    with step("verify"):
        verdicts = verify(run, proposal, drafts)
    with step("commit"):
        commit(run, drafts, verdicts, proposal, confidence)
    watch.committed()
    if tracer is not None:
        tracer.write(block, proposal, confidence, verdicts)


def commit_first(run: DecodingRun, verdicts: list[RowVerdict]) -> None:
    """The token the prompt's own pass gives is committed without a round; it is each row's first anchor."""
    finished = []
    for row, verdict in zip(run.rows, verdicts, strict=True):
        token = verdict.emitted[0]
        request = run.requests[row]
        run.text.write(row, [token])
        run.text.lengths[row] += 1
        request.recorder.token(token, verdict.scores, verdict.logits)
        count_tokens(run, request, 1)
        length = run.text.lengths[row]
        finished.append(request.stop_rules.stops_at(run.text.prefix(row), length, request.recorder.scores))
        run.anchors.append(token)
    if run.settings.record_trace:
        trace_first(run, verdicts)
    drop_finished(run, finished)


__all__ = ["commit_first", "decode", "decode_round"]
