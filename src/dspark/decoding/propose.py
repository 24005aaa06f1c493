"""Step 3: the sequential head repairs the block left to right; out come tokens and the exact law of each draw.

The law is what the token was drawn from, after transition bias, processors and temperature, in float32: any other law
handed to verification would bias sampled output.
"""

from __future__ import annotations

import torch

from ..modeling_dspark import Chooser, DraftBlock, Walk
from ..ops.markov_step import candidate_columns
from .fused_walk import fused_proposal
from .state import DecodingRun, Group, Proposal


def propose(run: DecodingRun, block: DraftBlock) -> Proposal:
    """Walk the block; greedy without sampling, else a draw per slot."""
    with run.stats.forward("drafter"):
        proposal = fused_proposal(run, block)
    if proposal is not None:
        return proposal
    laws: list[torch.Tensor] = []
    groups = run.groups()
    samples = any(group.request.do_sample for group in groups)

    def choose(_k: int, logits: torch.Tensor, tokens: list[torch.Tensor]) -> torch.Tensor:
        if len(groups) == 1 and groups[0].request.error is None:
            with run.guard(groups[0].owner):
                chosen, law = _choose(run, groups[0], logits, tokens)
                if law is not None:
                    laws.append(law)
                return chosen
        chosen = logits.new_zeros(len(logits), dtype=torch.long)
        width = logits.shape[1] if run.vocabulary.kept is None else len(run.vocabulary.kept)
        law_of_all = logits.new_zeros(len(logits), width, dtype=torch.float32) if samples else None
        for group in groups:
            # A failed request's rows go on with token 0 to the end of this round, which keeps nothing of them.
            if group.request.error is not None:
                continue
            with run.guard(group.owner):
                chosen[group.at], law = _choose(run, group, logits[group.at], [t[group.at] for t in tokens])
                if law is not None and law_of_all is not None:
                    law_of_all[group.at] = law
        if law_of_all is not None:
            laws.append(law_of_all)
        return chosen

    with run.stats.forward("drafter"):
        walk = _walk(run, block, choose)
    return Proposal(
        walk.token_ids,
        walk.previous_ids,
        torch.stack(laws, dim=1) if laws else None,
        walk.logits if run.settings.record_trace else None,
    )


def _walk(run: DecodingRun, block: DraftBlock, choose: Chooser) -> Walk:
    """The walk over all columns, or over the candidates of each slot."""
    drafter, top_k = run.drafter, run.settings.candidate_top_k
    anchors = torch.tensor(run.anchors, device=block.hidden.device)
    if top_k is None or drafter.markov_head is None:
        return drafter.walk_block(block, anchors, choose)
    top_k = min(top_k, block.base_logits.shape[-1])
    return drafter.walk_block(
        block, anchors, choose, candidate_columns(block.base_logits, top_k, run.vocabulary.forbidden)
    )


def _choose(
    run: DecodingRun, group: Group, logits: torch.Tensor, tokens: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Tokens int64 `[n]` of a group's next slot from logits `[n, Vd]`, and the law they were drawn from."""
    drafter, request, vocabulary = run.drafter, group.request, run.vocabulary
    processors = request.processors
    if processors.draft:
        prefixes = {} if processors.draft_is_row_wise else _prefixes(run, group, tokens)
        vocab = drafter.config.vocab_size or logits.shape[1]
        logits = processors.process_draft(prefixes, logits.float(), drafter.draft_token_ids, vocab)
    if vocabulary.forbidden is not None:
        logits = logits.masked_fill(vocabulary.forbidden, -torch.inf)
    if not request.do_sample:
        return drafter.to_target_ids(logits.argmax(-1)), None
    probs = _law(logits.float(), vocabulary.forbidden)
    drawn = drafter.to_target_ids(request.draws.drafts(request.own(group.rows), probs))
    return drawn, probs if vocabulary.kept is None else probs[:, vocabulary.kept]


def _law(logits: torch.Tensor, forbidden: torch.Tensor | None) -> torch.Tensor:
    """Softmax of draft scores `[B, Vd]`; where no token is left (all -inf, NaN), uniform over those with a row."""
    uniform = torch.zeros_like(logits)
    if forbidden is not None:
        uniform = uniform.masked_fill(forbidden, -torch.inf)
    probs = logits.softmax(-1)
    return torch.where(probs.isnan().any(-1, keepdim=True), uniform.softmax(-1), probs)


def _prefixes(run: DecodingRun, group: Group, tokens: list[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Text of each row of a group with the drafts so far behind it, `[1, n_b + k]`, by the request's row numbers."""
    drafted = torch.stack(tokens, dim=1).to(run.device) if tokens else None
    prefixes = {}
    for b, row in enumerate(group.rows):
        text = run.text.prefix(row)
        own = row - group.request.first_row
        prefixes[own] = text if drafted is None else torch.cat([text, drafted[b : b + 1]], dim=1)
    return prefixes


__all__ = ["propose"]
