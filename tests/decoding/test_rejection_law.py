"""The law of the text that exact verification emits: measured without sampling error, and sampled with a chi-square.

Catches: any acceptance rule, residual, bonus or verify length that bends the target's law; draws that are not
independent of the acceptance uniforms or of the drafts. Every check must fail on deliberately wrong rules.
"""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from scipy import stats

from dspark.decoding.rejection import draw, rejection_sample
from tests.reference import law, toy
from tests.reference.measure import measured_verifier

ROUNDS = 40_000
SAMPLERS = {
    "dense": lambda ids, draft, target, lengths, u: rejection_sample(ids, draft, target, lengths, uniforms=u),
    "greedy": lambda ids, draft, target, lengths, u: rejection_sample(ids, None, target, lengths, uniforms=u),
    "reduced": lambda ids, draft, target, lengths, u: rejection_sample(
        ids, draft[..., [0, 2]], target, lengths, uniforms=u, draft_token_ids=torch.tensor([0, 2])
    ),
}


def redrawn_from_target(ids, draft, target, lengths, u):
    counts, _ = rejection_sample(ids, draft, target, lengths, uniforms=u)
    return counts, draw(target[torch.arange(len(ids)), counts], u[:, -1])


def accepting_equality(ids, draft, target, lengths, u):
    """`<=` on uniforms of a coarse grid."""
    coarse = torch.cat([(u[:, :-1] * 60).floor() / 60 - 1e-9, u[:, -1:]], dim=1)
    return rejection_sample(ids, draft, target, lengths, uniforms=coarse)


def deviation(sample, drafter, rule=law.full_length, *, dtype=torch.float64, **kwargs) -> float:
    """Total variation between the target's law and that of three tokens decoded with `sample`."""
    verify = measured_verifier(sample, dtype)
    got = law.committed_law(toy.target, drafter, rule, 3, block_size=2, verify=verify, **kwargs)
    return float(law.total_variation(got, law.target_law(toy.target, 3)))


@pytest.mark.parametrize(
    ("form", "drafter", "rule", "dtype"),
    [
        ("dense", toy.draft, law.full_length, torch.float64),
        ("dense", toy.draft, toy.LOSSLESS_RULES["stepwise"], torch.float32),
        ("dense", toy.top_two, law.full_length, torch.float32),
        ("greedy", toy.greedy, law.full_length, torch.float32),
        ("greedy", toy.draft, toy.retrospective, torch.float32),
        ("reduced", toy.without_token_one, law.full_length, torch.float32),
    ],
)
def test_committed_text_has_the_target_law(form, drafter, rule, dtype):
    """The greedy form keeps the law whatever the drafts and their count depend on: it reads no draft law."""
    assert deviation(SAMPLERS[form], drafter, rule, dtype=dtype) < 1e-6


@pytest.mark.parametrize(
    "wrong",
    [
        {"sample": SAMPLERS["dense"], "drafter": toy.top_two, "claimed": toy.draft},
        {"sample": SAMPLERS["dense"], "drafter": toy.greedy, "claimed": toy.draft},
        {"sample": SAMPLERS["dense"], "drafter": toy.draft, "rule": toy.retrospective},
        {"sample": redrawn_from_target, "drafter": toy.draft},
        {"sample": accepting_equality, "drafter": toy.draft},
    ],
    ids=["law before the warpers", "softmax of a greedy draft", "retrospective length",
         "refusal redrawn from the target", "accept at p=0"],
)  # fmt: skip
def test_law_check_catches_wrong_rules(wrong):
    assert deviation(**wrong) > 5e-3


def decoded(length: int, wrong: str | None, rows: int = ROUNDS) -> list[tuple[int, ...]]:
    """Tokens committed by one round of the toy, drawn with real random numbers."""
    g = torch.Generator().manual_seed(length)
    table = {
        text: (torch.tensor(list(map(float, toy.target(text)))), torch.tensor(list(map(float, toy.draft((), text)))))
        for size in range(4)
        for text in itertools.product(range(3), repeat=size)
    }
    acceptance = torch.rand(rows, 3, generator=g)
    texts = torch.zeros(rows, 0, dtype=torch.int64)
    target, draft = [], []
    for slot in range(4):
        laws = [table[tuple(text)] for text in texts.tolist()]
        target.append(torch.stack([law[0] for law in laws]))
        draft.append(torch.stack([law[1] for law in laws]))
        uniforms = (
            acceptance[:, slot] if wrong == "shared with the draft" and slot < 3 else torch.rand(rows, generator=g)
        )
        texts = torch.cat([texts, draw(draft[-1], uniforms)[:, None]], dim=1)
    if wrong == "shared with the next token":
        acceptance = torch.cat([acceptance, acceptance[:, :1]], dim=1)
    told = torch.full((rows, 3, 3), 1 / 3) if wrong == "another law" else torch.stack(draft[:3], 1)
    lengths = torch.full((rows,), length)
    counts, ids = rejection_sample(
        texts[:, :3], told, torch.stack(target, 1), lengths, uniforms=acceptance if wrong else None, generator=g
    )
    return [(*text[:n], i) for text, n, i in zip(texts.tolist(), counts.tolist(), ids.tolist(), strict=True)]


@pytest.mark.parametrize(
    ("length", "wrong"),
    [(0, None), (1, None), (2, None), (3, None),
     (3, "shared with the draft"), (3, "shared with the next token"), (3, "another law")],
)  # fmt: skip
def test_sampled_rounds_pass_a_chi_square(length, wrong):
    """Accepted count and next token together."""
    want = law.round_law(toy.target, toy.draft, lambda text, block: length, (), 3)
    seen = Counter(decoded(length, wrong))
    expected = [ROUNDS * float(mass) for mass in want.values()]
    assert min(expected) > 5
    if wrong is None:
        assert set(seen) <= set(want)
    observed = [seen[tokens] for tokens in want]
    p_value = stats.chisquare(observed, [e * sum(observed) / ROUNDS for e in expected]).pvalue
    assert (p_value > 1e-3) if wrong is None else (p_value < 1e-9)
