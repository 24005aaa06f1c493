"""Packing a target's linear layers while it runs on a CPU, where that is possible."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from transformers import PreTrainedModel
from transformers.utils import logging

from ..cpu import optimize_for_cpu
from ..target import describe

logger = logging.get_logger("dspark.training")


def packed(model: PreTrainedModel, *, wanted: bool = True) -> Any:
    """A context in which the linear layers of `model` are packed; restored at its end.

    A model elsewhere than on a CPU stays as it is; one that cannot be packed too, with one warning that says why.

    Args:
        model: Frozen.
        wanted: False: do nothing.
    """
    if not wanted or model.device.type != "cpu":
        return nullcontext()
    try:
        return optimize_for_cpu(model)
    except (ValueError, RuntimeError) as error:
        logger.warning(f"{describe(model)} runs unpacked, which is slower: {error}")
        return nullcontext()


__all__ = ["packed"]
