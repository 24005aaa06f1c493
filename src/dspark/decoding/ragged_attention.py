"""Attention of a ragged pass (step 6): the model's own attention function, on rows laid out one by one.

While a pass runs, the lookup of attention functions is wrapped; it falls through for every thread that has not armed
a pass, and neither the model nor its config is touched. Each layer gets the mask of its own window, so one mask is
handed to the model whatever its layer types; scaling, soft caps, sinks and shared key heads stay the model's business.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from ..target import counts_slots, is_compiled, text_config
from .grouped_attention import GroupedAttention, attend_grouped, grouped_mask, head_groups
from .ragged_pass import RaggedPass

_MASKED = ("sdpa", "eager")  # implementations that take a mask per query and key


class BypassedError(Exception):
    """A layer did not attend through the interface, or not with the mask it was given; the pass is void."""


def attends_by_interface(target: PreTrainedModel) -> bool:
    """Whether ragged passes can reach the target's attention.

    Not so where a class computes attention itself, tells distances by slots (ALiBi), attends in chunks, is compiled
    (a graph traced before keeps its own attention) or uses a kernel without masks: those are given aligned passes.
    """
    config, decoder = text_config(target), target.get_decoder()
    return (
        config._attn_implementation in _MASKED
        and "chunked_attention" not in (getattr(config, "layer_types", None) or ())
        and not counts_slots(target)
        and type(decoder)._can_set_attn_implementation()
        and not any(is_compiled(module) for module in target.modules())
    )


class RaggedAttention:
    """What the layers of one pass attend with.

    Args:
        target: The model.
        plan: The pass, flattened or padded.
        windows: Sliding window per decoder layer; None: full attention.
    """

    def __init__(self, target: PreTrainedModel, plan: RaggedPass, windows: Sequence[int | None]) -> None:
        self._plan = plan
        self._windows = windows
        self._is_additive = text_config(target)._attn_implementation == "eager"
        self._dtype = target.dtype
        self._masks: dict[tuple[int | None, torch.device, torch.dtype, int], torch.Tensor] = {}
        self._num_attended = 0
        self.handed_mask = self._mask(None, target.device, self._dtype)

    def attend(
        self,
        function: Callable[..., Any],
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> Any:
        """The model's `function` on rows: queries `[1, H, N, d]` or `[R, H, q, d]`, keys `[R, KV, W, d]`."""
        layer_idx: Any = getattr(module, "layer_idx", None)
        if layer_idx is None or attention_mask is None or attention_mask.shape != self.handed_mask.shape:
            raise BypassedError(f"{type(module).__name__} does not say its layer, or makes a mask of its own")
        self._num_attended += 1
        if self._plan.width == 1 and self._plan.form == "padded":  # one query per row is laid out as it came
            mask = self._mask(self._windows[layer_idx], query.device, query.dtype)
            return function(module, query, key, value, mask, **kwargs)
        by_row = self._plan.by_row(query.transpose(1, 2))
        groups = head_groups(function, module, by_row, key, kwargs)
        mask = self._mask(self._windows[layer_idx], query.device, query.dtype, groups)
        if groups > 1:
            return self._plan.by_token(attend_grouped(by_row, key, value, mask, groups, kwargs)), None
        output, weights = function(module, by_row.transpose(1, 2), key, value, mask, **kwargs)
        return self._plan.by_token(output), weights

    def check(self) -> None:
        """Raise unless every layer of the pass has attended here."""
        if self._num_attended != len(self._windows):
            raise BypassedError(f"{self._num_attended} of {len(self._windows)} layers attend through the interface")

    def _mask(self, window: int | None, device: torch.device, dtype: torch.dtype, groups: int = 1) -> torch.Tensor:
        key = (window, device, dtype, groups)
        if key not in self._masks:
            mask = self._plan.mask(window, device)
            if self._is_additive:
                mask = torch.zeros(mask.shape, dtype=dtype, device=device).masked_fill(~mask, torch.finfo(dtype).min)
            elif groups > 1 or device.type == "cpu":  # where sdpa would convert a bool mask in every layer
                mask = grouped_mask(mask, groups, dtype)
            self._masks[key] = mask
        return self._masks[key]


_armed = threading.local()
_lock = threading.Lock()
_users = 0
_get_interface = AttentionInterface.get_interface


@contextmanager
def attending(attention: RaggedAttention | GroupedAttention) -> Iterator[None]:
    """Inside, this thread's attention layers go through `attention`; other threads and later calls do not."""
    _install()
    _armed.attention = attention
    try:
        yield
    finally:
        _armed.attention = None
        _uninstall()


def _install() -> None:
    global _users, _get_interface
    with _lock:
        if _users == 0:
            _get_interface = AttentionInterface.get_interface
            AttentionInterface.get_interface = _lookup  # type: ignore[method-assign]
        _users += 1


def _uninstall() -> None:
    global _users
    with _lock:
        _users -= 1
        if _users == 0:
            AttentionInterface.get_interface = _get_interface  # type: ignore[method-assign]


def _lookup(interface: AttentionInterface, implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
    function = _get_interface(interface, implementation, default)
    attention = getattr(_armed, "attention", None)
    return function if attention is None else functools.partial(attention.attend, function)


__all__ = ["BypassedError", "RaggedAttention", "attending", "attends_by_interface"]
