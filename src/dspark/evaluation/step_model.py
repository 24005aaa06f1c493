"""Whether simulated seconds are real ones: batches of prompts, decoded and simulated on the very same texts.

The simulation knows the step curve and the acceptance of these prompts; what it misses is in the ratio (a longer
cache, bookkeeping of the loop, a curve of another day). Prompts' passes are left out on both sides.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ..modeling_dspark import DSparkDrafter
from ..scheduling import ThroughputCurve, make_policy
from ..simulation import AcceptanceTrace, Workload, simulate
from ..speculation import Policy, SpeculationConfig
from .batches import BatchCell, measure_batches
from .profile import profile_pair
from .record_trace import record_trace
from .replay import write_text

_POLICY: Policy = "fixed"  # decides nothing by times, so that rounds are the same in both


@dataclass(frozen=True)
class StepCheck:
    """One batch size.

    Attributes:
        batch_size: Rows.
        predicted, measured: Seconds of decoding, prompts' passes left out.
        predicted_rounds, measured_rounds: Row-rounds; where they differ, the texts did.
    """

    batch_size: int
    predicted: float
    measured: float
    predicted_rounds: int
    measured_rounds: int

    @property
    def ratio(self) -> float:
        """Predicted over measured seconds."""
        return self.predicted / self.measured


def check_step_model(  # noqa: PLR0913 - what is measured, and how
    target: PreTrainedModel,
    drafter: DSparkDrafter,
    prompts: Sequence[torch.Tensor],
    curve: ThroughputCurve | None,
    batch_sizes: Sequence[int],
    *,
    max_new_tokens: int,
    repeats: int = 3,
    progress: Callable[[BatchCell], None] | None = None,
) -> list[StepCheck]:
    """Decode batches greedily with every draft verified, and predict their seconds.

    Args:
        target: In the state to be measured (packed or not).
        drafter: Fits it; with a confidence head.
        prompts: int64 `[1, P]` each; a batch takes the first ones.
        curve: Profiled or learnt on this pair. None: profiled here, before and after each batch size, so that
            both sides see the same machine, however its speed wanders.
        batch_sizes: Rows, each at most the number of prompts.
        max_new_tokens: Per row, at least 2.
        repeats: Timed runs of each batch size.
        progress: Called after every run.

    Raises:
        ValueError: A batch larger than the number of prompts, no confidence head, or a prompt that is answered by a
            single token, which takes no round.
    """
    if max(batch_sizes) > len(prompts):
        raise ValueError(f"A batch of {max(batch_sizes)} rows needs as many prompts, got {len(prompts)}.")
    found = []
    for size in batch_sizes:
        some = prompts[:size]
        known = ThroughputCurve() if curve is None else curve
        if curve is None:
            _profile(known, target, drafter, some, max_new_tokens)
        cells = measure_batches(
            target, drafter, some, {_POLICY: SpeculationConfig(_POLICY)}, [size],
            max_new_tokens=max_new_tokens, repeats=repeats, progress=progress,
        )  # fmt: skip
        if curve is None:
            _profile(known, target, drafter, some, max_new_tokens)
        found += [(cell, known) for cell in cells if cell.way == _POLICY]
    layers = drafter.config.target_layer_ids or ()
    texts = [write_text(target, ids, layers, max_new_tokens=max_new_tokens) for ids in prompts[: max(batch_sizes)]]
    trace = record_trace("prompts", drafter, target, texts)
    if trace.num_texts < len(texts):
        raise ValueError("A prompt is answered by a single token, which takes no round: leave it out.")
    return [_check(cell, trace, known, repeats) for cell, known in found]


def _profile(
    curve: ThroughputCurve, target: PreTrainedModel, drafter: DSparkDrafter, prompts: Sequence[torch.Tensor], new: int
) -> None:
    """Add times of all numbers of rows a batch of these prompts shrinks through, midway through its texts."""
    size = len(prompts)
    context = max(ids.shape[1] for ids in prompts) + new // 2  # a pass reads all rows as far as the longest
    rows = sorted({size, *(count for count in (1, 2, 4, 8, 16, 32, 64) if count < size)})
    profile_pair(target, drafter, rows=rows, contexts=[context], curve=curve)


def _check(cell: BatchCell, trace: AcceptanceTrace, curve: ThroughputCurve, repeats: int) -> StepCheck:
    work = Workload(cell.batch_size, max_rows=cell.batch_size, in_order=True)
    result = simulate(make_policy(_POLICY), trace, curve, work)
    assert cell.stats is not None
    return StepCheck(
        cell.batch_size,
        result.busy_seconds - result.prompt_seconds,
        statistics.median(cell.seconds) - cell.stats.prefill_seconds / repeats,
        result.row_rounds,
        cell.stats.num_rounds // repeats,
    )


__all__ = ["StepCheck", "check_step_model"]
