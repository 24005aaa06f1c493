"""Attention of a few new tokens where several query heads share a key head (step 6).

transformers' sdpa copies keys and values once per query head as soon as more than one token comes behind a cache. Here
the query heads of one key head become queries of that head instead, so nothing is copied: the same sums in another
layout. `examples/benchmarks/bench_attention.py` measures what that saves.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

_UNSHARED = SimpleNamespace(is_causal=False)  # what sdpa reads of a layer without shared key heads
_HEADS_OWN = ("position_bias", "s_aux")  # arguments with a value per query head


def head_groups(
    function: Callable[..., Any], module: nn.Module, query: torch.Tensor, key: torch.Tensor, kwargs: dict[str, Any]
) -> int:
    """Query heads per key head that can be laid side by side, 1 where `function` is to be called as it is.

    Args:
        function: The layer's attention function; only transformers' sdpa is known to copy.
        module: The attention layer.
        query: `[..., q, H, d]`.
        key: `[..., KV, W, d]`.
        kwargs: What the layer passes on.
    """
    groups = int(getattr(module, "num_key_value_groups", 1))
    is_known = function is sdpa_attention_forward and query.shape[-2] == groups * key.shape[-3]
    return groups if is_known and query.shape[-3] > 1 and all(kwargs.get(name) is None for name in _HEADS_OWN) else 1


def grouped_mask(mask: torch.Tensor, groups: int, dtype: torch.dtype) -> torch.Tensor:
    """Additive mask `[R, 1, groups * q, W]` of a bool or additive one `[R, 1, q, W]`; sdpa converts in every layer."""
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
    return mask if groups == 1 else mask.repeat(1, 1, groups, 1)


def attend_grouped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    groups: int,
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """sdpa of `query [R, q, H, d]` on `key`, `value` `[R, KV, W, d]` under `grouped_mask`; `[R, q, H, d_v]`."""
    rows, width, heads, _ = query.shape
    by_key_head = query.view(rows, width, heads // groups, groups, -1).permute(0, 2, 3, 1, 4).flatten(2, 3)
    output, _ = sdpa_attention_forward(_UNSHARED, by_key_head, key, value, mask, **kwargs)  # [R, groups * q, KV, d_v]
    return output.view(rows, groups, width, heads // groups, -1).permute(0, 2, 3, 1, 4).flatten(2, 3)


class GroupedAttention:
    """What the layers of one single-row pass attend with (see `ragged_attention.attending`)."""

    def __init__(self) -> None:
        self._masks: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id, beside the mask it stands for

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
        """The model's `function`, or the same without copies; `query [1, H, q, d]`, `key` `[1, KV, W, d]`."""
        by_token = query.transpose(1, 2)
        groups = head_groups(function, module, by_token, key, kwargs)
        if groups == 1 or attention_mask is None or attention_mask.shape[1] != 1:
            return function(module, query, key, value, attention_mask, **kwargs)
        if id(attention_mask) not in self._masks:
            self._masks[id(attention_mask)] = (attention_mask, grouped_mask(attention_mask, groups, query.dtype))
        mask = self._masks[id(attention_mask)][1]
        return attend_grouped(by_token, key, value, mask, groups, kwargs), None


__all__ = ["GroupedAttention", "attend_grouped", "grouped_mask", "head_groups"]
