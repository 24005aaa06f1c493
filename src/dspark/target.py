"""What the package asks of a target model: its text config, decoder layers, embedding and head, whatever its class.

The only place that knows how models are put together; everything else takes these answers.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel


def unwrap(model: Any) -> Any:
    """The model behind `torch.compile`, PEFT and data-parallel wrappers; adapters stay active in the layers."""
    while True:
        if hasattr(model, "_orig_mod"):  # torch.compile
            model = model._orig_mod
        elif hasattr(model, "get_base_model") and hasattr(model, "peft_config"):  # PeftModel
            model = model.get_base_model()
        elif isinstance(getattr(model, "module", None), nn.Module) and not isinstance(model, PreTrainedModel):
            model = model.module  # DistributedDataParallel and friends
        else:
            return model


def text_config(target: PreTrainedModel) -> Any:
    """Config of the target's text decoder (the config itself for text-only models)."""
    return target.config.get_text_config(decoder=True)


def decoder_layers(target: PreTrainedModel) -> nn.ModuleList:
    """The target's text decoder layers, in order.

    Raises:
        ValueError: No list of `num_hidden_layers` modules is found, so hidden states cannot be captured.
    """
    count = text_config(target).num_hidden_layers
    candidates = [
        (name, module)
        for name, module in target.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count and _is_text(name)
    ]
    if not candidates:
        raise ValueError(
            f"{type(target).__name__} has no list of {count} decoder layers, so the hidden states a drafter reads "
            "cannot be captured. Only decoder-only text models (and the text path of multimodal ones) are supported."
        )
    # The outermost list: anything deeper (experts, say) sits inside one of its layers.
    return min(candidates, key=lambda item: item[0].count("."))[1]


def _is_text(name: str) -> bool:
    return not any(part in name for part in ("vision", "visual", "audio", "encoder", "image"))


def describe(target: PreTrainedModel) -> str:
    """Short name of the target for messages: class, and path or Hub id where known."""
    path = getattr(target.config, "_name_or_path", "") or "unnamed"
    return f"{type(target).__name__} ({path})"


__all__ = ["decoder_layers", "describe", "text_config", "unwrap"]
