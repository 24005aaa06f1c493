"""Step 3 by the Markov op: the whole walk in a few launches, where tensors are on a GPU and the call allows it.

The op knows heads with plain weights (`op_weights.py`), forbidden columns, candidates and a temperature; under other
processors the block is walked slot by slot, as `propose.py` says. The text has the same law either way; sampled drafts
come from other random numbers.
"""

from __future__ import annotations

import torch

from ..modeling_dspark import DraftBlock
from ..ops.markov_step import MarkovDraw, MarkovTables, RecurrentFeatures, Sampling, markov_block
from .op_weights import markov_tables
from .state import DecodingRun, Group, Proposal


def fused_proposal(run: DecodingRun, block: DraftBlock) -> Proposal | None:
    """Tokens and laws of the block, or None where it must be walked slot by slot."""
    groups = run.groups()
    if run.settings.record_trace or not all(map(_is_simple, groups)):  # a trace shows the logits of every slot
        return None
    anchors = torch.tensor(run.anchors, device=block.hidden.device)
    tables = markov_tables(run.drafter, block, anchors)
    if tables is None:
        return None
    tables = tables._replace(forbidden=run.vocabulary.forbidden)
    rows, slots, width = block.base_logits.shape
    token_ids = anchors.new_empty(rows, slots)
    laws = None
    if any(group.request.do_sample for group in groups):
        laws = torch.zeros(rows, slots, width, dtype=torch.float32, device=anchors.device)
    for group in groups:
        drawn = _draw(run, group, block.base_logits[group.at], anchors[group.at], _rows_of(tables, group.at))
        token_ids[group.at] = drawn.token_ids
        if laws is not None and drawn.law_logits is not None:
            laws[group.at] = drawn.law_logits.softmax(-1)
    kept = run.vocabulary.kept
    previous_ids = torch.cat([anchors[:, None], token_ids[:, :-1]], dim=1)
    return Proposal(token_ids, previous_ids, laws if laws is None or kept is None else laws[..., kept])


def _is_simple(group: Group) -> bool:
    request = group.request
    return request.processors.draft_only_scales if request.do_sample else not request.processors.draft


def _rows_of(tables: MarkovTables, at: list[int] | slice) -> MarkovTables:
    """The tables with the features of some rows."""
    features = tables.features
    if features is None or isinstance(at, slice):
        return tables
    features = features._replace(hidden=features.hidden[at])
    if isinstance(features, RecurrentFeatures):
        features = features._replace(state=features.state[at])
    return tables._replace(features=features)


def _draw(
    run: DecodingRun, group: Group, base_logits: torch.Tensor, anchors: torch.Tensor, tables: MarkovTables
) -> MarkovDraw:
    request, top_k = group.request, run.settings.candidate_top_k
    sampling = None
    if request.do_sample:
        seeds = request.draws.seeds(request.own(group.rows), anchors.device)
        sampling = Sampling(request.processors.temperature, seeds)
    return markov_block(
        base_logits,
        anchors,
        tables,
        sampling=sampling,
        candidate_top_k=None if top_k is None else min(top_k, base_logits.shape[-1]),
        with_law=request.do_sample,
    )


__all__ = ["fused_proposal"]
