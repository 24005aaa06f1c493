"""The rejection kernels under Triton's interpreter, on the CPU: the torch form's verdict, bit for bit, and the law.

Catches: a sum whose order matters, a tile taken for its neighbour, another slot's law, padding that leaks, a bisection
that misses an end of the draft vocabulary, an index past the vocabulary.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dspark.ops.rejection import rejection_sample
from tests.decoding.test_rejection import FORMS, Rows, random_rows
from tests.reference import law, toy
from tests.reference.measure import measured_verifier


def both(rows: Rows):
    """Verdicts of the torch form and of the kernels."""
    uniforms, kwargs = rows.uniforms.double(), {"draft_token_ids": rows.draft_token_ids}
    return [
        rejection_sample(rows.ids, rows.draft, rows.target, rows.lengths, uniforms, implementation=form, **kwargs)
        for form in ("torch", "triton")
    ]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("vocab", "dtype"), [(2, torch.float32), (63, torch.float32), (1000, torch.float64), (2500, torch.float32)]
)
def test_gives_the_verdict_of_the_torch_form(vocab, dtype, form):
    rows = random_rows(vocab, dtype, form)
    want, got = both(rows)
    assert torch.equal(got.num_accepted, want.num_accepted)
    assert torch.equal(got.next_ids, want.next_ids)
    assert len((got.num_accepted - rows.lengths).unique()) > 1  # both endings occurred


@pytest.mark.parametrize("vocab", [49_152, 151_936])
def test_wide_laws_at_both_ends_and_between(vocab):
    target = (torch.randn(1, 1, vocab) * 3).softmax(-1).expand(4, -1, -1)
    uniforms = torch.tensor([[0.0], [0.3], [0.7], [1 - 2.0**-24]]).double()
    rows = Rows(torch.zeros(4, 0).long(), None, target, torch.zeros(4).long(), uniforms)
    want, got = both(rows)
    assert torch.equal(got.next_ids, want.next_ids)
    assert (got.num_accepted == 0).all()


@pytest.mark.parametrize(("form", "value"), [("dense", torch.nan), ("greedy", torch.nan), ("reduced", 0.0)])
def test_rows_without_a_law_stay_inside_the_vocabulary(form, value):
    rows = random_rows(1000, torch.float32, form)
    want, _ = both(rows)
    rows.target[::2] = value
    if rows.draft is not None:
        rows.draft[::4] = value
    _, got = both(rows)
    assert ((got.next_ids >= 0) & (got.next_ids < 1000)).all()
    assert torch.equal(got.next_ids[1::2], want.next_ids[1::2])


def test_strides_do_not_matter():
    rows = random_rows(63, torch.float32, "dense")
    target, draft = rows.target.repeat(1, 2, 2)[:, :4, :63], rows.draft.transpose(1, 2).contiguous().transpose(1, 2)
    wide = dataclasses.replace(rows, target=target, draft=draft)
    for ours, want in zip(both(wide)[1], both(rows)[0], strict=True):
        assert torch.equal(ours, want)


def test_committed_text_has_the_target_law():
    kept = torch.tensor([0, 2])

    def sample(ids, draft, target, lengths, uniforms):
        return rejection_sample(ids, draft[..., kept], target, lengths, uniforms, draft_token_ids=kept,
                                implementation="triton")  # fmt: skip

    verify = measured_verifier(sample, torch.float32, steps=12)
    got = law.committed_law(toy.target, toy.without_token_one, law.full_length, 2, block_size=1, verify=verify)
    assert law.total_variation(got, law.target_law(toy.target, 2)) < 2e-3  # uniforms bisected to 2^-12
