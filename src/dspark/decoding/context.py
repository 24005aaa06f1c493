"""Step 1: what the target has seen becomes what the drafter attends to.

Context rows come from tokens the target has forwarded: the anchor and the accepted drafts, never the bonus token,
whose hidden state does not exist yet. Only new rows are projected; earlier ones are in the context cache.
"""

from __future__ import annotations

import torch

from ..context_cache import ContextCache
from .state import DecodingRun, PendingStates

_SLICE = 1024  # columns of a prompt that are projected at once: what is not kept must not grow with the prompt


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


class PromptContext:
    """Takes a prompt's hidden states as its passes hand them over, and keeps only the keys and values made of them.

    Of a row longer than the context window only the last rows are projected.

    Args:
        run: The call; its context is opened, empty.
        num_columns: Columns that are to come, n.
        mask: `[B, >= n]` of any dtype, its last columns those to come, 0 on padding, which never enters the context.
            None: there is none.
        offset: Position of the first column (more than 0 when earlier states are not to be had).
    """

    def __init__(self, run: DecodingRun, num_columns: int, mask: torch.Tensor | None, *, offset: int) -> None:
        self._run = run
        self._column = 0  # of the next state
        self._wanted: torch.Tensor | None = None  # bool [B, n]; None: all behind the first
        window = run.settings.context_window
        dropped = [0 if window is None else max(num_columns - window, 0)] * len(run.rows)
        self._first = dropped[0]
        if mask is not None and not bool(mask.all()):
            self._wanted = mask[:, -num_columns:] != 0
            if window is not None:
                order = self._wanted.cumsum(-1)
                dropped = (order[:, -1] - window).clamp(min=0).tolist()
                self._wanted &= order > torch.tensor(dropped, device=order.device)[:, None]
            self._first = int(self._wanted.any(0).int().argmax())
        run.context = ContextCache(
            len(run.drafter.layers),
            [offset + count for count in dropped],
            window=window,
            expected=num_columns - self._first,
        )

    def skips(self, count: int) -> bool:
        """Whether the next `count` columns' states are not needed."""
        return self._column + count <= self._first or count == 0

    def skip(self, count: int) -> None:
        """Go on behind the next `count` columns."""
        self._column += count

    def take(self, states: torch.Tensor) -> None:
        """The next columns' hidden states `[B, S, m*D_t]`."""
        end = self._column + states.shape[1]
        for start in range(max(self._first, self._column), end, _SLICE):
            stop = min(start + _SLICE, end)
            wanted = None if self._wanted is None else self._wanted[:, start:stop]
            self._append(states[:, start - self._column : stop - self._column], wanted)
        self._column = end

    def _append(self, states: torch.Tensor, wanted: torch.Tensor | None) -> None:
        run = self._run
        assert run.context is not None
        features = run.drafter.project_context(states)
        if wanted is None or bool(wanted.all()):
            run.drafter.extend_context(run.context, features)
            return
        # A row's own columns come first, in their order.
        index = (~wanted).int().argsort(dim=-1, stable=True).to(features.device)
        features = features.gather(1, index[..., None].expand(-1, -1, features.shape[-1]))
        run.drafter.extend_context(run.context, features, wanted.sum(-1).tolist())


__all__ = ["PromptContext", "extend_context"]
