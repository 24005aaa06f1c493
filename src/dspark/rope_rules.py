"""The rules of `DSparkConfig.rope_parameters`: what is wrong there would only show as low acceptance."""

from __future__ import annotations

import sys
from typing import Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

# What each rotary type cannot do without; `rope_theta` comes on top everywhere.
_NEEDS: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
_POSITIVE = (
    "factor", "attention_factor", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor",
    "original_max_position_embeddings", "mscale", "mscale_all_dim",
)  # fmt: skip
_PER_FREQUENCY = ("short_factor", "long_factor")
# Of these 0 means that there is none.
_OR_ZERO = ("mscale", "mscale_all_dim")
# What float32, in which tables are made and logits divided, can hold.
_SMALLEST, _LARGEST = 1e-37, 1e38


def is_number(value: Any) -> bool:
    """Whether it is a finite number that a float can hold: an int may be larger than any."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def check_rope(rope: Any, head_dim: int) -> None:
    """Hold rotary parameters to their rules.

    Args:
        rope: What was given.
        head_dim: Numbers of a head, which turn in pairs.

    Raises:
        ValueError: A rule is broken.
    """
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise ValueError(
            "`rope_parameters` must be one flat dict, e.g. {'rope_type': 'default', 'rope_theta': 1e6}, got "
            f"{rope!r}. Of a target's dict per layer type take the entry 'full_attention'."
        )
    if not is_positive(rope.get("rope_theta")):
        raise ValueError(
            f"`rope_parameters` must name a positive `rope_theta`, got {rope!r}. A default would only be noticed at "
            "long context: give the value the drafter was trained with."
        )
    kind = rope.get("rope_type", "default")
    known = ("default", *ROPE_INIT_FUNCTIONS)
    if kind not in known:
        raise ValueError(f"`rope_parameters['rope_type']` must be one of {', '.join(known)}, got {kind!r}.")
    missing = [key for key in _NEEDS.get(kind, ()) if rope.get(key) is None]
    if missing:
        raise ValueError(f"`rope_parameters` of type {kind!r} must have {', '.join(missing)}, got {rope!r}.")
    partial = rope.get("partial_rotary_factor", 1.0)
    if kind != "proportional" and partial != 1:
        raise ValueError(
            f"`rope_parameters['partial_rotary_factor']` is {partial!r}, but draft layers rotate whole heads (only "
            "the type 'proportional' takes a part). Leave it out."
        )
    if not is_positive(partial) or partial > 1:
        raise ValueError(f"`rope_parameters['partial_rotary_factor']` must be a number in (0, 1], got {partial!r}.")
    _check_values(rope, head_dim // 2)


def _check_values(rope: dict[str, Any], frequencies: int) -> None:
    for key in _POSITIVE:
        value = rope.get(key)
        if value is not None and not (is_positive(value) or (key in _OR_ZERO and value == 0)):
            raise ValueError(f"`rope_parameters[{key!r}]` must be a positive number, got {value!r}.")
    for key in _PER_FREQUENCY:
        values = rope.get(key)
        is_list = isinstance(values, list | tuple) and len(values) == frequencies
        if values is not None and not (is_list and all(map(is_positive, values))):
            raise ValueError(
                f"`rope_parameters[{key!r}]` must be {frequencies} positive numbers, one per pair of a head's "
                f"numbers, got {values!r}."
            )
    low, high = rope.get("low_freq_factor"), rope.get("high_freq_factor")
    if rope.get("rope_type") == "llama3" and low is not None and high is not None and low >= high:
        raise ValueError(
            f"`rope_parameters['low_freq_factor']` ({low}) must be below `high_freq_factor` ({high}): between them "
            "frequencies are blended."
        )


def is_positive(value: Any) -> bool:
    """Whether it is a positive number that float32 can hold."""
    return is_number(value) and _SMALLEST <= value <= _LARGEST


__all__ = ["check_rope", "is_number", "is_positive"]
