"""The law of the text under every policy, enumerated over a tiny vocabulary: scores depend on the drafted tokens.

Catches: a policy whose length for a slot looks at that slot's token or a later one. The retrospective scheduler, which
does, is the control that must be caught: 0.85/0.15 where the law is 0.7/0.3 (paper, Appendix A).
"""

from __future__ import annotations

import copy
import json

import pytest
import torch

from dspark.decoding.rejection import rejection_sample
from dspark.scheduling import POLICIES, RoundObservation, ThroughputCurve, make_policy, prefix_schedule
from tests.conftest import golden_root
from tests.reference import law, scheduler
from tests.reference.measure import measured_verifier

BLOCK = 3
STARTS = [(0,), (1,), (0, 1)]


def target(text):
    return [[0.7, 0.3], [0.25, 0.75]][text[-1] if text else 0]


def draft(text, drafted):
    before = (0, *text, *drafted)[-1]
    return [[0.5, 0.5], [0.6, 0.4]][before] if len(drafted) % 2 == 0 else [[0.3, 0.7], [0.5, 0.5]][before]


def confidence(start, block) -> list[float]:
    """Each slot's score: of the tokens before it, and of those alone. Strongly so: a later look would show."""
    scores = []
    for k in range(len(block)):
        before = (*start, *block[:k])
        scores.append((0.97, 0.45, 0.8, 0.05)[(2 * sum(before) + k) % 4])
    return scores


# Per policy and rows: seconds of a forward without tokens, more in every `step`-th count. Where lengths do vary.
CURVES = {("scheduled", 1): (1.0, 3), ("auto", 1): (1.0, 2)}


def jagged_curve(base: float = 2.0, step: int = 3) -> ThroughputCurve:
    curve = ThroughputCurve()
    for tokens in range(1, 13):
        for _ in range(3):
            curve.learn(tokens, base + 0.1 * tokens + (0.3 if tokens % step == step - 1 else 0.0))
    return curve


def settled(name: str, starts) -> object:
    """A policy that has seen some rounds, so that every kind of rule is in force."""
    policy = make_policy(
        name, assistant_confidence_threshold=0.1, survival_threshold=0.3,
        curve=jagged_curve(*CURVES.get((name, len(starts)), ())) if name in ("scheduled", "async", "auto") else None,
    )  # fmt: skip
    for step in range(30):
        slots = policy.slots(len(starts), BLOCK)
        own = torch.tensor([confidence(start, (step % 2, 1, 0))[:slots] for start in starts]).view(len(starts), slots)
        lengths = policy.lengths(own, own.cumprod(1), [slots] * len(starts)) if slots else [0] * len(starts)
        accepted = [min(length, (step + row) % 3) for row, length in enumerate(lengths)]
        tokens = len(starts) + sum(lengths)
        policy.observe(RoundObservation(len(starts), slots, tokens, 0.1, 1 + 0.1 * tokens, lengths, accepted,
                                        own.cumprod(1).tolist() if slots else None))  # fmt: skip
    return policy


def rule_of(policy, starts, seen: set):
    """Lengths of a batch as the policy decides them; each block meets the same policy state, as one round would."""

    def rule(blocks):
        one = copy.deepcopy(policy)
        own = torch.tensor([confidence(start, block) for start, block in zip(starts, blocks, strict=True)])
        lengths = one.lengths(own, own.cumprod(1), [BLOCK] * len(starts))
        seen.add(tuple(lengths))
        return lengths

    return rule


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", POLICIES)
def test_law_is_the_targets(name, rows):
    starts = STARTS[:rows]
    policy = settled(name, starts)
    if name == "auto":
        policy._verifies_all = False  # the round under test is one that decides
    seen: set = set()
    joint = scheduler.batch_law(target, draft, starts, rule_of(policy, starts, seen), 2, block_size=BLOCK)
    expected = scheduler.independent_law(target, starts, 2)
    assert law.total_variation(joint, expected) < 1e-12
    # A budget has nothing to share out between the slots of a single row.
    is_constant = name == "fixed" or (name == "async" and rows == 1)
    assert is_constant or len(seen) > 1, "lengths do not depend on the scores: nothing was tested"


def test_global_search_on_live_scores_is_caught():
    starts, curve = STARTS, jagged_curve(1.0, 2)

    def retrospective(blocks):
        own = torch.tensor([confidence(start, block) for start, block in zip(starts, blocks, strict=True)])
        return prefix_schedule(own.cumprod(1), curve, early_stop=False).tolist()

    joint = scheduler.batch_law(target, draft, starts, retrospective, 2, block_size=BLOCK)
    assert law.total_variation(joint, scheduler.independent_law(target, starts, 2)) > 5e-3


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("verify", [law.EXACT, measured_verifier(lambda ids, q, p, n, u: rejection_sample(
    ids, q, p, n, uniforms=u))], ids=["enumerated", "tensors"])  # fmt: skip
def test_appendix_a(verify, early_stop):
    case = json.loads((golden_root() / "algorithms" / "appendix_a.json").read_text())
    p, q = ([case[side][x] for x in "AB"] for side in ("target", "draft"))

    def rule(text, block):
        survival = case["a1"] * torch.tensor([[1.0, case["c2_given_x1"]["AB"[block[0]]]]], dtype=torch.float64)
        return int(prefix_schedule(survival, lambda n: case["sps"][str(n)], early_stop=early_stop)[0])

    expected = case["early_stop" if early_stop else "global_search"]
    assert {x: rule((), ("AB".index(x), 0)) for x in "AB"} == expected["lengths_by_x1"]
    got = law.committed_law(lambda _: p, lambda *_: q, rule, 1, block_size=2, verify=verify)
    want = [expected["first_token_distribution"][x] for x in "AB"]
    assert want == ([0.7, 0.3] if early_stop else [0.85, 0.15])
    assert [got[(i,)] for i in (0, 1)] == pytest.approx(want, abs=1e-6)
