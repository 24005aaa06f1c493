"""The Markov kernels under Triton's interpreter, on the CPU: the contract, and the torch form on the same counters.

Catches what the contract catches, and: a tail that is not masked, tiles combined wrongly, noise of another stream.
"""

from __future__ import annotations

import pytest
import torch

from dspark.ops.markov_step import Sampling, markov_block
from tests.ops.markov_contract import MarkovContract, eighths, tables


class TestTriton(MarkovContract):
    implementation = "triton"


@pytest.mark.parametrize("rows", [2, 6])
@pytest.mark.parametrize("top_k", [None, 40])
def test_draws_what_torch_draws_from_the_same_counters(rows, top_k):
    weights, base = tables(300, 20, reduced=True, forbidden=True), torch.randn(rows, 3, 300)
    seeds, offsets = torch.randint(-(2**62), 2**62, (rows,)), torch.randint(2**40, (rows,))
    sampling, anchors = Sampling(torch.rand(rows) + 0.5, seeds, offsets), torch.randint(300, (rows,))
    torch_form, kernels = (
        markov_block(base, anchors, weights, sampling=sampling, candidate_top_k=top_k, implementation=form)
        for form in ("torch", "triton")
    )
    assert torch.equal(torch_form.token_ids, kernels.token_ids)
    torch.testing.assert_close(torch_form.log_probs, kernels.log_probs, rtol=0, atol=2e-5)


def test_more_tiles_than_the_choice_takes_at_once():
    columns = 66_000  # 516 tiles, of which 512 are looked at together
    weights, base = tables(columns, 3), eighths(1, 1, columns, limit=64)
    base[..., -1] = 20.0  # the last column of the last tile
    drawn = markov_block(base, torch.tensor([7]), weights, implementation="triton")
    want = markov_block(base, torch.tensor([7]), weights, implementation="torch")
    assert drawn.token_ids.tolist() == want.token_ids.tolist() == [[columns - 1]]
    torch.testing.assert_close(drawn.log_probs, want.log_probs, rtol=0, atol=2e-5)
