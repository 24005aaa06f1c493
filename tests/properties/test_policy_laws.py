"""Every verify policy keeps the target's law, of a row alone and of rows whose verify lengths depend on each other.

Catches: a length that looks at a slot's own draw or a later one, a budget of all rows that does, a width that is
chosen by the present round. Costs are said, not measured, so that a replay takes the same turns. The same check fails
on a schedule that searches the whole curve of the present scores (paper, Appendix A).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

from dspark.decoding import schedule
from dspark.scheduling import RoundObservation, ThroughputCurve, VerifyPolicy, make_policy, prefix_schedule
from dspark.speculation import SpeculationConfig
from tests.reference.law import TextLaw

from .enumeration import Chance, Run, distance, emitted_law
from .test_exact_law import PROMPT, TOLERANCE
from .test_sampled_law import PASSES, TOKENS, expected, p_value
from .tiny import close_pair, drafter, own_law, target

POLICIES = ("fixed", "threshold", "scheduled", "async", "auto")
SETTINGS = {"threshold": {"survival_threshold": 0.35}}
DRAFT_SECONDS = 0.3


def cost(tokens: int) -> float:
    """A staircase that makes some drafts pay and others not."""
    return 1.0 + 0.35 * (tokens - 1) + 0.5 * (tokens > 4)


def known_curve(known: Callable[[int], float] = cost) -> ThroughputCurve:
    curve = ThroughputCurve()
    for _ in range(12):
        for tokens in range(1, 20):
            curve.learn(tokens, known(tokens))
        for rows in range(1, 6):
            curve.learn_draft(rows, 0, 0.01)
            curve.learn_draft(rows, 2, DRAFT_SECONDS)
    return curve


@pytest.fixture
def _said_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    def saying(**fields: Any) -> RoundObservation:
        drafting = DRAFT_SECONDS if fields["slots"] else 0.01
        return RoundObservation(**{**fields, "draft_seconds": drafting, "verify_seconds": cost(fields["tokens"])})

    monkeypatch.setattr(schedule, "RoundObservation", saying)


def settings(policy: str, *, is_known: bool) -> SpeculationConfig:
    curve = known_curve() if is_known and policy in ("scheduled", "async", "auto") else None
    return SpeculationConfig(policy, throughput_curve=curve, **SETTINGS.get(policy, {}))


@pytest.mark.usefixtures("_said_costs")
@pytest.mark.parametrize("is_known", [True, False], ids=["known costs", "learnt costs"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("horizon", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_law_of_one_row(policy: str, is_known: bool, horizon: int) -> None:
    model, draft, chance = target(), drafter(target()), Chance(horizon, batch=1)

    def assistant() -> Any:
        draft._policies = None  # every leaf starts where the first one did
        return draft

    said = settings(policy, is_known=is_known)
    got = emitted_law(model, assistant, PROMPT, chance, max_new_tokens=horizon + 3, speculation=said)
    assert distance(got, own_law(model, PROMPT, horizon)) < TOLERANCE
    assert sum(got.values()) == pytest.approx(1, abs=1e-5)
    if is_known and policy in ("threshold", "scheduled"):
        assert len(chance.verified) > 1, chance.verified


class JointChance(Chance):
    """Enumerates all rows of one call together: their texts are one outcome."""

    def choose(self, row: int, probs: list[float]) -> int:
        return super().choose(0, probs)

    def joint_law(self, run: Run, rows: int) -> TextLaw:
        law: TextLaw = defaultdict(float)
        pending: list[list[int]] = [[]]
        while pending:
            self._paths, self._cursors, self._masses, self._siblings = [pending.pop()], [0], [1.0], []
            self._start_round(range(rows))
            self._run = self._focus = None
            with self._installed():
                texts = run(rows)
            law[tuple(map(tuple, texts[:, : self.horizon].tolist()))] += self._masses[0]
            self.leaves += 1
            pending += self._siblings
        return dict(law)


def joint_deviation(policy: Callable[[], VerifyPolicy], monkeypatch: pytest.MonkeyPatch) -> tuple[float, Chance]:
    """How far the joint law of two rows is from two independent texts of the target's own law."""
    model = target(2, contrast=1.5)
    draft = drafter(model, seed=3, confidence_temperatures=[1.0, 1.0])
    chance = JointChance(2)
    monkeypatch.setattr(SpeculationConfig, "new_policy", lambda self: policy())

    def run(rows: int) -> torch.Tensor:
        texts = model.generate(PROMPT2.expand(rows, -1), do_sample=True, max_new_tokens=5, assistant_model=draft)
        return texts[:, PROMPT2.shape[1] :]

    got = chance.joint_law(run, 2)
    own = own_law(model, PROMPT2, 2)
    wanted = {(a, b): own[a] * own[b] for a, b in product(own, own)}
    return distance(got, wanted), chance


