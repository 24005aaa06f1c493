"""Several rows on one target: what `TargetSession` hands a batch to after the prompt's pass (steps 6 and 7).

Rows accept different numbers of drafts, so each has its own length in a `RaggedCache` and there are no holes. A pass
is flattened where that saves enough tokens, else padded; targets whose attention cannot be reached get aligned passes,
which to them are an ordinary left-padded batch and cost one more copy of the keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.utils import logging

from ..compat import cache_length, cache_name
from ..stats import SpeculationStats
from ..target import text_config
from .inputs import prepare_inputs, select_rows
from .ragged_attention import BypassedError, RaggedAttention, attending, attends_by_interface
from .ragged_cache import RaggedCache
from .ragged_pass import Form, RaggedPass, saves_by_flattening
from .record import attention_widths

logger = logging.get_logger(__name__)


class RaggedBatch:
    """Rows of one call, from the end of the prompt's pass on.

    Args:
        target: The model.
        kwargs: What `generate` prepared for the forward, without the cache; its per-row tensors are selected here.
        cache: Stock cache filled by the prompt's pass; it is emptied.
        base: Position of each row's last prompt token, `[..., R, 1]`; None for a target that is given none.
        stats: Where a fallback is noted.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        kwargs: dict[str, Any],
        cache: Cache,
        base: torch.Tensor | None,
        stats: SpeculationStats,
    ) -> None:
        self.target = target
        self.kwargs = kwargs
        self.stats = stats
        width = cache_length(cache) or 0
        starts, self._is_visible = _padding(kwargs.get("attention_mask"), cache.layers[0].keys.shape[0])
        num_layers = text_config(target).num_hidden_layers
        self._windows = attention_widths(text_config(target), cache, num_layers)
        windows = self._windows[: len(cache.layers)]  # layers that share another's keys may have no cache layer
        is_told = all(
            window == (layer.sliding_window if layer.is_sliding else None)
            for window, layer in zip(windows, cache.layers, strict=True)
            if layer.keys is not None
        )
        self.cache = RaggedCache(cache, starts, num_columns=width, windows=windows)
        # Position of each row's slot 0, so that positions are slots plus this.
        self._origins = None if base is None else base + 1 - base.new_tensor(self.cache.lengths)[:, None]
        self._is_aligned = base is None or not is_told or not attends_by_interface(target)

    @property
    def next_position(self) -> int:
        """Position of the furthest row's anchor."""
        lengths = torch.tensor(self.cache.lengths)
        return int((lengths if self._origins is None else self._origins[..., 0].cpu() + lengths).max())

    def verify(
        self, blocks: list[list[int]], run: Callable[[dict[str, Any]], tuple[Any, torch.Tensor]]
    ) -> tuple[Any, torch.Tensor, torch.Tensor]:
        """One pass over each row's anchor and drafts.

        Args:
            blocks: Anchor and drafts per row.
            run: Calls the target with the inputs it is given; returns its output and the captured hidden states.

        Returns:
            The target's output as it is, logits `[R, q, V]` and hidden states `[R, q, m*D_t]`; q the longest block.
        """
        if not self._is_aligned:
            counts = [len(block) for block in blocks]
            try:
                return self._pass(blocks, "flattened" if saves_by_flattening(counts) else "padded", run)
            except BypassedError as error:  # nothing is lost: the pass's slots are written again
                self._is_aligned = True
                self.stats.fall_back(f"{error}, so the batch's keys are copied into a padded layout in every pass")
                logger.warning_once(f"dspark: {self.stats.fallback_reason}. Output is unchanged.")
        return self._pass(blocks, "aligned", run)

    def _pass(
        self, blocks: list[list[int]], form: Form, run: Callable[[dict[str, Any]], tuple[Any, torch.Tensor]]
    ) -> tuple[Any, torch.Tensor, torch.Tensor]:
        counts = [len(block) for block in blocks]
        plan = RaggedPass(self.cache.lengths, counts, form, is_visible=self._is_visible)
        self.cache.current = plan
        if form == "aligned":
            outputs, states = run(self._inputs(plan, blocks, plan.padding_mask(self.target.device)))
        else:
            attention = RaggedAttention(self.target, plan, self._windows)
            with attending(attention):
                outputs, states = run(self._inputs(plan, blocks, attention.handed_mask))
            attention.check()
        return outputs, plan.by_row(outputs.logits), plan.by_row(states)

    def _inputs(self, plan: RaggedPass, blocks: list[list[int]], mask: torch.Tensor) -> dict[str, Any]:
        ids = plan.tokens(blocks, self.target.device)
        kwargs = {**self.kwargs, cache_name(self.target): self.cache, "attention_mask": mask}
        if self._origins is not None:
            slots = plan.slots(self._origins.device)
            kwargs["position_ids"] = plan.per_token(self._origins) + slots.to(self._origins.dtype)
        width = ids.shape[1]
        return prepare_inputs(self.target, ids, kwargs, plan.per_token, new=width, keep=width)

    def keep(self, counts: list[int]) -> None:
        """After a pass row r keeps the first `counts[r]` tokens of its block."""
        self.cache.keep(counts)

    def select(self, rows: list[int]) -> None:
        """Keep only these rows."""
        self.cache.select(rows)
        self._is_visible = None if self._is_visible is None else self._is_visible[rows]
        self._origins = None if self._origins is None else self._origins[..., rows, :]
        select_rows(self.kwargs, rows)

    def join(self, other: RaggedBatch) -> None:
        """Take the rows of another batch on the same target behind these; neither may have padding or token types."""
        self.cache.join(other.cache)
        self._is_aligned |= other._is_aligned
        if self._origins is not None and other._origins is not None:
            self._origins = torch.cat([self._origins, other._origins], dim=-2)


def _padding(mask: torch.Tensor | None, rows: int) -> tuple[list[int], torch.Tensor | None]:
    """Left padding per row, and which slots of the prompt count, bool `[R, P]` by slot; None when all do."""
    if mask is None:
        return [0] * rows, None
    is_real = mask != 0
    starts = (is_real.cumsum(-1) == 0).sum(-1)
    if bool((starts + is_real.sum(-1) == mask.shape[-1]).all()):
        return starts.tolist(), None
    columns = torch.arange(mask.shape[-1], device=mask.device) + starts[:, None]
    inside = columns < mask.shape[-1]  # later slots belong to the text
    return starts.tolist(), is_real.gather(1, columns.clamp(max=mask.shape[-1] - 1)) | ~inside


__all__ = ["RaggedBatch"]
