"""What the caller decides about a drafter, brought into its record: nothing that was asked for gets lost."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from dspark.configuration_dspark import DSparkConfig

from .record import Field, LayerSight, Record

NAMES = frozenset(inspect.signature(DSparkConfig.__init__).parameters) - {"self", "kwargs"}
_ATTENTION = {"attention_windows", "window_rule", "causal_in_block"}
_STORED = {"share_embedding": "has_embed", "share_lm_head": "has_lm_head"}
_WHO = "the caller"


def check_names(names: Iterable[str]) -> None:
    """Hold names to fields of `DSparkConfig`.

    Raises:
        ValueError: One is none.
    """
    for name in names:
        if name not in NAMES:
            close = difflib.get_close_matches(name, NAMES, n=1)
            hint = f"Did you mean `{close[0]}`?" if close else "See `dspark inspect` and `DSparkConfig` for the names."
            raise ValueError(f"`{name}` is no field of a drafter that can be decided. {hint}")


def decided(record: Record, choices: Mapping[str, Any]) -> Record:
    """The record with those choices that its reader does not take as a field of the same name.

    Raises:
        ValueError: One breaks a rule of `DSparkConfig`, or the checkpoint cannot have it.
    """
    choices = {name: value for name, value in choices.items() if name in NAMES}
    if not choices:
        return record
    config = record.to_config(**choices)
    values: dict[str, Any] = {field: not getattr(config, name) for name, field in _STORED.items() if name in choices}
    if _ATTENTION & choices.keys():
        layers = config.num_hidden_layers
        windows, causal = config.attention_windows or [None] * layers, config.causal_in_block or [False] * layers
        values["layers_attention"] = [
            LayerSight(window, None if window is None else config.window_rule, is_causal)
            for window, is_causal in zip(windows, causal, strict=True)
        ]
    fields = {**record.fields, **{name: Field(value, _WHO) for name, value in values.items()}}
    found = replace(record, fields=fields)
    result = found.to_config()
    for name in choices:
        if getattr(result, name) != getattr(config, name):
            raise ValueError(
                f"`{name}` of {record.source} is {getattr(result, name)!r} and cannot be made "
                f"{getattr(config, name)!r}: its tensors, or other fields, say so. Leave it out."
            )
    return found


__all__ = ["NAMES", "check_names", "decided"]
