"""What the loop writes down of each round under `SpeculationConfig.record_trace`, after the round is over.

It only looks: nothing is drawn, and no step of the round reads what is written here. Rows are taken one by one, so
that what is computed is `[g, V]` at most, and it is gone before the next round.
"""

from __future__ import annotations

import torch

from ..modeling_dspark import DraftBlock
from ..round_trace import Candidate, Rejection, RoundTrace, RowTrace
from .confidence import Confidence
from .state import DecodingRun, Proposal, RowVerdict

_MOST_CANDIDATES = 5
_DIGITS = 5  # significant ones: what two ways of computing one probability in float32 agree on


def trace_first(run: DecodingRun, verdicts: list[RowVerdict]) -> None:
    """Open a trace per row with the token of the prompt's own pass."""
    for row, verdict in zip(run.rows, verdicts, strict=True):
        assert verdict.scores is not None
        (prob,) = _probs(verdict.scores[:1], torch.tensor(verdict.emitted, device=verdict.scores.device))
        run.requests[row].stats.traces.append(RowTrace(verdict.emitted[0], prob))


class RoundTracer:
    """One round, from before its first step; `write` comes after its last.

    Args:
        run: The call.
    """

    def __init__(self, run: DecodingRun) -> None:
        self.run = run
        self.rows = list(run.rows)
        self.lengths = [run.text.lengths[row] for row in self.rows]
        self.step_seconds = dict(run.stats.step_seconds)
        self.model_seconds = dict(run.stats.model_seconds)

    def write(
        self,
        block: DraftBlock | None,
        proposal: Proposal | None,
        confidence: Confidence | None,
        verdicts: list[RowVerdict],
    ) -> None:
        """Append the round to the trace of every row that got a token of it."""
        run, stats, count = self.run, self.run.stats, len(self.rows)
        steps = _spent(self.step_seconds, stats.step_seconds)
        models = _spent(self.model_seconds, stats.model_seconds)
        counts = list(zip(stats.verified[-count:], stats.accepted[-count:], strict=True))
        for b, (row, verdict, (verified, accepted)) in enumerate(zip(self.rows, verdicts, counts, strict=True)):
            request = run.requests[row]
            emitted = verdict.emitted[: run.text.lengths[row] - self.lengths[b]]
            if not emitted:
                continue  # the row's request failed: nothing of the round is kept
            trace = request.stats.traces[request.own([row])[0]]
            last = trace.rounds[-1] if trace.rounds else None
            drafts = _Drafts(run, block, proposal, b)
            scores = verdict.scores
            assert scores is not None
            trace.rounds.append(
                RoundTrace(
                    anchor=0 if last is None else last.anchor + len(last.emitted_ids),
                    draft_ids=drafts.ids,
                    base_probs=drafts.base_probs(),
                    head_probs=drafts.head_probs(),
                    draft_probs=drafts.drawn_probs() if request.do_sample else None,
                    confidence=None if confidence is None else _numbers(confidence.own[b]),
                    survival=None if confidence is None else _numbers(confidence.survival[b]),
                    num_verified=verified,
                    num_accepted=accepted,
                    emitted_ids=emitted,
                    emitted_probs=_probs(scores[: len(emitted)], torch.tensor(emitted, device=scores.device)),
                    rejection=drafts.rejection(accepted, scores) if accepted < verified else None,
                    step_seconds=steps,
                    model_seconds=models,
                )
            )


class _Drafts:
    """One row's block: its drafts and what the drafter thought of them; everything is empty without a block."""

    def __init__(self, run: DecodingRun, block: DraftBlock | None, proposal: Proposal | None, b: int) -> None:
        self.run = run
        self.ids: list[int] = []
        if block is None or proposal is None:
            return
        assert proposal.logits is not None
        ids, vocabulary = proposal.token_ids[b], run.vocabulary
        self.ids = ids.tolist()
        own_ids = run.drafter.draft_token_ids
        self.columns = ids if own_ids is None else torch.searchsorted(own_ids, ids)  # `[g]`, of the drafter's logits
        self.base, self.head = (
            logits if vocabulary.forbidden is None else logits.masked_fill(vocabulary.forbidden, -torch.inf)
            for logits in (block.base_logits[b], proposal.logits[b])
        )
        self.law = None if proposal.draft_probs is None else proposal.draft_probs[b]

    def base_probs(self) -> list[float]:
        return _probs(self.base, self.columns) if self.ids else []

    def head_probs(self) -> list[float]:
        return _probs(self.head, self.columns) if self.ids else []

    def drawn_probs(self) -> list[float]:
        """Under the law of the draws, which has a column per draft that may stand."""
        if not self.ids or self.law is None:
            return []
        kept = self.run.vocabulary.kept
        columns = self.columns if kept is None else torch.searchsorted(kept, self.columns)
        return _numbers(self.law.gather(-1, columns[:, None])[:, 0])

    def rejection(self, slot: int, scores: torch.Tensor) -> Rejection:
        refused = torch.tensor([self.ids[slot]], device=scores.device)
        (draft_prob,) = _probs(scores[slot : slot + 1], refused)
        return Rejection(
            draft_prob, _likeliest(scores[slot]), self._candidates(self.base[slot]), self._candidates(self.head[slot])
        )

    def _candidates(self, logits: torch.Tensor) -> list[Candidate]:
        ids = self.run.drafter.draft_token_ids
        found = _likeliest(logits)
        return found if ids is None else [Candidate(int(ids[column]), prob) for column, prob in found]


def _probs(logits: torch.Tensor, columns: torch.Tensor) -> list[float]:
    """Softmax probabilities of one column per row of `[n, V]`."""
    logits = logits.float()
    return _numbers((logits.gather(-1, columns[:, None])[:, 0] - logits.logsumexp(-1)).exp())


def _likeliest(logits: torch.Tensor) -> list[Candidate]:
    """The columns of `[V]` with the most mass, those without any left out."""
    probs, columns = logits.float().softmax(-1).topk(min(_MOST_CANDIDATES, logits.shape[-1]))
    return [Candidate(*pair) for pair in zip(columns.tolist(), _numbers(probs), strict=True) if pair[1] > 0]


def _numbers(values: torch.Tensor) -> list[float]:
    return [float(f"{value:.{_DIGITS}g}") for value in values.float().nan_to_num(nan=0.0).clamp(0, 1).tolist()]


def _spent(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{seconds - before[name]:.{_DIGITS}g}") for name, seconds in after.items()}


__all__ = ["RoundTracer", "trace_first"]