def with_a_past(policy: Any) -> Any:
    """As it is after some rounds of two rows: the enumerated round is then no first one."""
    for accepted in ([1, 0], [0, 0], [2, 1], [1, 0], [0, 2], [1, 1]):
        width, scores = policy.slots(2, 2), torch.tensor([[0.9, 0.6], [0.5, 0.2]])[:, : policy.slots(2, 2)]
        lengths = policy.lengths(scores, scores, [width, width]) if width else [0, 0]
        kept = [min(pair) for pair in zip(accepted, lengths, strict=True)]
        tokens = 2 + sum(lengths)
        policy.observe(
            RoundObservation(2, width, tokens, DRAFT_SECONDS, cost(tokens), lengths, kept, scores.tolist() or None)
        )
    return policy


PROMPT2 = torch.tensor([[1, 1, 1]])  # 0 is padding


@pytest.mark.usefixtures("_said_costs")
@pytest.mark.parametrize("policy", ["scheduled", "async", "auto"])
def test_joint_law_of_two_rows(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    curve = known_curve((lambda tokens: 1 + 0.02 * tokens) if policy == "auto" else cost)  # auto drafts where it pays
    deviation, chance = joint_deviation(lambda: with_a_past(make_policy(policy, curve=curve)), monkeypatch)
    assert deviation < TOLERANCE
    assert len(chance.verified) > 1, chance.verified


class WholeSearch(VerifyPolicy):
    """Deliberately wrong: the present scores decide how far the search goes on, later ones included."""

    needs_confidence = True

    def lengths(self, own: Any, survival: Any, limits: Any) -> list[int]:
        return prefix_schedule(survival, known_curve(cliff), early_stop=False, limits=limits).tolist()


def cliff(tokens: int) -> float:
    """A draft alone does not pay, two of them may: whether they do depends on the second one's score."""
    return {1: 1.0, 2: 1.0, 3: 1.6, 4: 1.65, 5: 1.9}.get(tokens, 2.2)


@pytest.mark.usefixtures("_said_costs")
def test_a_search_over_the_whole_curve_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    assert joint_deviation(WholeSearch, monkeypatch)[0] > 1e-3


@pytest.mark.parametrize("policy", ["scheduled", "async", "auto"])
def test_three_rows_have_the_law(policy: str) -> None:
    """With the real clock: whatever rounds cost, texts keep the law."""
    model, draft = close_pair()
    draft._policies = None
    texts = []
    for seed in range(150):
        torch.manual_seed(seed)
        out = model.generate(
            torch.tensor([[3, 7, 1, 4]]), assistant_model=draft, do_sample=True, temperature=0.9, top_k=0,
            max_new_tokens=TOKENS + 4, num_return_sequences=3, policy=policy,
        )  # fmt: skip
        texts.append(out[:, 4 : 4 + TOKENS])
    for row in torch.stack(texts).unbind(1):
        assert p_value(row[:, 1:], expected().sum(0)) > PASSES / 3
