"""The target during one call: its forward passes, positions, masks and cache (the target's side of step 6).

A single row keeps the stock cache, which `CacheRollback` cuts back after each pass. Rows of a batch accept different
numbers of drafts and go on in a `RaggedBatch` once the prompt's pass has filled the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from ..compat import cache_length, cache_name, pop_cache
from ..stats import SpeculationStats
from ..target import skips_hidden_states, text_config
from .capture import HiddenStateCapture
from .grouped_attention import GroupedAttention
from .inputs import prepare_inputs
from .ragged_attention import attending, attends_by_interface
from .ragged_batch import RaggedBatch
from .record import attention_widths
from .target_cache import CacheRollback, check_cache


class TargetSession:
    """One target, one cache, one call.

    Args:
        target: The model.
        model_kwargs: What `generate` prepared for the forward.
        capture: Taps on the target, already installed.
        stats: Where forward time goes.
        joins: A single row is to be joined by others, so it goes on in a batch too.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        model_kwargs: dict[str, Any],
        capture: HiddenStateCapture,
        stats: SpeculationStats,
        *,
        joins: bool = False,
    ) -> None:
        self.target = target
        self._joins = joins
        self.kwargs = dict(model_kwargs)
        self.capture = capture
        self.stats = stats
        self._cache_key = cache_name(target)
        self._rollback: CacheRollback | None = None
        self._batch: RaggedBatch | None = None  # of several rows, from the prompt's pass on
        self._mask: torch.Tensor | None = None  # [1, W] of a single row behind padding, else None
        self._base: torch.Tensor | None = None  # position of its last prompt token, [..., 1, 1]
        self._cached = 0  # slots in the cache, W
        self._ahead = 1  # position of its anchor, counted from its last prompt token
        self._is_grouped = False  # whether its attention can be laid out by key heads
        self._keeps_mask = False  # whether the forward was given a mask, though nothing is masked
        self._pass_tokens: list[int] = []
        self._pass_width = 0

    # --- prompt ---------------------------------------------------------------------------------------------------

    def cached_before(self) -> int | None:
        """Tokens a user's cache already holds; None for a recurrent state, which does not count them."""
        _, cache = pop_cache(self.kwargs)
        length = 0 if cache is None else cache_length(cache)
        is_empty = length is None and not any(_any(layer.has_previous_state) for layer in cache.layers)
        return 0 if is_empty else length

    def has_whole_prompt(self, input_ids: torch.Tensor, generation_config: GenerationConfig) -> bool:
        """Whether `input_ids` also has the tokens of a user's half-filled cache, by the rule of `_prefill`."""
        mask = self.kwargs.get("attention_mask")
        length = getattr(generation_config, "_mask_length", None) if mask is None else mask.shape[-1]
        return length == input_ids.shape[1]

    def check(self, *, max_length: int, batch_size: int, is_callers: bool) -> None:
        """Refuse caches that cannot be rolled back, see `check_cache`; `is_callers`: the caller passed it."""
        _, cache = pop_cache(self.kwargs)
        check_cache(self.target, cache, max_length=max_length, batch_size=batch_size, is_callers=is_callers)

    def prefill(
        self,
        input_ids: torch.Tensor,
        generation_config: GenerationConfig,
        sink: Callable[[torch.Tensor], None],
    ) -> Any:
        """The prompt's pass; hands hidden states `[B, S, m*D_t]` of each chunk to `sink` and returns the output.

        Args:
            input_ids: int64 `[B, P]` (P may be 0 with `inputs_embeds`).
            generation_config: For `prefill_chunk_size` and the slice behind a half-filled cache.
            sink: Called once per forward pass.
        """
        mask, positions = self.kwargs.get("attention_mask"), self.kwargs.get("position_ids")
        # `_prefill` pops what it splits into chunks, and the passes after it build on these.
        kwargs = self._with_all_states(self.kwargs)
        outputs = self.capture.run(lambda: self.target._prefill(input_ids, generation_config, kwargs), sink)
        name, cache = pop_cache(dict(outputs.items()))
        if name is None:
            name, cache = pop_cache(self.kwargs)
        self.kwargs.pop(name or "", None)
        self.kwargs.pop("inputs_embeds", None)
        # Without a mask all rows may share one row of positions.
        base = None if positions is None else positions[..., -1:] + positions.new_zeros(input_ids.shape[0], 1)
        if input_ids.shape[0] > 1 or self._joins:
            self._batch = RaggedBatch(self.target, self.kwargs, cache, base, self.stats)
        else:
            self._start_single(cache, mask, base)
        self.stats.num_target_passes += 1
        return outputs

    def _start_single(self, cache: Any, mask: torch.Tensor | None, base: torch.Tensor | None) -> None:
        self.kwargs[self._cache_key] = cache
        self._rollback = CacheRollback(cache)
        # Counted in integers: a mask may come as bool, float, or with other values than 1.
        self._mask = (mask != 0).long() if mask is not None and not bool(mask.all()) else None
        self._keeps_mask = mask is not None
        self._is_grouped = attends_by_interface(self.target)
        self._cached = cache_length(cache) or 0  # all recurrent: no slots
        self._base = base

    def forward_plain(self, width: int, input_ids: torch.Tensor, sink: Callable[[torch.Tensor], None]) -> None:
        """A pass over the first `width` tokens of the prompt without any cache, only for its hidden states."""
        kwargs: dict[str, Any] = {"use_cache": False}
        if (embeds := self.kwargs.get("inputs_embeds")) is not None:
            kwargs["inputs_embeds"] = embeds[:, :width]
        else:
            kwargs["input_ids"] = input_ids[:, :width]
        for name in ("attention_mask", "position_ids"):
            if self.kwargs.get(name) is not None:
                kwargs[name] = self.kwargs[name][..., :width]
        if "logits_to_keep" in self.kwargs:
            kwargs["logits_to_keep"] = 1
        kwargs = self._with_all_states(kwargs)
        self.capture.run(lambda: self.target(**kwargs, return_dict=True), sink)
        self.stats.num_target_passes += 1

    def _with_all_states(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """A copy of `kwargs` whose pass computes all positions in every layer, however few logits are kept."""
        kwargs = dict(kwargs)
        if "logits_to_keep" in kwargs and skips_hidden_states(self.target):
            # Only a number of logits lets such a target skip positions, indices do not.
            kwargs["logits_to_keep"] = torch.tensor([-1], device=self.target.device)
        return kwargs

    # --- rounds ---------------------------------------------------------------------------------------------------

    @property
    def wants_plain_pass(self) -> bool:
        """Whether a recurrent target needs a pass without drafts to catch up."""
        return self._rollback is not None and self._rollback.wants_plain_pass

    def position_room(self) -> int | None:
        """Drafts that fit before the last learned position; None for rotary and other unbounded positions."""
        longest = learned_positions(self.target)
        if longest is None:
            return None
        if self._batch is not None:
            anchor = self._batch.next_position
        else:
            anchor = self._cached if self._base is None else int(self._base.max()) + self._ahead
        return max(longest - 1 - anchor, 0)

    def verify(
        self, text_ids: torch.Tensor, blocks: list[list[int]], generated: Sequence[int]
    ) -> tuple[Any, torch.Tensor, torch.Tensor]:
        """One pass over each row's anchor and drafts.

        Args:
            text_ids: int64 `[1, n]` whole text of a single row with the block behind it (some models' input
                preparation looks at it); ignored for several rows.
            blocks: Per live row, anchor and drafts.
            generated: Tokens generated per live row, anchor included.

        Returns:
            The target's output as it is, logits `[B, q, V]`, and hidden states of the block `[B, q, m*D_t]`, q the
            longest block: whatever stands behind a shorter one means nothing.
        """
        if self._batch is not None:
            outputs, logits, states = self._batch.verify(blocks, self._run)
        else:
            assert self._rollback is not None
            (block,) = blocks
            self._pass_tokens = [*self._rollback.replay, *block]
            self._pass_width = len(block)
            new = len(self._pass_tokens)
            start = generated[0] - (new - len(block))
            inputs = self._inputs(text_ids, start, new=new, width=len(block))
            with attending(GroupedAttention()) if new > 1 and self._is_grouped else nullcontext():
                outputs, states = self._run(inputs)
            logits, states = outputs.logits[:, -len(block) :], states[:, -len(block) :]
        self.stats.num_target_passes += 1
        return outputs, logits, states

    def _run(self, inputs: dict[str, Any]) -> tuple[Any, torch.Tensor]:
        states: list[torch.Tensor] = []
        with self.stats.forward("target"):
            outputs = self.capture.run(lambda: self.target(**inputs, return_dict=True), states.append)
        return outputs, states[0]

    def _inputs(self, ids: torch.Tensor, start: int, *, new: int, width: int) -> dict[str, Any]:
        kwargs = dict(self.kwargs)
        if self._base is not None:
            offsets = start + torch.arange(new, device=ids.device)
            kwargs["position_ids"] = self._base + offsets.to(self._base.dtype)
        if (mask := self._grown_mask(new, ids.device)) is not None:
            kwargs["attention_mask"] = mask
        return prepare_inputs(self.target, ids, kwargs, lambda values: values.expand(1, new), new=new, keep=width)

    def _grown_mask(self, new: int, device: torch.device) -> torch.Tensor | None:
        if self._mask is not None:
            return torch.nn.functional.pad(self._mask, (0, new), value=1)
        return torch.ones(1, self._cached + new, dtype=torch.long, device=device) if self._keeps_mask else None

    def keep(self, counts: list[int]) -> None:
        """Cut back after a pass: row b keeps the first `counts[b]` tokens of its block (1 = its anchor)."""
        if self._batch is not None:
            self._batch.keep(counts)
            return
        assert self._rollback is not None
        (kept,) = counts
        self._rollback.after_pass(self._pass_tokens, self._pass_width - kept)
        if self._mask is not None:
            self._mask = torch.nn.functional.pad(self._mask, (0, kept), value=1)
        self._cached += kept
        self._ahead += kept

    def pass_slots(self, count: int) -> range:
        """Output slots of the first `count` block tokens of a single row's last pass."""
        skipped = len(self._pass_tokens) - self._pass_width
        return range(skipped, skipped + count)

    def attention_widths(self, count: int) -> list[int | None]:
        """Keys one step attends to in each of the `count` layers with attention weights, see `record.py`."""
        assert self._rollback is not None
        return attention_widths(text_config(self.target), self._rollback.cache, count)

    def select(self, rows: list[int]) -> None:
        """Keep only these live rows (indices into the present ones)."""
        assert self._batch is not None
        self._batch.select(rows)

    def join(self, other: TargetSession) -> None:
        """Take the rows of another session on the same target behind these (both made with `joins`)."""
        assert self._batch is not None
        assert other._batch is not None
        self._batch.join(other._batch)

    def settle(self, text_ids: torch.Tensor, generated: int) -> None:
        """Bring a recurrent state up to the text, so that the cache is as plain decoding leaves it.

        Args:
            text_ids: int64 `[1, n]`, the whole text.
            generated: Tokens generated, the last one (which no cache holds) included.
        """
        replay = [] if self._rollback is None else self._rollback.replay
        if not replay:
            return
        assert self._rollback is not None
        inputs = self._inputs(text_ids[:, :-1], generated - len(replay), new=len(replay), width=1)
        self.target(**inputs, return_dict=True)
        self.stats.num_target_passes += 1
        self._rollback.after_pass(replay, 0)

    def finish(self) -> Any:
        """Stop recording; returns the cache."""
        if self._rollback is None:
            return pop_cache(self.kwargs)[1]
        self._rollback.finish()
        return self._rollback.cache


def learned_positions(target: PreTrainedModel) -> int | None:
    """Positions the target has learned; None for rotary and other unbounded ones."""
    config = text_config(target)
    if getattr(config, "rope_parameters", None) is not None:
        return None
    longest = getattr(config, "max_position_embeddings", None)
    return None if longest is None else int(longest)


def _any(flags: Any) -> bool:
    return any(flags.values()) if isinstance(flags, dict) else bool(flags)


__all__ = ["TargetSession", "learned_positions"]
