"""The few places where supported transformers versions (5.15 to 5.24) differ, each behind one function.

5.15 is the floor: from there on sliding-window layers keep their window size and can still be rolled back
(`activate_past_recording`), and `crop` takes negative counts on every version up to 5.24.
"""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

from transformers import cache_utils
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMixin
from transformers.utils import output_capturing

from .requirements import NEWEST, OLDEST

_CACHE_NAMES = ("cache", "past_key_values", "cache_params")


def cache_name(target: Any) -> str:
    """Keyword under which the target's forward takes its cache: `cache` since 5.24, `past_key_values` before, or
    `cache_params` for Mamba.

    Hard-coding `cache` is swallowed by `**kwargs` before 5.24: an empty cache and wrong logits, without an error.
    """
    parameters = inspect.signature(type(target).forward).parameters
    return next((name for name in _CACHE_NAMES if name in parameters), "past_key_values")


def pop_cache(kwargs: dict[str, Any]) -> tuple[str | None, Any]:
    """Name and value of the cache in `model_kwargs`, whichever name it goes by."""
    for name in _CACHE_NAMES:
        if kwargs.get(name) is not None:
            return name, kwargs[name]
    return None, None


def cache_length(cache: Any) -> int | None:
    """Tokens in a cache; None where no layer counts them (all recurrent)."""
    if cache.layers and not any(hasattr(layer, "get_seq_length") for layer in cache.layers):
        return None
    return int(cache.get_seq_length())


def dummy_layers() -> tuple[type, ...]:
    """Cache layers of target layers that keep nothing (they share another's keys): a class of its own since 5.23."""
    return tuple(filter(None, [getattr(cache_utils, "DummyLayer", None)]))


def output_cache_field() -> str:
    """Field of transformers' generation outputs that holds the cache: `cache` since 5.24."""
    names = {field.name for field in fields(GenerateDecoderOnlyOutput)}
    return "cache" if "cache" in names else "past_key_values"


def selects_hidden_states() -> bool:
    """Whether `output_hidden_states` takes a list of indices, so that a pass returns only those: since 5.24."""
    return hasattr(output_capturing, "selected_hidden_states")


def check_generation_hooks() -> None:
    """Fail loudly when transformers moved a hook the decoding loop stands on.

    Raises:
        ImportError: Names the hook, the transformers found and the range supported.
    """
    expected = {
        "_prefill": ("input_ids", "generation_config", "model_kwargs"),
        "prepare_inputs_for_generation": ("input_ids", "next_sequence_length", "is_first_iteration"),
        "generate": ("inputs", "generation_config", "assistant_model", "streamer", "custom_generate"),
    }
    for name, parameters in expected.items():
        hook = getattr(GenerationMixin, name, None)
        have = () if hook is None else inspect.signature(hook).parameters
        if missing := [parameter for parameter in parameters if parameter not in have]:
            import transformers

            raise ImportError(
                f"dspark decodes through `GenerationMixin.{name}({', '.join(parameters)})`, but transformers "
                f"{transformers.__version__} "
                f"has {'no such method' if hook is None else 'lost ' + ', '.join(missing)}. "
                f"Supported: transformers {OLDEST} to {NEWEST}."
            )


__all__ = [
    "cache_length",
    "cache_name",
    "check_generation_hooks",
    "dummy_layers",
    "output_cache_field",
    "pop_cache",
]
