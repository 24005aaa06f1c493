"""Step 1: what the target has seen becomes what the drafter attends to.

Context rows come from tokens the target has forwarded: the anchor and the accepted drafts, never the bonus token,
whose hidden state does not exist yet. Only new rows are projected; earlier ones are in the context cache.
"""

from __future__ import annotations

import torch

from ..context_cache import ContextCache
from .state import DecodingRun, PendingStates


def extend_context(run: DecodingRun) -> None:
    """Move pending hidden states into the drafter's context cache."""
    pending, run.pending = run.pending, []
    for states, counts in _merged(pending):
        assert run.context is not None
        with run.stats.forward("drafter"):
            features = run.drafter.project_context(states)
            run.drafter.extend_context(run.context, features, counts)


def _merged(pending: list[PendingStates]) -> list[PendingStates]:
    """The same states in fewer entries: rounds without drafts, of which every row keeps all, are taken at once."""
    runs: list[list[PendingStates]] = []
    for entry in pending:
        if runs and _is_whole(runs[-1][-1]) and _is_whole(entry):
            runs[-1].append(entry)
        else:
            runs.append([entry])
    return [some[0] if len(some) == 1 else _joined(some) for some in runs]


def _joined(entries: list[PendingStates]) -> PendingStates:
    counts = [sum(row) for row in zip(*(entry.counts for entry in entries), strict=True)]
    return PendingStates(torch.cat([entry.states for entry in entries], dim=1), counts)


def _is_whole(entry: PendingStates) -> bool:
    return min(entry.counts) == entry.states.shape[1]


def start_context(run: DecodingRun, chunks: list[torch.Tensor], mask: torch.Tensor | None, *, offset: int) -> None:
    """Open the context cache with the prompt's features.

    Args:
        run: The call.
        chunks: Context features of the prompt, `[B, S_i, D]`, in order.
        mask: `[B, S]` of any dtype, 0 on left padding, or None. Padding never enters the context.
        offset: Position of the first feature (more than 0 when earlier states are not to be had).
    """
    features = torch.cat(chunks, dim=1) if len(chunks) > 1 else chunks[0]
    batch, width = features.shape[:2]
    run.context = ContextCache(len(run.drafter.layers), [offset] * batch)
    if mask is None or bool(mask.all()):
        run.drafter.extend_context(run.context, features)
        return
    counts = (mask[:, -width:] != 0).sum(-1).tolist()
    # Left-padded rows are shifted so that each starts at slot 0.
    shift = torch.tensor([width - count for count in counts], device=features.device)
    index = (torch.arange(width, device=features.device) + shift[:, None]).clamp(max=width - 1)
    aligned = features.gather(1, index[..., None].expand(-1, -1, features.shape[-1]))
    run.drafter.extend_context(run.context, aligned, counts)


__all__ = ["extend_context", "start_context"]
