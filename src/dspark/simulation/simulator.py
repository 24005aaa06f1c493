"""A server that decodes many requests together, in simulated time: arrivals, rows, K/V memory, rounds, policies.

Time advances by rounds. A round costs what the step curve says for its tokens, a request's first round also its
prompt. Which drafts are accepted comes from an [`AcceptanceTrace`], so a policy is judged on the drafter's real
behaviour, and is asked exactly as the decoding loop asks it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..scheduling import RoundObservation, ThroughputCurve, VerifyPolicy
from .traces import AcceptanceTrace


@dataclass(frozen=True)
class Workload:
    """Requests of a simulation.

    Attributes:
        num_requests: How many arrive.
        requests_per_second: Rate of their Poisson arrivals; None: all are there from the start (a closed queue).
        max_rows: Requests decoded together at most.
        max_cached_tokens: Cap on the K/V memory of all rows, in tokens; a request is let in when its whole text fits.
        seed: Of arrivals and of which text a request gets.
        in_order: Requests take the texts of the trace in turn instead of drawing them.
    """

    num_requests: int
    requests_per_second: float | None = None
    max_rows: int = 64
    max_cached_tokens: int | None = None
    seed: int = 0
    in_order: bool = False

    def __post_init__(self) -> None:
        if self.num_requests < 1 or self.max_rows < 1:
            raise ValueError(
                f"`num_requests` and `max_rows` must be at least 1, got {self.num_requests} and {self.max_rows}."
            )
        rate = self.requests_per_second
        if rate is not None and not rate > 0:
            raise ValueError(f"`requests_per_second` must be above 0 or None, got {rate}.")


@dataclass
class SimulationResult:
    """What came out; times in seconds of simulated time.

    Attributes:
        tokens: New tokens of all requests.
        seconds: From the first arrival to the last token.
        busy_seconds: In rounds and prompts.
        prompt_seconds: In prompts.
        rounds: Rounds run.
        row_rounds: Rows summed over rounds.
        drafted, verified, accepted: Drafts, summed.
        user_speeds: float64 `[num_requests]`, a request's new tokens per second from admission to its last token.
        waits: float64 `[num_requests]`, from arrival to admission.
    """

    tokens: int
    seconds: float
    busy_seconds: float
    prompt_seconds: float
    rounds: int
    row_rounds: int
    drafted: int
    verified: int
    accepted: int
    user_speeds: np.ndarray = field(repr=False)
    waits: np.ndarray = field(repr=False)

    @property
    def throughput(self) -> float:
        """New tokens per second of all requests together, over the whole run."""
        return self.tokens / self.seconds

    @property
    def user_speed(self) -> float:
        """Median of the requests' new tokens per second."""
        return float(np.median(self.user_speeds))

    @property
    def accepted_length(self) -> float:
        """tau over row-rounds."""
        return 1 + self.accepted / self.row_rounds

    def to_dict(self) -> dict[str, Any]:
        """JSON-able figures."""
        return {
            "throughput": self.throughput,
            "user_speed": self.user_speed,
            "user_speed_p10": float(np.quantile(self.user_speeds, 0.1)),
            "wait_p90": float(np.quantile(self.waits, 0.9)),
            "accepted_length": self.accepted_length,
            "rows": self.row_rounds / self.rounds,
            "busy_share": self.busy_seconds / self.seconds,
            "verified_per_row": self.verified / self.row_rounds,
            "acceptance_rate": self.accepted / self.verified if self.verified else 0.0,
        }


def simulate(
    policy: VerifyPolicy, trace: AcceptanceTrace, curve: ThroughputCurve, workload: Workload
) -> SimulationResult:
    """Serve `workload` with texts of `trace` under `policy`, whose rounds cost what `curve` says.

    Args:
        policy: Fresh; it is asked and told as in the decoding loop.
        trace: Texts to draw requests from.
        curve: Cost of the target's forward and of drafting. It is the world's; a policy may know another one.
        workload: Arrivals and limits.

    Raises:
        ValueError: A text alone is larger than the K/V cap.
    """
    server = _Server(trace, curve, workload)
    while server.waits_or_runs():
        server.admit()
        if server.num_rows:
            server.round(policy)
    return server.result()


