"""The simulated server counts right, keeps its limits, and asks policies as the decoding loop does.

Catches: requests lost or served twice, memory or row caps overrun, rounds whose cost or outcome is not the trace's,
drafts beyond a text's end, arrivals that are ignored.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from dspark.scheduling import RoundObservation, ThroughputCurve, VerifyPolicy, make_policy
from dspark.simulation import (
    AcceptanceTrace,
    NoDraft,
    SingleDraft,
    Workload,
    dominated,
    frontier,
    join_traces,
    load_traces,
    save_traces,
    simulate,
    simulated_policies,
    throughput_at,
)

K = 3


def trace(seed: int = 0, texts: int = 5, domain: str = "made") -> AcceptanceTrace:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 30, size=texts)
    count = int(lengths.sum())
    own = rng.uniform(0.1, 1.0, size=(count, K)).astype(np.float32)
    survival = own.cumprod(1)
    accepted = (rng.uniform(size=(count, 1)) < survival).sum(1)
    return AcceptanceTrace(
        domain, np.concatenate([[0], np.cumsum(lengths)]), rng.integers(1, 9, size=texts), own, survival, accepted
    )


def curve() -> ThroughputCurve:
    made = ThroughputCurve()
    for tokens in range(1, 200):
        made.learn(tokens, 1.0 + 0.1 * tokens)
    for rows in (1, 40):
        made.learn_draft(rows, 0, 1e-6)
        made.learn_draft(rows, 1, 0.1)
        made.learn_draft(rows, K, 0.3)
    return made


class Watching(VerifyPolicy):
    """Verifies everything and keeps what it was asked and told."""

    def __init__(self) -> None:
        self.rounds: list[RoundObservation] = []
        self.limits: list[list[int]] = []

    def lengths(self, own: Any, survival: Any, limits: Sequence[int]) -> list[int]:
        assert own.shape == survival.shape == (len(limits), K)
        self.limits.append(list(limits))
        return list(limits)

    def observe(self, observation: RoundObservation) -> None:
        self.rounds.append(observation)


def test_one_text_alone_takes_the_rounds_and_the_time_of_its_trace() -> None:
    text = AcceptanceTrace(
        "one", np.array([0, 6]), np.array([4]), np.ones((6, K), np.float32), np.ones((6, K), np.float32),
        np.array([1, 0, 2, 0, 0, 1]),
    )  # fmt: skip
    # From place 0: one accepted, to 2: two accepted, to 5: no room for a draft, done. Three rounds, seven tokens.
    policy = Watching()
    result = simulate(policy, text, curve(), Workload(1))
    assert [r.accepted for r in policy.rounds] == [[1], [2], [0]]
    assert policy.limits == [[3], [3]]
    assert result.tokens == 7
    assert result.rounds == 3
    costs = [0.3 + 1.4, 0.3 + 1.4, 1.1]
    assert result.seconds == pytest.approx(1.0 + 0.4 + sum(costs))  # the prompt of four tokens first
    assert result.user_speeds[0] == pytest.approx(6 / result.seconds)
    assert result.accepted_length == pytest.approx(2.0)
    assert text.accepted_length() == pytest.approx(2.0)


def test_requests_take_the_texts_in_turn_when_asked() -> None:
    texts = trace()
    result = simulate(Watching(), texts, curve(), Workload(7, max_rows=2, in_order=True))
    lengths = (np.diff(texts.starts) + 1).tolist()
    assert result.tokens == sum(lengths) + sum(lengths[:2])
    prompts = [curve().seconds(int(n)) for n in (*texts.prompt_lengths, *texts.prompt_lengths[:2])]
    assert result.prompt_seconds == pytest.approx(sum(prompts))
    assert result.prompt_seconds < result.busy_seconds


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "fixed", "scheduled", "auto"])
def test_time_grows_as_the_requests(name: str) -> None:
    """Ten times the requests take about ten times as long: nothing is gone through again in every round."""
    texts, known = trace(), curve()
    policies, seconds = simulated_policies(known), []
    for count in (1_000, 10_000, 100_000):
        started = time.process_time()
        simulate(policies[name](), texts, known, Workload(count, max_rows=40))
        seconds.append(time.process_time() - started)
    assert seconds[2] < 16 * seconds[1] < 16 * 16 * seconds[0]


@pytest.mark.parametrize("rate", [None, 0.05, 5.0])
@pytest.mark.parametrize("name", ["plain", "mtp-1", "fixed", "threshold", "scheduled", "async", "auto"])
def test_every_request_is_served_once_within_the_limits(name: str, rate: float | None) -> None:
    texts = trace()
    work = Workload(40, rate, max_rows=6, max_cached_tokens=90, seed=3)
    inner, seen = simulated_policies(curve())[name](), []

    class Spy(type(inner)):  # type: ignore[misc]
        def observe(self, observation: RoundObservation) -> None:
            seen.append(observation)
            super().observe(observation)

    inner.__class__ = Spy
    result = simulate(inner, texts, curve(), work)
    chosen = np.random.default_rng(3).integers(texts.num_texts, size=40)
    assert result.tokens == int((np.diff(texts.starts)[chosen] + 1).sum())
    # Rounds give all tokens but each request's first, which its prompt's pass gives.
    assert result.tokens == 40 + result.row_rounds + result.accepted
    assert max(r.rows for r in seen) <= 6
    assert all(a <= v <= K for r in seen for a, v in zip(r.accepted, r.verified, strict=True))
    assert all(r.tokens == r.rows + sum(r.verified) for r in seen)
    assert (result.waits >= -1e-9).all()
    assert (result.user_speeds > 0).all()
    assert result.busy_seconds <= result.seconds + 1e-9
    if rate == 0.05:
        assert result.busy_seconds < 0.9 * result.seconds, "a light load leaves the server idle"


def test_memory_holds_requests_back() -> None:
    texts = trace()
    largest = int((texts.prompt_lengths + np.diff(texts.starts) + 1).max())
    tight = simulate(Watching(), texts, curve(), Workload(30, max_rows=8, max_cached_tokens=largest))
    wide = simulate(Watching(), texts, curve(), Workload(30, max_rows=8))
    assert tight.row_rounds / tight.rounds < wide.row_rounds / wide.rounds
    assert tight.waits.max() > wide.waits.max()
    with pytest.raises(ValueError, match="larger than `max_cached_tokens`"):
        simulate(Watching(), texts, curve(), Workload(30, max_cached_tokens=largest - 1))


def test_plain_and_single_drafts() -> None:
    texts = trace(1)
    plain = simulate(NoDraft(), texts, curve(), Workload(10, max_rows=1))
    assert (plain.verified, plain.accepted, plain.accepted_length) == (0, 0, 1.0)
    single = simulate(SingleDraft(), texts, curve(), Workload(10, max_rows=1))
    assert single.verified <= single.row_rounds
    assert 1 < single.accepted_length <= 2


def test_the_simulation_is_the_same_every_time() -> None:
    runs = [simulate(make_policy("scheduled", curve=curve()), trace(), curve(), Workload(20, 0.5)) for _ in range(2)]
    assert runs[0].to_dict() == runs[1].to_dict()


def test_frontier_and_what_is_read_off_it() -> None:
    policies = {"plain": NoDraft, "fixed": lambda: make_policy("fixed")}
    points = frontier([trace()], curve(), policies, [1, 2, 8], Workload(6))
    assert [(p.policy, p.load) for p in points] == [(n, load) for load in (1, 2, 8) for n in ("plain", "fixed")]
    fixed = [p for p in points if p.policy == "fixed"]
    speeds = [p.result.user_speed for p in fixed]
    assert speeds == sorted(speeds, reverse=True), "more rows, slower for each"
    assert throughput_at(fixed, speeds[1]) == pytest.approx(fixed[1].result.throughput)
    between = throughput_at(fixed, (speeds[1] + speeds[2]) / 2)
    assert fixed[1].result.throughput < between < fixed[2].result.throughput
    assert throughput_at(fixed, 2 * speeds[0]) == 0
    assert dominated(points, "fixed", ["fixed"]) == []
    lost = dominated(points, "plain", ["fixed"])
    assert {entry["load"] for entry in lost} >= {1}
    assert all(entry["ratio"] < 1 for entry in lost)


def test_files(tmp_path: Any) -> None:
    made = [trace(1, domain="b"), trace(2, domain="a/c")]
    path = tmp_path / "traces.safetensors"
    save_traces(made, path)
    back = load_traces(path)
    assert [t.domain for t in back] == ["a/c", "b"]
    for name in ("starts", "prompt_lengths", "own", "survival", "accepted"):
        assert np.array_equal(getattr(back[1], name), getattr(made[0], name))
    assert [p.name for p in tmp_path.iterdir()] == ["traces.safetensors"]
    (tmp_path / "cut").write_bytes(path.read_bytes()[:100])
    for other in (tmp_path / "cut", tmp_path / "nothing"):
        with pytest.raises(ValueError, match="no trace file"):
            load_traces(other)


def test_traces_that_do_not_fit_together_are_refused() -> None:
    good = trace()
    parts = dict(vars(good))
    wrong = {
        "starts": good.starts[:-1], "own": good.own[:-1], "accepted": good.accepted + K, "survival": good.own[:, :1],
    }  # fmt: skip
    for name, value in wrong.items():
        with pytest.raises(ValueError, match="made"):
            AcceptanceTrace(**{**parts, name: value})
    joined = join_traces([good, trace(4)])
    assert joined.num_texts == 10
    assert joined.starts[-1] == len(joined.accepted)
    narrow = AcceptanceTrace(
        "n", good.starts, good.prompt_lengths, good.own[:, :2], good.survival[:, :2], good.accepted.clip(0, 2)
    )
    with pytest.raises(ValueError, match="one width"):
        join_traces([good, narrow])


@pytest.mark.parametrize(
    "wrong", [{"num_requests": 0}, {"num_requests": 1, "max_rows": 0}, {"num_requests": 1, "requests_per_second": 0}]
)
def test_impossible_workloads_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Workload(**wrong)
