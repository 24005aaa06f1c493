"""Rolling the target's cache back to the committed tokens (step 7), per kind of cache.

After a verification pass the cache holds keys of rejected drafts. Full and sliding layers are cropped by a negative
count (recording must be on before a sliding layer evicts); static layers move their length back; recurrent
(linear-attention) layers cannot be cropped: their state is kept at the last point where nothing was rejected, and the
tokens accepted since are prepended to the next pass, so no pass is added.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    QuantizedCache,
    StaticLayer,
)

from ..target import describe

_STATES = (
    "conv_states", "recurrent_states", "has_previous_state", "is_conv_states_initialized",
    "is_recurrent_states_initialized",
)  # fmt: skip


def check_cache(target: PreTrainedModel, cache: Any, *, max_length: int, batch_size: int) -> None:
    """Refuse, before the prompt's pass, a cache that cannot be rolled back.

    Args:
        target: The model, for messages.
        cache: What `generate` prepared or the user passed.
        max_length: Most tokens the sequence can reach.
        batch_size: Rows.

    Raises:
        ValueError: Names the cache, why it cannot be rolled back and what to use instead.
    """
    way_out = "Use the default cache (leave `cache_implementation` and the cache argument out), or decode without a drafter."
    if cache is None:
        raise ValueError(
            f"{describe(target)} keeps its decoding state outside transformers' cache classes, so rejected drafts cannot "
            f"be rolled back. Decode it without a drafter."
        )
    if not isinstance(cache, Cache):
        raise ValueError(f"Unsupported cache {type(cache).__name__} for {describe(target)}. {way_out}")
    if isinstance(cache, QuantizedCache) or any("Quantized" in type(layer).__name__ for layer in cache.layers):
        raise ValueError(
            f"A quantised cache cannot be rolled back exactly: what was quantised is no longer what was computed. {way_out}"
        )
    for layer in cache.layers:
        name = type(layer).__name__
        if isinstance(layer, StaticLayer) and layer.is_sliding and max_length > layer.max_cache_len:
            raise ValueError(
                f"A static sliding-window layer of {layer.max_cache_len} slots loses what it evicts, and this call may "
                f"reach {max_length} tokens, so rejected drafts could not be rolled back. {way_out}"
            )
        recurrent = isinstance(layer, LinearAttentionCacheLayerMixin)
        mixed = recurrent and isinstance(layer, StaticLayer | DynamicSlidingWindowLayer)
        if mixed or not (recurrent or isinstance(layer, StaticLayer) or hasattr(layer, "crop")):
            raise ValueError(f"Cache layers of type {name} cannot be rolled back. {way_out}")
    if batch_size > 1 and not _is_plain(cache):
        kinds = ", ".join(sorted({type(layer).__name__ for layer in cache.layers}))
        raise ValueError(
            f"Batches of {batch_size} rows need a target whose cache layers are all full attention, got {kinds} for "
            f"{describe(target)}. Generate row by row, or without a drafter."
        )


def _is_plain(cache: Cache) -> bool:
    """All layers full attention and dynamic: rows may then have holes under a 2D mask."""
    return all(
        not getattr(layer, "is_sliding", False)
        and not isinstance(layer, StaticLayer | LinearAttentionCacheLayerMixin)
        for layer in cache.layers
    )


class CacheRollback:
    """Cuts one row's cache back after each pass; for targets without recurrent layers nothing is ever replayed.

    Args:
        cache: The target's cache, filled by the prompt's pass.
    """

    # A replay longer than this is settled by a pass without drafts, which always moves the state forward.
    MAX_REPLAY = 16

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.recurrent = [layer for layer in cache.layers if isinstance(layer, LinearAttentionCacheLayerMixin)]
        self._recording = [
            layer
            for layer in cache.layers
            if not isinstance(layer, LinearAttentionCacheLayerMixin | StaticLayer)
            and hasattr(layer, "activate_past_recording")
        ]
        for layer in self._recording:
            layer.activate_past_recording()
        self._replay: list[int] = []
        self._snapshot = self._take_snapshot()

    @property
    def replay(self) -> list[int]:
        """Tokens to prepend to the next pass: committed, but not in the recurrent state."""
        return self._replay

    @property
    def wants_plain_pass(self) -> bool:
        """Whether the next pass should carry no drafts, so that the recurrent state catches up."""
        return len(self._replay) >= self.MAX_REPLAY

    def after_pass(self, tokens: list[int], num_rejected: int) -> None:
        """Forget the last `num_rejected` tokens of a pass over `tokens` (replayed ones included)."""
        if not self.recurrent:
            self._crop(num_rejected)
        elif num_rejected == 0:
            self._crop(0)
            self._replay = []
            self._snapshot = self._take_snapshot()
        else:
            self._crop(len(tokens))
            self._restore_snapshot()
            self._replay = tokens[: len(tokens) - num_rejected]

    def finish(self) -> None:
        """Stop recording, so that the cache behaves as plain decoding left it."""
        for layer in self._recording:
            layer.record_past = False

    def _crop(self, count: int) -> None:
        for layer in self.cache.layers:
            if isinstance(layer, StaticLayer):
                _shorten_static(layer, count)
            elif isinstance(layer, LinearAttentionCacheLayerMixin):
                if isinstance(layer, DynamicLayer):  # a layer with both kinds of state: only its attention part
                    DynamicLayer.crop(layer, -count)
            elif layer.is_initialized:
                # A recording sliding layer must be cropped after every pass, by 0 too: that trims it to its window.
                layer.crop(-count)

    def _take_snapshot(self) -> list[dict[str, Any]]:
        return [{name: _copied(getattr(layer, name)) for name in _STATES} for layer in self.recurrent]

    def _restore_snapshot(self) -> None:
        for layer, states in zip(self.recurrent, self._snapshot, strict=True):
            for name, value in states.items():
                setattr(layer, name, _copied(value))


def _shorten_static(layer: StaticLayer, count: int) -> None:
    # The stale slots behind the length are overwritten by the next update; in place, as the address is static.
    layer.cumulative_length.sub_(count)
    if hasattr(layer, "cumulative_length_int"):
        layer.cumulative_length_int -= count


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    return {key: _copied(item) for key, item in value.items()} if isinstance(value, dict) else value


__all__ = ["CacheRollback", "check_cache"]