class _Server:
    """Live rows as arrays that are compacted when rows end."""

    def __init__(self, trace: AcceptanceTrace, curve: ThroughputCurve, workload: Workload) -> None:
        rng = np.random.default_rng(workload.seed)
        count = workload.num_requests
        self.trace, self.curve, self.workload = trace, curve, workload
        drawn = rng.integers(trace.num_texts, size=count)
        self.texts = np.arange(count) % trace.num_texts if workload.in_order else drawn
        gaps = np.zeros(count)
        if workload.requests_per_second is not None:
            gaps = rng.exponential(1 / workload.requests_per_second, size=count)
        self.arrivals = np.cumsum(gaps) - gaps[0]
        self.lengths = np.diff(trace.starts)[self.texts]  # new tokens after a request's first
        self.sizes = trace.prompt_lengths[self.texts] + self.lengths + 1
        cap = workload.max_cached_tokens
        if cap is not None and self.sizes.max() > cap:
            raise ValueError(f"A text of {self.sizes.max()} tokens is larger than `max_cached_tokens` {cap}.")
        self.own = torch.from_numpy(np.ascontiguousarray(trace.own))
        self.survival = torch.from_numpy(np.ascontiguousarray(trace.survival))
        self.prompt_seconds = curve.seconds_of(trace.prompt_lengths)  # [T]
        self.now = self.busy = 0.0
        self.next = self.cached = 0
        self.request = np.zeros(0, np.int64)
        self.place = np.zeros(0, np.int64)
        self.end = np.zeros(0, np.int64)
        self.started = np.zeros(count)
        self.speeds = np.zeros(count)
        self.counts = dict.fromkeys(("rounds", "row_rounds", "drafted", "verified", "accepted"), 0)

    @property
    def num_rows(self) -> int:
        return len(self.request)

    def waits_or_runs(self) -> bool:
        return self.num_rows > 0 or self.next < len(self.texts)

    def admit(self) -> None:
        """Let in who has arrived and fits; an idle server sleeps until the next arrival."""
        if not self.num_rows:
            self.now = max(self.now, self.arrivals[self.next])
        first, cap = self.next, self.workload.max_cached_tokens
        last = min(first + self.workload.max_rows - self.num_rows, len(self.texts))
        while self.next < last and self.arrivals[self.next] <= self.now:
            size = int(self.sizes[self.next])
            if cap is not None and self.cached + size > cap:
                break
            self.cached += size
            self.next += 1
        if self.next == first:
            return
        self.started[first : self.next] = self.now
        texts = self.texts[first : self.next]
        self.request = np.concatenate([self.request, np.arange(first, self.next)])
        self.place = np.concatenate([self.place, self.trace.starts[texts]])
        self.end = np.concatenate([self.end, self.trace.starts[texts + 1]])
        for seconds in self.prompt_seconds[texts].tolist():  # one pass per prompt
            self._spend(seconds)

    def _spend(self, seconds: float) -> None:
        self.now += seconds
        self.busy += seconds

    def round(self, policy: VerifyPolicy) -> None:
        """One round of all rows."""
        rows, most = self.num_rows, self.trace.num_drafts
        limits = np.minimum(most, self.end - self.place - 1)
        slots = policy.slots(rows, most) if limits.max(initial=0) > 0 else 0
        lengths, survival = np.zeros(rows, np.int64), None
        if slots:
            place = torch.from_numpy(self.place)
            own, survival = (scores.index_select(0, place)[:, :slots] for scores in (self.own, self.survival))
            wanted = policy.lengths(own, survival, np.minimum(limits, slots).tolist())
            lengths = np.asarray(wanted, np.int64)
        accepted = np.minimum(self.trace.accepted[self.place], lengths)
        verified = int(lengths.sum())
        tokens = rows + verified
        draft_seconds = self.curve.draft_seconds(rows, slots) if slots else 0.0
        verify_seconds = float(self.curve.seconds(tokens, rows=rows))
        self._spend(draft_seconds + verify_seconds)
        policy.observe(
            RoundObservation(
                rows=rows,
                slots=slots,
                tokens=tokens,
                draft_seconds=draft_seconds,
                verify_seconds=verify_seconds,
                verified=lengths.tolist(),
                accepted=accepted.tolist(),
                survival=survival,
            )
        )
        amounts = (1, rows, rows * slots, verified, int(accepted.sum()))
        for name, amount in zip(self.counts, amounts, strict=True):
            self.counts[name] += amount
        self.place = self.place + accepted + 1
        self._leave(self.place >= self.end)

    def _leave(self, finished: np.ndarray) -> None:
        if not finished.any():
            return
        done = self.request[finished]
        self.speeds[done] = self.lengths[done] / np.maximum(self.now - self.started[done], 1e-12)
        self.cached -= int(self.sizes[done].sum())
        live = ~finished
        self.request, self.place, self.end = self.request[live], self.place[live], self.end[live]

    def result(self) -> SimulationResult:
        tokens = int((self.lengths + 1).sum())
        return SimulationResult(
            tokens=tokens,
            seconds=self.now,
            busy_seconds=self.busy,
            prompt_seconds=float(self.prompt_seconds[self.texts].sum()),
            user_speeds=self.speeds,
            waits=self.started - self.arrivals,
            **self.counts,
        )


__all__ = ["SimulationResult", "Workload", "simulate"]
