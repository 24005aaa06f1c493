"""Whether a module is its weight and nothing else, so that an op may read the weight instead of calling the module."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def plain_weight(module: nn.Module, like: torch.Tensor) -> torch.Tensor | None:
    """The weight of a linear or embedding layer that computes with it in the dtype and on the device of `like`.

    None where the layer is quantised, packed, adapted, offloaded or watched: then only calling it is right. A bias is
    not looked at.
    """
    weight: Any = module._parameters.get("weight")
    is_watched = any(getattr(module, name) for name in _HOOKS) or "forward" in vars(module)
    if type(module) not in (nn.Linear, nn.Embedding) or is_watched or type(weight) is not nn.Parameter:
        return None
    return weight if weight.dtype == like.dtype and weight.device == like.device else None


__all__ = ["plain_weight"]
