"""Step 7: emitted tokens join the text, stop rules decide, both caches are cut back per row.

After commit the target's cache holds a row's tokens but the last, which is the next round's anchor, and the pending
context features are exactly those of the tokens the cache kept.
"""

from __future__ import annotations

from .confidence import Confidence
from .state import DecodingRun, Proposal, RowVerdict


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
        start = run.text.lengths[row]
        emitted, is_stopped = _until_stop(run, row, verdict)
        run.text.write(row, emitted)
        run.text.lengths[row] = start + len(emitted)
        accepted = min(verdict.num_accepted, len(emitted))
        # Only a stop leaves a round without a token of the target's own; drafts behind it were not decided on.
        verified = accepted if accepted == len(emitted) else len(drafts[b])
        run.stats.add_round(num_drafted, verified, accepted)
        if logits is not None:
            run.stats.confidence_logits.append(logits[b])
        run.stats.num_new_tokens += len(emitted)
        _record(run, verdict, len(emitted))
        run.anchors[b] = emitted[-1]
        kept.append(len(emitted))
        finished.append(is_stopped)
    _record_states(run, kept[0])
    run.session.keep(kept)
    assert run.pending is not None
    run.pending = (run.pending[0][:, : max(kept)], kept)
    drop_finished(run, finished)


def _until_stop(run: DecodingRun, row: int, verdict: RowVerdict) -> tuple[list[int], bool]:
    """The row's emitted tokens, cut where a stop rule first holds."""
    if verdict.is_stopped is not None:
        return verdict.emitted, verdict.is_stopped
    start = run.text.lengths[row]
    run.text.write(row, verdict.emitted)
    earlier = run.recorder.scores
    for n in range(1, len(verdict.emitted) + 1):
        seen = None
        if earlier is not None and verdict.scores is not None:
            seen = earlier + tuple(verdict.scores[i : i + 1] for i in range(n))
        if run.stop_rules.stops_at(run.text.prefix(row, start + n), start + n, seen):
            return verdict.emitted[:n], True
    return verdict.emitted, False


def _record(run: DecodingRun, verdict: RowVerdict, count: int) -> None:
    for i in range(count):
        scores = None if verdict.scores is None else verdict.scores[i : i + 1]
        logits = None if verdict.logits is None else verdict.logits[i : i + 1]
        run.recorder.token(verdict.emitted[i], scores, logits)


def _record_states(run: DecodingRun, count: int) -> None:
    if run.recorder.attentions is None and run.recorder.hidden_states is None:
        return
    weights = getattr(run.outputs, "attentions", None) or ()
    run.recorder.verify_pass(run.outputs, run.session.pass_slots(count), run.session.attention_widths(len(weights)))


def drop_finished(run: DecodingRun, finished: list[bool]) -> None:
    """Take finished rows out of the batch: they cost no more drafts and no verification."""
    if not any(finished):
        return
    live = [b for b, is_finished in enumerate(finished) if not is_finished]
    if live and len(live) < len(finished):
        run.session.select(live)
        if run.context is not None:
            run.context.select(live)
        if run.pending is not None:
            run.pending = (run.pending[0][live], [run.pending[1][b] for b in live])
    run.rows = [run.rows[b] for b in live]
    run.anchors = [run.anchors[b] for b in live]


__all__ = ["commit", "drop_finished"]
