"""Few candidates per slot (`candidate_top_k`): the text's law and the greedy text stay the target's.

Catches: the unrestricted law handed to verification (checked to be caught), a candidate set that a processor, a
reduced vocabulary or another head loses, a forbidden column among the candidates, a bound that the vocabulary breaks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dspark import SpeculationConfig
from dspark.decoding import loop
from tests import small

from .test_exact_law import TOLERANCE, Case, Untouched, deviation
from .test_exact_law_controls import MARGIN

CASES = {
    "two of three": Case({"candidate_top_k": 2}),
    "one": Case({"candidate_top_k": 1}),
    "gated head": Case({"candidate_top_k": 2}, {"markov_head_type": "gated"}),
    "recurrent head": Case({"candidate_top_k": 2, "temperature": 1.3}, {"markov_head_type": "rnn"}),
    "reduced vocabulary": Case({"candidate_top_k": 2}, {"draft_vocab_size": 3}, vocab=4),
    "top-k behind them": Case({"candidate_top_k": 3, "top_k": 2}, vocab=4),
    "scheduled": Case({"candidate_top_k": 2, "survival_threshold": 0.3}, varies=True),
    "penalty": Case({"candidate_top_k": 2, "repetition_penalty": 1.5}),
    "all of them forbidden by a processor": Case({"candidate_top_k": 1, "no_repeat_ngram_size": 2}, vocab=4),
}


@pytest.mark.parametrize("name", CASES)
def test_the_law_is_the_targets(name):
    assert deviation(CASES[name]) < TOLERANCE


@pytest.mark.parametrize("name", ["two of three", "reduced vocabulary"])
def test_the_law_is_the_targets_slot_by_slot(name):
    case = CASES[name]
    assert deviation(replace(case, call={**case.call, "logits_processor": [Untouched()]})) < TOLERANCE


@pytest.mark.parametrize("name", ["two of three", "gated head"])
def test_the_unrestricted_law_is_caught(name, monkeypatch):
    propose = loop.propose

    def wrong(run: Any, block: Any) -> Any:
        proposal = propose(run, block)
        ids = proposal.token_ids
        walk = run.drafter.walk_block(block, proposal.previous_ids[:, 0], lambda k, *_: ids[:, k])
        return replace(proposal, draft_probs=walk.logits.softmax(-1))

    monkeypatch.setattr(loop, "propose", wrong)
    assert deviation(CASES[name]) > MARGIN


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("top_k", [1, 5, 1024])
@pytest.mark.parametrize("storage", [{}, {"draft_vocab_size": len(small.DRAFT_IDS)}], ids=["whole", "reduced"])
def test_greedy_text_is_the_targets(head, top_k, storage):
    model, drafter = small.target(), small.drafter(markov_head_type=head, **storage)
    ids = torch.randint(small.VOCAB - 1, (3, 6), generator=torch.Generator().manual_seed(4))
    call = {"do_sample": False, "max_new_tokens": 16}
    plain = model.generate(ids, **call).tolist()
    assert model.generate(ids, assistant_model=drafter, candidate_top_k=top_k, **call).tolist() == plain
    restricted = drafter.last_stats
    assert model.generate(ids, assistant_model=drafter, **call).tolist() == plain
    if top_k == 1024:  # more than there are columns: nothing is restricted
        assert restricted.accepted == drafter.last_stats.accepted


def test_only_candidates_are_drafted():
    model, drafter = small.target(), small.drafter()
    drafter.speculation = SpeculationConfig(candidate_top_k=2)
    walk, seen = drafter.walk_block, []
    drafter.walk_block = lambda *args: seen.append((args[0], walk(*args))) or seen[-1][1]
    ids = torch.randint(small.VOCAB - 1, (2, 6), generator=torch.Generator().manual_seed(4))
    model.generate(ids, assistant_model=drafter, do_sample=True, max_new_tokens=12)
    assert seen
    for block, found in seen:
        best = block.base_logits.topk(2).indices
        assert (found.token_ids[..., None] == best).any(-1).all()
        assert ((found.logits > -torch.inf).sum(-1) == 2).all()


def test_without_a_sequential_head_nothing_is_restricted():
    model = small.target()
    drafter = small.drafter(markov_head_type="none", markov_rank=0, confidence_head_with_markov=False)
    ids = torch.randint(small.VOCAB - 1, (1, 6), generator=torch.Generator().manual_seed(4))
    texts = []
    for settings in (SpeculationConfig(), SpeculationConfig(candidate_top_k=1)):
        torch.manual_seed(3)
        texts.append(model.generate(ids, assistant_model=drafter, speculation=settings, do_sample=True,
                                    max_new_tokens=12).tolist())  # fmt: skip
    assert texts[0] == texts[1]
