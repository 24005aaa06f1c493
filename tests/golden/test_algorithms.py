"""Exact verification against the golden cases: published rationals, the reference's own verifier, Appendix A.

Catches: a wrong ratio, residual or fallback, `<=`, a bonus from the wrong row, a length rule that looks at the draft.
"""

from __future__ import annotations

import json
from fractions import Fraction

import pytest
import torch

from dspark.decoding.rejection import greedy_verify, rejection_sample
from tests.conftest import golden_root
from tests.reference import law
from tests.reference.measure import measured_verifier

from . import common


def cases(name: str) -> list:
    return [pytest.param(case, id=case["id"]) for case in json.loads(file(name).read_text())["cases"]]


def file(name: str):
    return golden_root() / "algorithms" / f"{name}.json"


def sampler(ids, draft, target, lengths, uniforms):
    return rejection_sample(ids, draft, target, lengths, uniforms=uniforms)


@pytest.mark.parametrize("case", cases("rejection_sampling"))
@pytest.mark.parametrize("verify", [law.EXACT, measured_verifier(sampler, steps=48)], ids=["enumerated", "tensors"])
def test_one_slot_cases(case, verify):
    target, draft = case["target_p"], case["draft_q"]
    size = len(target)
    stayed = 0.0
    for token, stay in enumerate(case["accept_prob_per_token"]):
        if draft[token] == 0:
            continue
        one = verify((token,), [draft], [target, target])
        got = sum(mass for text, mass in one.items() if len(text) == 2)
        assert got == pytest.approx(stay, abs=1e-12)
        stayed += draft[token] * got
        residual = [one.get((i,), 0.0) for i in range(size)]
        if stay < 1:
            assert [m / sum(residual) for m in residual] == pytest.approx(case["residual"], abs=1e-12)
    assert stayed == pytest.approx(case["accept_mass"], abs=1e-12)
    first = law.committed_law(lambda _: target, lambda *_: draft, law.full_length, 1, block_size=1, verify=verify)
    assert [first.get((i,), 0.0) for i in range(size)] == pytest.approx(case["output_distribution"], abs=1e-12)


@pytest.mark.parametrize("case", cases("verify"))
def test_reference_verifier_cases(case):
    """Same count on the same uniforms; the next token's law by sweeping its own uniform."""
    t = {
        k.split(".")[1]: v
        for k, v in common.tensors("algorithms", "verify.safetensors").items()
        if k.startswith(case["id"])
    }
    target, ids = t["target_probs"], t["verify_input_ids"][:, 1:]
    slots, size = ids.shape[1], target.shape[-1]
    draft = t.get("draft_probs", target.new_zeros(1, 0, size))
    sweep = 50_000
    last = (torch.arange(sweep).double() + 0.5) / sweep
    uniforms = torch.cat([t["uniforms"].double().expand(sweep, -1), last[:, None]], dim=1)
    lengths = torch.full((sweep,), slots)
    got = sampler(*(x.expand(sweep, *x.shape[1:]) for x in (ids, draft, target)), lengths, uniforms)
    assert (got.num_accepted == case["accepted_draft_tokens"]).all()
    if slots:
        assert t["accept_prefix_mask"].sum() == case["accepted_draft_tokens"]
    frequencies = got.next_ids.bincount(minlength=size) / sweep
    # Each token's run of uniforms is counted to within one of them at either end, on top of the file's 1e-5.
    torch.testing.assert_close(frequencies, t["next_token_distribution"], rtol=0, atol=1e-5 + 2 / sweep)
    if case["temperature"] == 0:
        greedy = greedy_verify(ids, target.argmax(-1), lengths[:1])
        assert (greedy.num_accepted, greedy.next_ids) == (got.num_accepted[:1], got.next_ids[:1])


@pytest.mark.parametrize("variant", ["early_stop", "global_search"])
def test_appendix_a(variant):
    """Choosing the length from the whole drawn block bends the law; stopping at the first fall does not."""
    case = json.loads(file("appendix_a").read_text())
    p, q = ([Fraction(str(case[side][x])) for x in "AB"] for side in ("target", "draft"))
    speed = [Fraction(str(case["sps"][n])) for n in "123"]
    survival = Fraction(str(case["a1"]))

    def rule(text, block):
        second = survival * Fraction(str(case["c2_given_x1"]["AB"[block[0]]]))
        throughput = [speed[0], (1 + survival) * speed[1], (1 + survival + second) * speed[2]]
        assert float(throughput[2]) == pytest.approx(case["theta2"]["AB"[block[0]]])
        if variant == "global_search":
            return max(range(3), key=throughput.__getitem__)
        return next((n for n in range(2) if throughput[n + 1] <= throughput[n]), 2)

    assert {x: rule((), ("AB".index(x), 0)) for x in "AB"} == case[variant]["lengths_by_x1"]
    for verify in (law.EXACT, measured_verifier(sampler)):
        first = law.committed_law(lambda _: p, lambda *_: q, rule, 1, block_size=2, verify=verify)
        expected = case[variant]["first_token_distribution"]
        assert [float(first[(i,)]) for i in (0, 1)] == pytest.approx([expected[x] for x in "AB"], abs=1e-6)
        is_lossless = law.total_variation(first, law.target_law(lambda _: p, 1)) < 1e-6
        assert is_lossless == case[variant]["lossless"]
