"""Plain against speculative decoding, side by side in one run: same model, same prompts, interleaved.

A speed-up is a ratio of two times taken next to each other. The ids are compared first: a figure from a run whose
outputs differ says nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from ..modeling_dspark import DSparkDrafter
from ..stats import SpeculationStats

Result = TypeVar("Result")


@dataclass
class Comparison:
    """What one prompt gave.

    Attributes:
        name: Prompt set.
        num_new_tokens: Tokens generated (prompt excluded).
        is_equal: Whether speculative ids equal the plain ones.
        divergence: Index of the first differing new token, or None.
        plain_seconds, speculative_seconds: Wall time of the whole `generate` call.
        stats: Statistics of the speculative call.
    """

    name: str
    num_new_tokens: int
    is_equal: bool
    divergence: int | None
    plain_seconds: float
    speculative_seconds: float
    stats: SpeculationStats

    @property
    def speedup(self) -> float:
        """Plain over speculative wall time."""
        return self.plain_seconds / self.speculative_seconds


@dataclass
class Summary:
    """Comparisons of one prompt set.

    Attributes:
        name: Prompt set.
        rows: Its comparisons.
    """

    name: str
    rows: list[Comparison] = field(default_factory=list)

    @property
    def stats(self) -> SpeculationStats:
        """Merged statistics."""
        merged = SpeculationStats()
        for row in self.rows:
            merged = merged.merge(row.stats)
        return merged

    @property
    def speedup(self) -> float:
        """Total plain over total speculative time: the set as one job."""
        return sum(r.plain_seconds for r in self.rows) / sum(r.speculative_seconds for r in self.rows)

    @property
    def num_equal(self) -> int:
        """Prompts whose ids are equal."""
        return sum(row.is_equal for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able figures of the set."""
        stats = self.stats
        return {
            "name": self.name,
            "prompts": len(self.rows),
            "equal": self.num_equal,
            "speedup": self.speedup,
            "plain_seconds": sum(r.plain_seconds for r in self.rows),
            "speculative_seconds": sum(r.speculative_seconds for r in self.rows),
            **{k: v for k, v in stats.to_dict().items() if not k.startswith("per_step")},
        }


def timed(call: Callable[[], Result]) -> tuple[Result, float]:
    """Result and wall seconds of a call; waits for an accelerator before and after."""
    finish_queue()
    start = time.perf_counter()
    result = call()
    finish_queue()
    return result, time.perf_counter() - start


def finish_queue() -> None:
    """Wait for an accelerator, where there is one."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def first_difference(a: list[int], b: list[int]) -> int | None:
    """Index of the first place where two lists differ (one may be the other's beginning); None for equal ones."""
    if a == b:
        return None
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def plain_seconds(target: PreTrainedModel, prompts: Iterable[torch.Tensor], **generate: Any) -> list[float]:
    """Wall seconds of plain `generate` for each prompt `[1, P]`."""
    return [timed(lambda ids=ids: target.generate(ids, **generate))[1] for ids in prompts]  # type: ignore[misc]


def compare(
    target: PreTrainedModel,
    drafter: DSparkDrafter,
    name: str,
    input_ids: torch.Tensor,
    *,
    threshold: float = 0.0,
    streamer: Any = None,
    **generate: Any,
) -> Comparison:
    """One prompt, plain first, then with the drafter.

    Args:
        target: The model, in the state both runs use.
        drafter: Its drafter.
        name: Prompt set the prompt is from.
        input_ids: int64 `[1, P]`.
        threshold: `assistant_confidence_threshold` of the drafter's run.
        streamer: Streams the drafter's run.
        **generate: Arguments of both `generate` calls; greedy unless they say otherwise.
    """
    plain, plain_time = timed(lambda: target.generate(input_ids, **generate))
    output, speculative_time = timed(
        lambda: target.generate(
            input_ids,
            assistant_model=drafter,
            assistant_confidence_threshold=threshold,
            streamer=streamer,
            return_dict_in_generate=True,
            **generate,
        )
    )
    prompt = input_ids.shape[1]
    ours, theirs = (ids[0, prompt:].tolist() for ids in (output.sequences, plain))
    divergence = first_difference(ours, theirs)
    return Comparison(
        name, len(ours), divergence is None, divergence, plain_time, speculative_time, output.speculation
    )


def summarise(rows: Iterable[Comparison]) -> list[Summary]:
    """One summary per prompt set, in order of first appearance."""
    summaries: dict[str, Summary] = {}
    for row in rows:
        summaries.setdefault(row.name, Summary(row.name)).rows.append(row)
    return list(summaries.values())


__all__ = [
    "Comparison", "Summary", "compare", "finish_queue", "first_difference", "plain_seconds", "summarise", "timed",
]  # fmt: skip
