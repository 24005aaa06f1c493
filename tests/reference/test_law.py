"""The enumerator itself, in exact fractions: the right rule gives the target's law, every wrong one does not."""

from __future__ import annotations

from fractions import Fraction as F

import pytest

from . import law, rejection
from .toy import LOSSLESS_RULES, draft, greedy, retrospective, target, top_two

EXACT = law.target_law(target, 4)


@pytest.mark.parametrize("block_size", [0, 1, 2, 3])
@pytest.mark.parametrize("rule", LOSSLESS_RULES)
@pytest.mark.parametrize("drafter", [draft, top_two, greedy])
def test_right_rule_is_lossless(drafter, rule, block_size):
    assert sum(EXACT.values()) == 1
    got = law.committed_law(target, drafter, LOSSLESS_RULES[rule], 4, block_size=block_size)
    assert law.total_variation(got, EXACT) == 0


@pytest.mark.parametrize(
    ("drafter", "kwargs"),
    [
        (top_two, {"claimed": draft}),
        (greedy, {"claimed": draft}),
        (draft, {"length_rule": retrospective}),
        (draft, {"verify": law.verifier(recover=law.unnormalised_recover)}),
        (draft, {"verify": law.verifier(recover=law.target_recover)}),
        (draft, {"verify": law.verifier(accept=law.on_grid(60, inclusive=True))}),
    ],
    ids=["law before the warpers", "softmax of a greedy draft", "retrospective length", "residual not normalised",
         "refusal redrawn from the target", "accept at p=0"],
)  # fmt: skip
def test_wrong_rule_is_caught(drafter, kwargs):
    kwargs = {"length_rule": law.full_length, **kwargs}
    got = law.committed_law(target, drafter, horizon=4, block_size=2, **kwargs)
    assert sum(got.values()) == 1
    assert law.total_variation(got, EXACT) > F(1, 200)


def test_published_cases_of_a_wrong_draft_law():
    p = [F(6, 10), F(4, 10), F(0)]
    raw, cut = [F(4, 10), F(3, 10), F(3, 10)], [F(4, 7), F(3, 7), F(0)]
    args = {"length_rule": law.full_length, "horizon": 1, "block_size": 1}
    broken = law.committed_law(lambda _: p, lambda *_: cut, claimed=lambda *_: raw, **args)
    assert broken == {(0,): F(4, 7), (1,): F(3, 7)}
    p, q = [F(7, 10), F(3, 10), F(0)], [F(5, 10), F(3, 10), F(2, 10)]
    most_likely = law.argmax_of(lambda *_: q)
    assert law.committed_law(lambda _: p, most_likely, claimed=lambda *_: q, **args) == {(0,): 1}
    assert law.committed_law(lambda _: p, most_likely, **args) == {(0,): F(7, 10), (1,): F(3, 10)}


def test_strict_comparison_is_exact_on_a_grid_and_the_inclusive_one_takes_forbidden_tokens():
    p, q = [F(1, 2), F(1, 2), F(0)], [F(1, 4), F(1, 2), F(1, 4)]
    args = (lambda _: p, lambda *_: q, law.full_length, 1)
    for inclusive in (False, True):
        verify = law.verifier(accept=law.on_grid(4, inclusive=inclusive))
        got = law.committed_law(*args, block_size=1, verify=verify)
        assert got.get((2,), 0) == (F(1, 16) if inclusive else 0)
        assert (law.total_variation(got, law.target_law(args[0], 1)) == 0) is not inclusive


def test_scalar_sampler_has_the_enumerated_law():
    """Uniforms on a grid that hits every ratio and every CDF step of these laws: counting is exact."""
    p, q = [F(1, 2), F(1, 4), F(1, 4)], [F(1, 4), F(1, 2), F(1, 4)]
    grid = [F(i, 8) for i in range(8)]
    counted: dict = {}
    for token, chance in enumerate(q):
        for u in grid:
            for v in grid:
                count, after = rejection.rejection_sample([token], [q], [p, p], [u, v])
                key = (*[token][:count], after)
                counted[key] = counted.get(key, 0) + chance / 64
    assert counted == law.round_law(lambda _: p, lambda *_: q, law.full_length, (), 1)
