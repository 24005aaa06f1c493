"""The Markov op in torch: its contract, its noise, its checks, and the reference implementation's own blocks.

Catches: a bias from the wrong token, ties to a higher column, an id past the vocabulary from NaN, noise that depends
on the batch, noise of too few bits, a law that is not the one drawn from, a host sync.
"""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dspark.ops.markov_step import MAX_CANDIDATES, MarkovTables, Sampling, markov_block, markov_step
from dspark.ops.markov_step.noise import gumbel_noise, philox
from tests.golden.common import cases, drafter, read, tensors

from .markov_contract import MarkovContract, eighths, tables


class TestTorch(MarkovContract):
    implementation = "torch"


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        ([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0],
         [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
    ],
)  # fmt: skip
def test_philox_gives_the_published_words(counter, key, words):
    """The known answers of Random123, the generator's reference implementation."""
    got = philox([torch.tensor([c]) for c in counter], [torch.tensor([k]) for k in key])
    assert [int(word) for word in got] == words


def test_noise_has_the_gumbel_law_and_its_tail():
    noise = gumbel_noise(torch.tensor([7]), torch.tensor([3]), torch.arange(2**20)).double()
    grid = torch.tensor([-2.0, -1.0, 0.0, 1.0, 3.0, 6.0]).double()
    got = (noise[:, None] <= grid).double().mean(0)
    assert (got - torch.exp(-torch.exp(-grid))).abs().max() < 2e-3  # four standard deviations of 2^20 draws
    assert noise.isfinite().all()
    assert 11 < noise.max() < 18  # log(2^20) = 13.9, plus or minus a few
    assert len(noise.topk(1000).values.unique()) == 1000  # 24-bit uniforms would tie here


def test_noise_depends_on_seed_offset_and_column():
    seeds, offsets, columns = torch.tensor([[0], [1], [2**32]]), torch.tensor([[0], [1], [2**32]]), torch.arange(50)
    grid = torch.stack([gumbel_noise(s, o, columns) for s in seeds for o in offsets])
    assert len(grid.unique()) == 9 * 50
    assert torch.equal(gumbel_noise(seeds[1], offsets[2], columns[30:]), grid[5, 30:])


@pytest.mark.parametrize(("name", "case"), [c for c in cases("vectors") if "rank0" not in c[0]])
def test_walks_as_the_reference_implementation(name, case):
    model = drafter(name)
    golden = tensors("vectors", read("vectors", name)["cases"][case]["file"])
    rounds = [key[: -len("base_logits")] for key in golden if key.endswith("base_logits")]
    assert rounds
    for r in rounds:
        base, anchors = golden[f"{r}base_logits"], golden[f"{r}draft_input_ids"][:, 0]
        hidden = golden[f"{r}block_hidden"]
        weights = model.markov_head.op_tables(hidden, model.markov_head.start(anchors, None, like=hidden))
        drawn = markov_block(base, anchors, weights, with_law=True)
        assert torch.equal(drawn.token_ids, golden[f"{r}sampled_tokens"])
        torch.testing.assert_close(drawn.law_logits, golden[f"{r}corrected_logits"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("top_k", [None, 4])
@pytest.mark.parametrize("samples", [False, True])
def test_never_reads_a_value_on_the_host(top_k, samples):
    """Under fake tensors any `.item()` or boolean mask raises."""
    weights, base, anchors = tables(63, 5, reduced=True, forbidden=True), eighths(3, 2, 63), torch.zeros(3).long()
    seeds = torch.arange(3)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor
        sampling = Sampling(seeds=fake(seeds)) if samples else None
        drawn = markov_block(fake(base), fake(anchors), MarkovTables(*map(fake, weights[:4])), sampling=sampling,
                             candidate_top_k=top_k, with_law=True)  # fmt: skip
        assert drawn.token_ids.shape == drawn.log_probs.shape == (3, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base_logits": torch.zeros(2, 3, 9)}, r"a last dimension of 10 .* got torch.float32 \[2, 3, 9\]"),
        ({"base_logits": torch.zeros(2, 3, 10).double()}, "`base_logits` must be float32"),
        ({"base_logits": torch.zeros(2, 0, 10)}, "must have a slot and a column"),
        ({"anchor_ids": torch.zeros(3).long()}, r"tokens before the block` must be torch.int64 of shape \[2\]"),
        ({"anchor_ids": torch.zeros(2)}, "got torch.float32"),
        ({"tables": MarkovTables(torch.zeros(10, 4), torch.zeros(10, 5))}, r"\[V, r\] and \[Vd, r\] of one dtype"),
        ({"tables": MarkovTables(torch.zeros(10, 4), torch.zeros(10, 4).half())}, "of one dtype"),
        ({"tables": MarkovTables(*[torch.zeros(10, 4)] * 2, torch.zeros(9).long())}, "tables.draft_token_ids"),
        ({"tables": MarkovTables(*[torch.zeros(10, 4)] * 2, None, torch.zeros(10))}, "tables.forbidden"),
        ({"candidate_top_k": 0}, "`candidate_top_k` must be 1 to 10 for 10 columns, got 0"),
        ({"candidate_top_k": 11}, "Pass None to let every column see the bias"),
        ({"sampling": Sampling(seeds=torch.zeros(3).long())}, "sampling.seeds"),
        ({"sampling": Sampling(seeds=torch.zeros(2).long(), offsets=torch.zeros(2))}, "sampling.offsets"),
        ({"sampling": Sampling()}, "needs `seeds`"),
        ({"sampling": Sampling(noise=torch.zeros(2, 10))}, "sampling.noise"),
        (
            {"sampling": Sampling(0.0, torch.zeros(2).long())},
            "temperature` must be positive, got 0.0. Pass no sampling",
        ),
        ({"sampling": Sampling(torch.ones(3), torch.zeros(2).long())}, "sampling.temperature"),
    ],
)
def test_misfits_are_named(change, message):
    fitting = {"base_logits": torch.zeros(2, 3, 10), "anchor_ids": torch.zeros(2).long(),
               "tables": MarkovTables(torch.zeros(10, 4), torch.zeros(10, 4))}  # fmt: skip
    markov_block(**fitting)
    with pytest.raises(ValueError, match=message):
        markov_block(**{**fitting, **change})


def test_a_step_takes_one_slot():
    weights = MarkovTables(torch.zeros(10, 4), torch.zeros(10, 4))
    with pytest.raises(ValueError, match=r"must be \[B, Vd\] for one step, got \[2, 3, 10\]"):
        markov_step(torch.zeros(2, 3, 10), torch.zeros(2).long(), weights)
    sampling = Sampling(noise=torch.eye(10)[:2] * 50)
    drawn = markov_step(torch.zeros(2, 10), torch.zeros(2).long(), weights, sampling=sampling, with_law=True)
    assert drawn.token_ids.tolist() == [0, 1]
    assert drawn.law_logits.shape == (2, 10)
    assert markov_step(torch.zeros(2, 10), torch.zeros(2).long(), weights).law_logits is None


def test_candidates_have_a_limit():
    wide = MarkovTables(torch.zeros(2000, 4), torch.zeros(2000, 4))
    with pytest.raises(ValueError, match=f"must be 1 to {MAX_CANDIDATES} for 2000 columns"):
        markov_block(torch.zeros(1, 1, 2000), torch.zeros(1).long(), wide, candidate_top_k=1500)
