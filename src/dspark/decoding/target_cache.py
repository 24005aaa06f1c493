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
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
    QuantizedCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from ..compat import dummy_layers
from ..target import carries_state, describe, text_config

_STATES = (
    "conv_states", "recurrent_states", "has_previous_state", "is_conv_states_initialized",
    "is_recurrent_states_initialized",
)  # fmt: skip
# Layers whose rollback is known to be exact. By exact type: a subclass may keep more than its parent's crop takes.
_RAGGED = (DynamicLayer, DynamicSlidingWindowLayer, *dummy_layers())  # what a `RaggedCache` can take over
_KNOWN = (
    *_RAGGED, DynamicIndexedLayer, StaticLayer, StaticSlidingWindowLayer,
    LinearAttentionLayer, LinearAttentionAndFullAttentionLayer,
)  # fmt: skip
_WAY_OUT = (
    "Use the default cache (leave `cache_implementation` and the cache argument out), or decode without a drafter."
)
QUANTISED = (
    f"A quantised cache cannot be rolled back exactly: what was quantised is no longer what was computed. {_WAY_OUT}"
)
_OUTSIDE = (
    "keeps its decoding state outside transformers' cache classes, so rejected drafts cannot be rolled back. Decode "
    "without a drafter."
)


def check_cache(target: PreTrainedModel, cache: Any, *, max_length: int, batch_size: int, is_callers: bool) -> None:
    """Refuse, before the prompt's pass, a cache that cannot be rolled back.

    Args:
        target: The model.
        cache: What `generate` prepared or the user passed.
        max_length: Most tokens the sequence can reach.
        batch_size: Rows.
        is_callers: Whether the caller passed the cache, to go on with it later.

    Raises:
        ValueError: Names the cache, why it cannot be rolled back and what to use instead.
    """
    if cache is None:
        raise ValueError(f"{describe(target)} {_OUTSIDE}")
    if not isinstance(cache, Cache):
        raise ValueError(f"Unsupported cache {type(cache).__name__} for {describe(target)}. {_WAY_OUT}")
    # With the layers the target's config asks for: a user's own cache may not say how the target attends.
    layers = [*DynamicCache(config=text_config(target)).layers, *cache.layers]
    _check_layers(cache, layers, max_length=max_length)
    recurrent = [layer for layer in layers if isinstance(layer, LinearAttentionCacheLayerMixin)]
    if getattr(target, "_is_stateful", False) and not recurrent:
        raise ValueError(f"{describe(target)} {_OUTSIDE}")
    if recurrent and not carries_state(target):
        raise ValueError(
            f"{describe(target)} has recurrent layers that start each pass over several tokens from an empty state, "
            "so drafts cannot be verified together. Decode it without a drafter."
        )
    if batch_size > 1 and is_callers:
        raise ValueError(
            f"A batch of {batch_size} rows with a drafter ends with rows of different lengths and without those that "
            "finished earlier, so a cache of your own would not be usable afterwards. Leave the cache argument out, "
            "or generate row by row."
        )
    if batch_size > 1:
        _check_batch(target, cache, {type(layer) for layer in layers}, batch_size)


def _check_batch(target: PreTrainedModel, cache: Cache, kinds: set[type], batch_size: int) -> None:
    if not kinds <= set(_RAGGED):
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise ValueError(
            f"Batches of {batch_size} rows need a target whose cache layers are all dynamic, with full or sliding "
            f"attention, got {names} for {describe(target)}. Generate row by row, or without a drafter."
        )
    if cache.offloading:
        raise ValueError(
            f"An offloaded cache keeps its layers off the device, and the rows of a batch of {batch_size} go on in a "
            "cache of their own that stays there. Generate row by row, or leave `cache_implementation` out."
        )


def _check_layers(cache: Cache, layers: list[Any], *, max_length: int) -> None:
    if isinstance(cache, QuantizedCache) or any("Quantized" in type(layer).__name__ for layer in layers):
        raise ValueError(QUANTISED)
    for layer in layers:
        if type(layer) not in _KNOWN:
            raise ValueError(f"Cache layers of type {type(layer).__name__} cannot be rolled back. {_WAY_OUT}")
        # The last token is never forwarded, so it needs no slot.
        if type(layer) is StaticSlidingWindowLayer and max_length - 1 > layer.max_cache_len:
            raise ValueError(
                f"A static sliding-window layer of {layer.max_cache_len} slots loses what it evicts, and this call "
                f"may reach {max_length} tokens, so rejected drafts could not be rolled back. {_WAY_OUT}"
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
            and not layer.record_past  # whoever turned it on before turns it off
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


__all__ = ["QUANTISED", "CacheRollback", "check_cache"]
