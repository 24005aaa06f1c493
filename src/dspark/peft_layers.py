"""What the package knows of the modules PEFT puts into a model, without importing PEFT.

PEFT puts a layer with adapters around a linear layer (`base_layer`), and a wrapper around a module that is trained
whole (`original_module` and one copy per adapter). Both name the attributes that hold adapters in
`adapter_layer_names`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_ASIDE = ("base_layer", "original_module")
# Weights of an adapter that do nothing as long as another one is zero.
_INNER = re.compile(r"_A$|^lora_magnitude_vector$")


def adapter_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """PEFT's modules in `model`, with their names."""
    return ((name, module) for name, module in model.named_modules() if hasattr(module, "adapter_layer_names"))


def carries_adapters(model: nn.Module) -> bool:
    """Whether there are adapters in `model`, active or not."""
    return any(adapter_modules(model))


def names_adapters(model: nn.Module) -> bool:
    """Whether PEFT has been told which adapter each row of a batch takes (`generate(adapter_names=[...])`)."""
    hooks = (hook for _, module in adapter_modules(model) for hook in module._forward_pre_hooks.values())
    return any("adapter_names" in getattr(hook, "keywords", {}) for hook in hooks)


def base_module(module: Any) -> Any:
    """The module an adapter was put around, as it was before; any other module (or None) as it is."""
    while module is not None:
        inner = next((module._modules[name] for name in _ASIDE if name in module._modules), None)
        if inner is None:
            break
        module = inner
    return module


def base_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters that are no adapter's, by the names they have without adapters."""
    adapters = [f"{name}." if name else "" for name, _ in adapter_modules(module)]
    for name, parameter in module.named_parameters():
        inside = [name.removeprefix(prefix).split(".")[0] for prefix in adapters if name.startswith(prefix)]
        if all(part in _ASIDE for part in inside):
            yield ".".join(part for part in name.split(".") if part not in _ASIDE), parameter


def active_adapter_weights(model: nn.Module) -> list[torch.Tensor]:
    """Weights of the adapters that take part in the passes of `model`, ordered by name.

    Adapters that are switched off, merged, or fresh and still without effect do not. Modules trained whole are not
    here: a model asked for its embedding or head answers with the active copy.
    """
    found = {}
    for name, module in adapter_modules(model):
        if "original_module" in module._modules or module.disable_adapters or module.merged:
            continue
        for part in module.adapter_layer_names:
            held = getattr(module, part)
            for adapter in set(module.active_adapters) & set(held.keys()):
                item = held[adapter]
                weights = [item] if isinstance(item, torch.Tensor) else list(item.parameters())
                if not _INNER.search(part) and any(_has_effect(part, weight) for weight in weights):
                    found.update({f"{name}.{part}.{adapter}.{i}": weight for i, weight in enumerate(weights)})
    return [weight for _, weight in sorted(found.items())]


def _has_effect(part: str, weight: torch.Tensor) -> bool:
    neutral = 1 if part == "ia3_l" else 0
    return weight.is_meta or bool((weight.detach() != neutral).any())


__all__ = [
    "active_adapter_weights",
    "adapter_modules",
    "base_module",
    "base_parameters",
    "carries_adapters",
    "names_adapters",
]
