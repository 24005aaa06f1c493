"""The kernels on a GPU: the contracts, real vocabularies, launches that do not wait, graphs.

Catches what the interpreter cannot: a race between launches, a wrong alignment, a product in lower precision.
"""

from __future__ import annotations

import pytest
import torch

from dspark.ops.markov_step import MarkovTables, Sampling, markov_block
from dspark.ops.rejection import rejection_sample
from dspark.ops.training_loss import training_loss
from tests import small
from tests.decoding.test_rejection import FORMS, random_rows

from .confidence_contract import ConfidenceContract
from .markov_contract import MarkovContract, eighths, featured, tables
from .training_loss_contract import DTYPES, TERMS, TrainingLossContract, batch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


class TestTritonOnGpu(MarkovContract):
    implementation = "triton"
    device = "cuda"


class TestTorchOnGpu(MarkovContract):
    implementation = "torch"
    device = "cuda"


class TestConfidenceOnGpu(ConfidenceContract):
    implementation = "triton"
    device = "cuda"


class TestTrainingLossOnGpu(TrainingLossContract):
    implementation = "triton"
    device = "cuda"


def both(base, anchors, weights, **kwargs):
    return [markov_block(base, anchors, weights, implementation=form, **kwargs) for form in ("torch", "triton")]


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [49_152, 151_936, 262_144])
def test_real_vocabularies(columns, dtype, rows):
    """Few bits per weight: sums are exact in both forms, so tokens are equal though ties are common."""
    weights = tables(columns, 256, dtype)
    base, anchors = eighths(rows, 7, columns, limit=64).to(dtype), torch.randint(columns, (rows,))
    arguments = (base.cuda(), anchors.cuda(), MarkovTables(weights.w1.cuda(), weights.w2.cuda()))
    for kwargs in ({}, {"candidate_top_k": 64}):
        want, got = both(*arguments, **kwargs)
        assert torch.equal(got.token_ids, want.token_ids)
        torch.testing.assert_close(got.log_probs, want.log_probs, rtol=0, atol=1e-4)  # float32 sums of 262,144


@pytest.mark.parametrize("kind", ["gated", "recurrent"])
@pytest.mark.parametrize("rows", [1, 8])
def test_features_at_real_sizes(kind, rows):
    weights, base = featured(kind, 49_152, 256, rows, 7), torch.randn(rows, 7, 49_152).cuda() * 8
    features = weights.features
    weights = MarkovTables(
        weights.w1.cuda(), weights.w2.cuda(), features=type(features)(*(t.cuda() for t in features))
    )
    want, got = both(base, torch.arange(rows).cuda(), weights, with_law=True)
    assert torch.equal(got.token_ids, want.token_ids)
    torch.testing.assert_close(got.law_logits, want.law_logits, rtol=1e-4, atol=1e-3)  # sums of 256, TF32 is off


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [49_152, 151_936])
def test_the_loss_of_real_vocabularies(columns, dtype):
    given = [t.cuda() for t in batch(64, columns, dtype, mass=0.95)]
    want, got = (training_loss(*given, TERMS["both"], implementation=form) for form in ("torch", "triton"))
    for ours, other in zip(got[:3], want[:3], strict=True):
        torch.testing.assert_close(ours, other, rtol=2e-5, atol=2e-4)
    rounding = 1e-4 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(got.gradient.float(), want.gradient.float(), rtol=rounding, atol=1e-6)


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("top_k", [None, 9])
def test_the_loop_on_a_gpu_writes_the_targets_greedy_text(head, top_k, monkeypatch):
    model, drafter = small.target.__wrapped__().cuda(), small.drafter(markov_head_type=head).cuda()
    ids = torch.randint(small.VOCAB - 1, (3, 6)).cuda()
    call = {"do_sample": False, "max_new_tokens": 24}
    plain, accepted = model.generate(ids, **call).tolist(), []
    for form in ("torch", "triton"):
        monkeypatch.setenv("DSPARK_OPS", form)
        got = model.generate(ids, assistant_model=drafter, candidate_top_k=top_k, survival_threshold=0.05, **call)
        assert got.tolist() == plain
        accepted.append(drafter.last_stats.accepted)
    assert accepted[0] == accepted[1]


def test_draws_of_both_forms_agree():
    """Same counters, same noise; the scores differ by a few 1e-6, which one draw in a million feels."""
    weights, rows = tables(151_936, 64), 16
    arguments = (torch.randn(rows, 7, 151_936).cuda(), torch.arange(rows).cuda())
    arguments += (MarkovTables(weights.w1.cuda(), weights.w2.cuda()),)
    sampling = Sampling(8.0, torch.arange(rows).cuda())
    want, got = both(*arguments, sampling=sampling)
    assert torch.equal(got.token_ids, want.token_ids)


def test_a_block_is_captured_in_a_graph_and_waits_for_nothing():
    weights, base = tables(1000, 32), torch.randn(2, 4, 1000).cuda()
    arguments = (base, torch.tensor([3, 4]).cuda(), MarkovTables(weights.w1.cuda(), weights.w2.cuda()))
    sampling = Sampling(seeds=torch.tensor([1, 2]).cuda(), offsets=torch.zeros(2, dtype=torch.int64).cuda())
    torch.cuda.set_sync_debug_mode("error")
    try:
        markov_block(*arguments, sampling=sampling, implementation="triton")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = markov_block(*arguments, sampling=sampling, implementation="triton")
    for offset in (0, 4):
        sampling.offsets.fill_(offset)
        graph.replay()
        want = markov_block(*arguments, sampling=sampling, implementation="triton")
        assert torch.equal(drawn.token_ids, want.token_ids)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("vocab", [5, 1000, 151_936])
def test_rejection_gives_the_verdict_of_the_torch_form(vocab, dtype, form):
    rows = random_rows(vocab, dtype, form, rows=16)
    moved = [None if t is None else t.cuda() for t in (rows.ids, rows.draft, rows.target, rows.lengths)]
    ids = None if rows.draft_token_ids is None else rows.draft_token_ids.cuda()
    want, got = (
        rejection_sample(*moved, rows.uniforms.double().cuda(), draft_token_ids=ids, implementation=implementation)
        for implementation in ("torch", "triton")
    )
    assert torch.equal(got.num_accepted, want.num_accepted)
    assert torch.equal(got.next_ids, want.next_ids)
