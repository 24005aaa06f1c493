"""Step 7: emitted tokens join the text, stop rules decide, both caches are cut back per row.

After commit the target's cache holds a row's tokens but the last, which is the next round's anchor, and the pending
context features are exactly those of the tokens the cache kept.
"""

from __future__ import annotations

from ..stats import SpeculationStats
from .confidence import Confidence
from .request import Request
from .state import DecodingRun, PendingStates, Proposal, RowVerdict


def commit(
    run: DecodingRun,
    drafts: list[list[int]],
    verdicts: list[RowVerdict],
    proposal: Proposal | None,
    confidence: Confidence | None,
) -> None:
    """Commit a round.

    Args:
        run: The call.
        drafts: Scheduled drafts per live row.
        verdicts: What verification decided.
        proposal: What the block proposed; None in a round without drafts.
        confidence: Its scores, where they were computed.
    """
    num_drafted = 0 if proposal is None else proposal.token_ids.shape[1]
    logits = confidence.logits.tolist() if confidence is not None and run.settings.record_confidence else None
    kept = []
    finished = []
    for b, (row, verdict) in enumerate(zip(run.rows, verdicts, strict=True)):
        request = run.requests[row]
        start = run.text.lengths[row]
        emitted: list[int] = []
        is_stopped = True
        with run.guard(request):
            if request.error is None:
                emitted, is_stopped = _until_stop(run, row, verdict)
                _record(request, verdict, emitted)
        if request.error is not None:  # of a failed request nothing of this round is kept
            emitted, is_stopped = [], True
        run.text.write(row, emitted)
        run.text.lengths[row] = start + len(emitted)
        accepted = min(verdict.num_accepted, len(emitted))
        # Only a stop leaves a round without a token of the target's own; drafts behind it were not decided on.
        verified = accepted if accepted == len(emitted) else len(drafts[b])
        for stats in _books(run, request):
            stats.add_round(num_drafted, verified, accepted)
            if logits is not None:
                stats.confidence_logits.append(logits[b])
        count_tokens(run, request, len(emitted))
        run.anchors[b] = emitted[-1] if emitted else run.anchors[b]
        kept.append(len(emitted))
        finished.append(is_stopped)
    _record_states(run, kept[0])
    run.session.keep(kept)
    run.pending[-1] = PendingStates(run.pending[-1].states[:, : max(kept)], kept)
    drop_finished(run, finished)


def count_tokens(run: DecodingRun, request: Request, count: int) -> None:
    """Count emitted tokens of a row."""
    for stats in _books(run, request):
        stats.num_new_tokens += count


def _books(run: DecodingRun, request: Request) -> list[SpeculationStats]:
    return [run.stats] if request.stats is run.stats else [run.stats, request.stats]


def _until_stop(run: DecodingRun, row: int, verdict: RowVerdict) -> tuple[list[int], bool]:
    """The row's emitted tokens, cut where a stop rule first holds."""
    if verdict.is_stopped is not None:
        return verdict.emitted, verdict.is_stopped
    request = run.requests[row]
    start = run.text.lengths[row]
    run.text.write(row, verdict.emitted)
    earlier = request.recorder.scores
    for n in range(1, len(verdict.emitted) + 1):
        seen = None
        if earlier is not None and verdict.scores is not None:
            seen = earlier + tuple(verdict.scores[i : i + 1] for i in range(n))
        if request.stop_rules.stops_at(run.text.prefix(row, start + n), start + n, seen):
            return verdict.emitted[:n], True
    return verdict.emitted, False


def _record(request: Request, verdict: RowVerdict, emitted: list[int]) -> None:
    for i, token in enumerate(emitted):
        scores = None if verdict.scores is None else verdict.scores[i : i + 1]
        logits = None if verdict.logits is None else verdict.logits[i : i + 1]
        request.recorder.token(token, scores, logits)


def _record_states(run: DecodingRun, count: int) -> None:
    recorder = run.requests[run.rows[0]].recorder
    if recorder.attentions is None and recorder.hidden_states is None:
        return
    weights = getattr(run.outputs, "attentions", None) or ()
    recorder.verify_pass(run.outputs, run.session.pass_slots(count), run.session.attention_widths(len(weights)))


def drop_finished(run: DecodingRun, finished: list[bool]) -> None:
    """Take finished rows out of the batch: they cost no more drafts and no verification."""
    if not any(finished):
        return
    live = [b for b, is_finished in enumerate(finished) if not is_finished]
    if live and len(live) < len(finished):
        run.session.select(live)
        if run.context is not None:
            run.context.select(live)
        run.pending = [PendingStates(p.states[live], [p.counts[b] for b in live]) for p in run.pending]
    run.rows = [run.rows[b] for b in live]
    run.anchors = [run.anchors[b] for b in live]


__all__ = ["commit", "count_tokens", "drop_finished"]
