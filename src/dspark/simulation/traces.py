"""`AcceptanceTrace`: what a drafter's block would bring at every place of some texts, so that rounds can be replayed.

Under greedy decoding a draft is accepted exactly while it agrees with the text the target writes anyway. So the
outcome of a round is a function of the place it starts from: with `accepted[n]` of all `K` drafts right there, a
policy that verifies `l` of them accepts `min(l, accepted[n])` and goes on behind these and the target's own token.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

_FORMAT = "dspark acceptance trace 1"
_ARRAYS = ("starts", "prompt_lengths", "own", "survival", "accepted")


@dataclass(frozen=True)
class AcceptanceTrace:
    """Rounds from every place of `T` texts of one domain, places in the order of the text.

    Attributes:
        domain: Name of the prompt set.
        starts: int64 `[T + 1]`, text t has the places `starts[t]:starts[t + 1]`, the first at its first new token.
            A text of n places has n + 1 new tokens.
        prompt_lengths: int64 `[T]`, tokens.
        own: float32 `[N, K]`, uncalibrated confidence of each draft.
        survival: float32 `[N, K]`, running product of calibrated confidences.
        accepted: int64 `[N]`, drafts accepted if all are verified, 0..K.

    Raises:
        ValueError: The arrays do not fit each other.
    """

    domain: str
    starts: np.ndarray
    prompt_lengths: np.ndarray
    own: np.ndarray
    survival: np.ndarray
    accepted: np.ndarray

    def __post_init__(self) -> None:
        places = len(self.accepted)
        is_whole = (
            len(self.starts) == len(self.prompt_lengths) + 1
            and len(self.starts) > 1
            and self.starts[0] == 0
            and self.starts[-1] == places
            and bool((np.diff(self.starts) > 0).all())
            and self.own.shape == self.survival.shape
            and self.own.shape[:1] == (places,)
        )
        if not is_whole:
            shapes = {name: getattr(self, name).shape for name in _ARRAYS}
            raise ValueError(f"The trace of {self.domain!r} does not fit together: {shapes}. Record it again.")
        if not 0 <= self.accepted.min() <= self.accepted.max() <= self.num_drafts:
            raise ValueError(f"`accepted` must lie in 0..{self.num_drafts} in the trace of {self.domain!r}.")

    @property
    def num_texts(self) -> int:
        """T."""
        return len(self.prompt_lengths)

    @property
    def num_drafts(self) -> int:
        """K, drafts of a block."""
        return self.own.shape[1]

    def accepted_length(self, most: int | None = None) -> float:
        """tau of the rounds that decode these texts when `most` drafts (None: all) are verified in each."""
        rounds = tokens = 0
        for start, end in zip(self.starts[:-1], self.starts[1:], strict=True):
            place = start
            while place < end:
                cap = self.num_drafts if most is None else most
                step = min(int(self.accepted[place]), cap, end - place - 1) + 1
                tokens += step
                rounds += 1
                place += step
        return tokens / rounds


def join_traces(traces: Sequence[AcceptanceTrace]) -> AcceptanceTrace:
    """One trace of all texts, for a mixed load.

    Raises:
        ValueError: Blocks of different width.
    """
    widths = {trace.num_drafts for trace in traces}
    if len(widths) != 1:
        raise ValueError(f"Traces to join must have blocks of one width, got {sorted(widths)}.")
    starts = [np.zeros(1, np.int64)]
    for trace in traces:
        starts.append(trace.starts[1:] + starts[-1][-1])
    parts = {name: np.concatenate([getattr(trace, name) for trace in traces]) for name in _ARRAYS[1:]}
    return AcceptanceTrace(" + ".join(trace.domain for trace in traces), np.concatenate(starts), **parts)


def save_traces(traces: Sequence[AcceptanceTrace], path: str | Path) -> None:
    """Write traces to one safetensors file, whole or not at all."""
    path = Path(path)
    tensors = {f"{trace.domain}/{name}": getattr(trace, name) for trace in traces for name in _ARRAYS}
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    save_file(tensors, unfinished, metadata={"format": _FORMAT})
    os.replace(unfinished, path)


def load_traces(path: str | Path) -> list[AcceptanceTrace]:
    """Traces of a file, sorted by domain.

    Raises:
        ValueError: Not such a file.
    """
    try:
        with safe_open(str(path), framework="numpy") as handle:
            tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 - no mapping
            found = (handle.metadata() or {}).get("format")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is no trace file ({error}). Record one with `dspark bench record`.") from error
    if found != _FORMAT:
        raise ValueError(f"{path} has format {found!r}, expected {_FORMAT!r}. Record it with `dspark bench record`.")
    domains = sorted({name.rpartition("/")[0] for name in tensors})
    missing = [f"{domain}/{name}" for domain in domains for name in _ARRAYS if f"{domain}/{name}" not in tensors]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}. Record it again.")
    return [AcceptanceTrace(domain, *(tensors[f"{domain}/{name}"] for name in _ARRAYS)) for domain in domains]


__all__ = ["AcceptanceTrace", "join_traces", "load_traces", "save_traces"]
