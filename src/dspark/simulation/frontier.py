"""The serving frontier: throughput of all users together against the speed each of them sees (paper Fig. 7).

A policy's frontier has one point per load. What a user is promised, tokens per second, cuts it at the largest
throughput that still keeps the promise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..scheduling import ThroughputCurve, VerifyPolicy, make_policy
from .simulator import SimulationResult, Workload, simulate
from .traces import AcceptanceTrace


class SingleDraft(VerifyPolicy):
    """One draft per round, always verified: what a multi-token-prediction head of depth 1 does (MTP-1)."""

    def slots(self, rows: int, most: int, remaining: Mapping[int, int] | None = None) -> int:  # noqa: ARG002 - the interface
        """One, where there is room."""
        return min(1, most)


class NoDraft(VerifyPolicy):
    """Plain decoding."""

    def slots(self, rows: int, most: int, remaining: Mapping[int, int] | None = None) -> int:  # noqa: ARG002
        """None."""
        return 0


def simulated_policies(curve: ThroughputCurve, *, threshold: float = 0.5) -> dict[str, Callable[[], VerifyPolicy]]:
    """Name to a maker of fresh policies, in the order reports show them; `auto` has to learn the curve itself."""
    return {
        "plain": NoDraft,
        "mtp-1": SingleDraft,
        "fixed": lambda: make_policy("fixed"),
        "threshold": lambda: make_policy("threshold", survival_threshold=threshold),
        "scheduled": lambda: make_policy("scheduled", curve=curve),
        "async": lambda: make_policy("async", curve=curve),
        "auto": lambda: make_policy("auto"),
    }


@dataclass(frozen=True)
class FrontierPoint:
    """One policy at one load.

    Attributes:
        domain, policy: Which.
        load: Rows served together at most (the closed queue is always full).
        result: What came out.
    """

    domain: str
    policy: str
    load: int
    result: SimulationResult


def frontier(
    traces: Sequence[AcceptanceTrace],
    curve: ThroughputCurve,
    policies: dict[str, Callable[[], VerifyPolicy]],
    loads: Sequence[int],
    workload: Workload,
    *,
    progress: Callable[[FrontierPoint], None] | None = None,
) -> list[FrontierPoint]:
    """Every policy on every domain at every load, each on the same requests.

    Args:
        traces: One per domain.
        curve: What rounds cost.
        policies: See [`simulated_policies`].
        loads: Rows served together.
        workload: Everything else; its `max_rows` is replaced by the load, and requests scale with the load, so that
            the last rows to finish alone weigh the same at every load.
        progress: Called after each point.
    """
    points = []
    for trace in traces:
        for load in loads:
            for name, make in policies.items():
                work = replace(workload, max_rows=load, num_requests=workload.num_requests * load)
                point = FrontierPoint(trace.domain, name, load, simulate(make(), trace, curve, work))
                points.append(point)
                if progress is not None:
                    progress(point)
    return points


def throughput_at(points: Sequence[FrontierPoint], promise: float) -> float:
    """Largest throughput of one policy's frontier at which a user still gets `promise` tokens per second.

    Between two measured loads it is interpolated; 0.0 where even the lightest load breaks the promise.
    """
    best, earlier = 0.0, None
    for point in sorted(points, key=lambda point: point.load):
        speed, throughput = point.result.user_speed, point.result.throughput
        if speed >= promise:
            best = max(best, throughput)
        elif earlier is not None and earlier[0] >= promise:
            share = (earlier[0] - promise) / (earlier[0] - speed)
            best = max(best, earlier[1] + share * (throughput - earlier[1]))
        earlier = (speed, throughput)
    return best


def dominated(points: Sequence[FrontierPoint], winner: str, others: Sequence[str]) -> list[dict[str, Any]]:
    """Where `winner` is not at least as good as each of `others`: domain, load, policy, and the ratio of throughputs.

    At a closed queue of one length a policy with a larger throughput also has the larger user speed, so one ratio
    tells both. Empty: `winner` dominates them at every load.
    """
    found = {(point.domain, point.load, point.policy): point.result.throughput for point in points}
    return [
        {"domain": domain, "load": load, "policy": other, "ratio": found[domain, load, winner] / throughput}
        for (domain, load, other), throughput in found.items()
        if other in others and found[domain, load, winner] < throughput
    ]


__all__ = [
    "FrontierPoint", "NoDraft", "SingleDraft", "dominated", "frontier", "simulated_policies", "throughput_at",
]  # fmt: skip
