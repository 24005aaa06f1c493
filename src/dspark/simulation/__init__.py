"""Serving by simulation: recorded acceptance, a measured step curve, arrivals, and the policies of `scheduling`.

| file | what |
|---|---|
| `traces.py` | what a drafter's block brings at every place of a text |
| `simulator.py` | a server in simulated time |
| `frontier.py` | throughput against user speed, per policy and load (paper Fig. 7) |
"""

from .frontier import (
    FrontierPoint,
    NoDraft,
    SingleDraft,
    dominated,
    frontier,
    simulated_policies,
    throughput_at,
)
from .simulator import SimulationResult, Workload, simulate
from .traces import AcceptanceTrace, join_traces, load_traces, save_traces

__all__ = [
    "AcceptanceTrace",
    "FrontierPoint",
    "NoDraft",
    "SimulationResult",
    "SingleDraft",
    "Workload",
    "dominated",
    "frontier",
    "join_traces",
    "load_traces",
    "save_traces",
    "simulate",
    "simulated_policies",
    "throughput_at",
]
