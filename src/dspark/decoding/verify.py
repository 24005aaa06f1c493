"""Step 6: one target pass over each row's anchor and scheduled drafts, then exact acceptance.

Two forms give the same law. When all processors look at one row of scores alone, every slot is processed at once and
`rejection.py` decides in one go. Otherwise slots are processed one after another, as plain decoding would, and the
walk ends at the first rejection or stop, so that no processor or criterion ever sees a rejected token.
"""

from __future__ import annotations

import torch

from .rejection import greedy_verify, rejection_sample
from .schedule import pad_drafts
from .state import DecodingRun, Group, PendingStates, Proposal, RowVerdict

_NO_LAW = (
    "The target has no law for the next token: the processors forbid every token, or its logits are NaN. Plain "
    "sampling fails here too. Loosen the processors, or pass `do_sample=False`."
)


def verify(run: DecodingRun, proposal: Proposal | None, drafts: list[list[int]]) -> list[RowVerdict]:
    """Run the target and decide every live row; the pass's hidden states become the next context.

    Args:
        run: The call.
        proposal: What was drafted; None in a round without drafts.
        drafts: Scheduled drafts per live row.
    """
    blocks = [[anchor, *row] for anchor, row in zip(run.anchors, drafts, strict=True)]
    for row, tokens in zip(run.rows, drafts, strict=True):
        run.text.write(row, tokens)
    single = run.rows[0]
    text = run.text.prefix(single, run.text.lengths[single] + len(drafts[0])) if len(blocks) == 1 else run.text.ids
    generated = [run.text.lengths[row] - run.text.prompt_length for row in run.rows]
    outputs, logits, states = run.session.verify(text, blocks, generated)
    run.outputs = outputs
    run.pending.append(PendingStates(states, [len(block) for block in blocks]))
    logits = logits.to(run.device, torch.float32)
    # Of a row whose request failed nothing is kept.
    verdicts = [RowVerdict([anchor], 0, is_stopped=True) for anchor in run.anchors]
    for group in run.groups():
        places = group.pick(list(range(len(drafts))))
        if group.request.processors.target_is_row_wise:
            with run.guard(group.owner):
                for b, verdict in zip(places, _verify_at_once(run, group, proposal, drafts, logits), strict=True):
                    verdicts[b] = verdict
            continue
        for b in places:
            with run.guard(run.requests[run.rows[b]]):
                verdicts[b] = _verify_slot_by_slot(run, proposal, drafts[b], b, logits[b])
    return verdicts


def _verify_at_once(
    run: DecodingRun, group: Group, proposal: Proposal | None, all_drafts: list[list[int]], all_logits: torch.Tensor
) -> list[RowVerdict]:
    """Verdicts of a group whose processors look at one row of scores alone."""
    request, drafts, logits = group.request, group.pick(all_drafts), all_logits[group.at]
    ids, lengths = pad_drafts(drafts, run.device)
    logits = logits[:, : ids.shape[1] + 1]
    scores = logits
    if request.processors.target:
        scores = request.processors.process_target_rows(logits.flatten(0, 1).clone()).view_as(logits)
    if request.do_sample:
        probs = scores.softmax(-1)
        law = _draft_law(run, group, proposal, ids.shape[1])
        uniforms = request.draws.uniforms(request.own(group.rows), [len(row) for row in drafts], run.device)
        verdict = rejection_sample(
            ids, law, probs, lengths, draft_token_ids=run.vocabulary.target_ids, uniforms=uniforms
        )
        is_lawless = probs[torch.arange(len(ids), device=run.device), verdict.num_accepted, 0].isnan()
    else:
        verdict = greedy_verify(ids, scores.argmax(-1), lengths)
        is_lawless = torch.zeros_like(verdict.num_accepted, dtype=torch.bool)
    # The round's one read from the device.
    decided = torch.stack([verdict.num_accepted, verdict.next_ids, is_lawless.long()]).tolist()
    verdicts = []
    for b, (accepted, next_id, has_no_law) in enumerate(zip(*decided, strict=True)):
        if has_no_law:
            raise RuntimeError(_NO_LAW)
        row = RowVerdict([*drafts[b][:accepted], next_id], accepted)
        if request.recorder.wants_scores or run.settings.record_trace:
            row.scores, row.logits = scores[b], logits[b]
        verdicts.append(row)
    return verdicts


def _draft_law(run: DecodingRun, group: Group, proposal: Proposal | None, width: int) -> torch.Tensor | None:
    if proposal is None or proposal.draft_probs is None:
        return None
    return proposal.draft_probs[group.at, :width].to(run.device)


def _verify_slot_by_slot(
    run: DecodingRun, proposal: Proposal | None, drafts: list[int], b: int, logits: torch.Tensor
) -> RowVerdict:
    """One row; `logits [q, V]` of its pass. Stops are looked at after every token, as plain decoding does."""
    row = run.rows[b]
    request = run.requests[row]
    own = row - request.first_row
    start = run.text.lengths[row]
    processed: list[torch.Tensor] = []
    raw: list[torch.Tensor] = []  # as plain decoding keeps them: handed to the processors, which may write in place
    emitted: list[int] = []
    accepted = 0
    stopped = False
    earlier = request.recorder.scores
    for k in range(len(drafts) + 1):
        raw.append(logits[k : k + 1].clone())
        scores = request.processors.process_target(own, run.text.prefix(row, start + k), raw[-1])
        processed.append(scores)
        is_accepted, token = _decide(run, proposal, drafts, b, k, scores)
        accepted += is_accepted
        emitted.append(token)
        run.text.write(row, [token], at=start + k)
        seen = None if earlier is None else earlier + tuple(processed)
        stopped = request.stop_rules.stops_at(run.text.prefix(row, start + k + 1), start + k + 1, seen)
        if stopped or not is_accepted:
            break
    verdict = RowVerdict(emitted, accepted, stopped)
    if request.recorder.wants_scores or run.settings.record_trace:
        verdict.scores, verdict.logits = torch.cat(processed), torch.cat(raw)
    return verdict


def _decide(
    run: DecodingRun, proposal: Proposal | None, drafts: list[int], b: int, k: int, scores: torch.Tensor
) -> tuple[bool, int]:
    """Accept slot k's draft or emit the target's own token; behind the last draft there is only the latter."""
    request = run.requests[run.rows[b]]
    own = request.own([run.rows[b]])
    if not request.do_sample:
        token = int(scores.argmax(-1))
        return k < len(drafts) and token == drafts[k], token
    probs = scores.softmax(-1)[:, None]
    if bool(probs[0, 0, 0].isnan()):
        raise RuntimeError(_NO_LAW)
    if k == len(drafts):
        return False, int(request.draws.tokens(own, probs[:, 0]))
    law = None if proposal is None or proposal.draft_probs is None else proposal.draft_probs[b : b + 1, k : k + 1]
    verdict = rejection_sample(
        torch.tensor([[drafts[k]]], device=run.device),
        None if law is None else law.to(run.device),
        # The token after an acceptance is not drawn here but at its own slot, so its law does not matter.
        probs.expand(-1, 2, -1),
        torch.ones(1, dtype=torch.long, device=run.device),
        draft_token_ids=run.vocabulary.target_ids,
        uniforms=request.draws.uniforms(own, [1], run.device),
    )
    if int(verdict.num_accepted):
        return True, drafts[k]
    return False, int(verdict.next_ids)


__all__ = ["verify"]
