"""From the loop's records and a tokenizer to a `Trace`, which stands alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers

from ..stats import SpeculationStats
from ..version import __version__
from .file import Setting, Trace, ids_of
from .tokens import token_texts


def build_trace(
    stats: SpeculationStats,
    tokenizer: Any,
    prompt_ids: Sequence[int],
    *,
    target: str,
    drafter: str,
    settings: dict[str, Setting] | None = None,
    row: int = 0,
) -> Trace:
    """A trace of one row.

    Args:
        stats: Of a call with `SpeculationConfig(record_trace=True)`.
        tokenizer: The target's.
        prompt_ids: The row's prompt, without padding.
        target: Public name of the target.
        drafter: Likewise of the drafter.
        settings: What the call was made with, as it is to be shown.
        row: Which row of the call.

    Raises:
        ValueError: The call recorded no such row.
    """
    if row not in range(len(stats.traces)):
        raise ValueError(
            f"Row {row} was not recorded: the statistics hold the traces of {len(stats.traces)} rows. Generate with "
            "`record_trace=True`."
        )
    trace = stats.traces[row]
    prompt = [int(token) for token in prompt_ids]
    return Trace(
        target=target,
        drafter=drafter,
        settings=dict(settings or {}),
        prompt_ids=prompt,
        texts=token_texts(tokenizer, [*prompt, *ids_of(trace)]),
        text=tokenizer.decode(trace.token_ids(), skip_special_tokens=False),
        prefill_seconds=stats.prefill_seconds,
        row=trace,
        made_by={"dspark": __version__, "torch": str(torch.__version__), "transformers": transformers.__version__},
    )


__all__ = ["build_trace"]
