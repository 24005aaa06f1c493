"""The loop on the kernels, under Triton's interpreter: the drafts, laws and texts of the torch forms.

Catches: a fused walk from another state, candidates or forbidden columns that one path lacks, a law that is not the
one drawn from, rows of a batch that swap features, requests of one batch that get each other's draws.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from dspark import BatchDecoder, SpeculationConfig
from dspark.decoding import fused_walk, loop
from dspark.decoding.state import Proposal
from tests import small
from tests.properties.test_sampled_law import PROMPT, expected, p_value
from tests.properties.tiny import close_pair

HEADS = {"vanilla": {}, "gated": {"markov_head_type": "gated"}, "rnn": {"markov_head_type": "rnn"},
         "rnn behind the anchor": {"markov_head_type": "rnn", "sample_from_anchor": False},
         "reduced": {"draft_vocab_size": len(small.DRAFT_IDS)},
         "wider than the target": {"vocab_size": small.VOCAB + 9, "share_embedding": False, "share_lm_head": False},
         }  # fmt: skip


@pytest.fixture
def proposals(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Proposal]]:
    """Blocks and what was proposed for them, round by round."""
    seen, propose = [], loop.propose

    def noting(run: Any, block: Any) -> Proposal:
        proposal = propose(run, block)
        seen.append((block, proposal))
        return proposal

    monkeypatch.setattr(loop, "propose", noting)
    return seen


@pytest.fixture(autouse=True)
def _fused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPARK_OPS", "triton")


def prompts(rows: int) -> torch.Tensor:
    return torch.randint(small.VOCAB - 1, (rows, 5), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("top_k", [None, 9])
@pytest.mark.parametrize("name", HEADS)
def test_greedy_drafts_are_those_of_the_module_walk(name, top_k, proposals, monkeypatch):
    model, drafter = small.target(), small.drafter(**HEADS[name])
    call = {"do_sample": False, "max_new_tokens": 6, "survival_threshold": 0.05, "candidate_top_k": top_k}
    texts, walks, scores = [], [], []
    for form in ("torch", "triton"):
        proposals.clear()
        monkeypatch.setenv("DSPARK_OPS", form)
        texts.append(model.generate(prompts(2), assistant_model=drafter, **call).tolist())
        walks.append([proposal.token_ids.tolist() for _, proposal in proposals])
        scores.append(drafter.last_stats.verified)
    assert walks[0] == walks[1]
    assert scores[0] == scores[1]
    assert len(walks[0]) > 1
    assert texts[0] == texts[1] == model.generate(prompts(2), do_sample=False, max_new_tokens=6).tolist()


@pytest.mark.parametrize("top_k", [None, 9])
@pytest.mark.parametrize("name", HEADS)
def test_sampled_drafts_come_with_the_law_of_the_module_walk(name, top_k, proposals):
    model, drafter = small.target(), small.drafter(**HEADS[name])
    torch.manual_seed(0)
    settings = SpeculationConfig(policy="fixed", candidate_top_k=top_k)
    model.generate(prompts(2), assistant_model=drafter, speculation=settings, do_sample=True, top_k=0,
                   temperature=1.4, max_new_tokens=4)  # fmt: skip
    assert proposals
    for block, proposal in proposals:
        ids, kept = proposal.token_ids, slice(0, small.VOCAB)
        columns = None if top_k is None else candidates_of(block, top_k)

        def again(k: int, _logits: torch.Tensor, _tokens: Any, ids: torch.Tensor = ids) -> torch.Tensor:
            return ids[:, k]

        with torch.no_grad():
            walk = drafter.walk_block(block, proposal.previous_ids[:, 0], again, columns)
        want = (walk.logits[..., kept] / 1.4).softmax(-1)
        torch.testing.assert_close(proposal.draft_probs, want, rtol=1e-4, atol=1e-6)
        vocabulary = torch.arange(small.VOCAB) if drafter.draft_token_ids is None else drafter.draft_token_ids
        column = torch.searchsorted(vocabulary, ids)
        assert (proposal.draft_probs.gather(-1, column[..., None]) > 0).all()


def candidates_of(block: Any, top_k: int) -> torch.Tensor:
    """The candidates a target of `small.VOCAB` rows leaves."""
    return block.base_logits[..., : small.VOCAB].topk(top_k, dim=-1).indices


def test_a_walk_that_the_op_cannot_do_is_the_modules(proposals, monkeypatch):
    """A processor that reads the text, a head that is watched, a drafter with a walk of its own."""
    model, fused = small.target(), []
    block_of = fused_walk.markov_block
    monkeypatch.setattr(fused_walk, "markov_block", lambda *args, **kw: fused.append(1) or block_of(*args, **kw))
    call = {"do_sample": False, "max_new_tokens": 6}
    for change, extra in itertools.product((None, "hook", "walk"), ({}, {"repetition_penalty": 1.3})):
        drafter = small.drafter()
        if change == "hook":
            drafter.markov_head.markov_w2.register_forward_hook(lambda *_: None)
        elif change == "walk":
            drafter.walk_block = drafter.walk_block
        fused.clear()
        got = model.generate(prompts(1), assistant_model=drafter, **call, **extra)
        assert got.tolist() == model.generate(prompts(1), **call, **extra).tolist()
        assert bool(fused) == (change is None and not extra), (change, extra)
    fused.clear()
    model.generate(prompts(1), assistant_model=small.drafter(), record_trace=True, **call)
    assert not fused, "a trace shows logits that the op does not keep"


def test_rows_with_generators_of_their_own_do_not_depend_on_the_batch():
    model, drafter = close_pair()
    ids = torch.randint(1, 12, (3, 4), generator=torch.Generator().manual_seed(1))
    call = {"do_sample": True, "top_k": 0, "max_new_tokens": 12, "assistant_model": drafter}

    def generators(*seeds: int) -> list[torch.Generator]:
        return [torch.Generator().manual_seed(seed) for seed in seeds]

    together = model.generate(ids, row_generators=generators(1, 2, 3), **call)
    for row in range(3):
        alone = model.generate(ids[row : row + 1], row_generators=generators(row + 1), **call)
        assert alone[0].tolist() == together[row].tolist()


def test_requests_of_one_batch_get_what_they_get_alone():
    """Greedy and sampled texts side by side, on a head whose features go by rows."""
    model, drafter = close_pair(markov_head_type="rnn")
    ids = torch.randint(1, 12, (4, 4), generator=torch.Generator().manual_seed(1))  # 0 pads
    calls = [{}, {"do_sample": True, "top_k": 0, "temperature": 0.7}, {"do_sample": True, "top_k": 0}, {}]

    def texts(chosen: list[int]) -> list[list[int]]:
        with BatchDecoder(model, drafter) as decoder:
            handed = [
                decoder.submit(
                    ids[i : i + 1], generator=torch.Generator().manual_seed(i), max_new_tokens=6, **calls[i]
                )
                for i in chosen
            ]
            finished = {id(text.submission): text.new_ids for text in decoder.run()}
        return [finished[id(submission)] for submission in handed]

    together = texts([0, 1, 2, 3])
    assert together == [texts([i])[0] for i in range(4)]
    for i in (0, 3):
        plain = model.generate(ids[i : i + 1], do_sample=False, max_new_tokens=6)
        assert together[i] == plain[0, 4:].tolist()


def test_sampled_text_has_the_target_law():
    """All ops take part; the second and third tokens are decided by rounds."""
    model, drafter = close_pair()
    law, rows = expected(), 80
    torch.manual_seed(1)
    out = model.generate(PROMPT.expand(rows, -1), assistant_model=drafter, do_sample=True, top_k=0, temperature=0.9,
                         max_new_tokens=4, survival_threshold=0.1, candidate_top_k=7)  # fmt: skip
    texts = out[:, PROMPT.shape[1] :]
    assert 0.2 < drafter.last_stats.draft_acceptance_rate < 0.95
    assert p_value(texts[:, 1:2], law.sum((0, 2))) > 1e-3
    assert p_value(texts[:, 2:3], law.sum((0, 1))) > 1e-3
