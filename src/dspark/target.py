"""What the package asks of a target model: its text config, decoder layers, embedding and head, whatever its class.

The only place that knows how models are put together; everything else takes these answers.
"""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from .compat import cache_name

# target -> (device, dtype) -> whether its recurrent layers go on from their state
_carrying: weakref.WeakKeyDictionary[Any, dict[Any, bool]] = weakref.WeakKeyDictionary()


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


def embedding_module(model: Any) -> Any:
    """The module that embeds token ids, or None where the class does not say which it is."""
    try:
        return model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None


def head_module(model: Any) -> Any:
    """The module that turns hidden states into logits, or None where there is none."""
    try:
        return model.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None


def table_shape(module: Any) -> tuple[int, int] | None:
    """`(rows, width)` of an embedding or LM head, one row per token id; None for a module that does not say.

    Read from the module's own attributes when its weight is packed or quantised and has another shape.
    """
    weight: Any = getattr(module, "weight", None)
    if type(weight) in (torch.Tensor, nn.Parameter) and weight.is_floating_point() and weight.dim() == 2:
        return weight.shape[0], weight.shape[1]
    for rows, width in (("num_embeddings", "embedding_dim"), ("out_features", "in_features")):
        if isinstance(getattr(module, rows, None), int) and isinstance(getattr(module, width, None), int):
            return getattr(module, rows), getattr(module, width)
    return None


def logit_rows(target: PreTrainedModel) -> int:
    """Width of the target's logits: every id it can emit or verify is below this, padded vocabularies included."""
    shape = table_shape(head_module(target))
    return text_config(target).vocab_size if shape is None else shape[0]


def rotary_kind(config: Any) -> tuple[str | None, float | None]:
    """`(rope_type, rope_theta)` of the full-attention layers; `(None, None)` for models without rotary positions."""
    rope = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [value for value in rope.values() if isinstance(value, dict)]
    if by_layer_type:
        rope = rope.get("full_attention", by_layer_type[0])
    return rope.get("rope_type"), rope.get("rope_theta")


def is_compiled(module: nn.Module) -> bool:
    """Whether a module's own call or forward is compiled (`torch.compile`, `Module.compile`)."""
    return hasattr(module, "_orig_mod") or _is_called_compiled(module) or _forwards_compiled(module)


def has_compiled_forward(module: nn.Module) -> bool:
    """Whether the forward is compiled (`model.forward = torch.compile(model.forward)`) and hooks around it are not."""
    return _forwards_compiled(module) and not _is_called_compiled(module)


def _is_called_compiled(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None


def _forwards_compiled(module: nn.Module) -> bool:
    return hasattr(module.forward, "_torchdynamo_orig_callable")


def skips_hidden_states(target: PreTrainedModel) -> bool:
    """Whether a pass that keeps few logits leaves out positions in late layers (those that share keys: Gemma 4)."""
    return bool(getattr(text_config(target), "num_kv_shared_layers", 0))


def counts_slots(target: PreTrainedModel) -> bool:
    """Whether attention tells distances by cache slots instead of positions, so that holes would shift them.

    So do models that are given no positions (ALiBi) and the local layers of GPT-Neo.
    """
    is_told = "position_ids" in inspect.signature(type(target).forward).parameters
    return not is_told or "local" in (getattr(text_config(target), "attention_layers", None) or ())


def carries_state(target: PreTrainedModel) -> bool:
    """Whether the recurrent layers of a target go on from their state in a pass over several tokens.

    Some start such a pass from an empty state, without an error; it depends on the model, transformers and the kernels
    installed. So it is tried, once per target, device and dtype: a few tokens in one pass and in two must leave the
    same state but for rounding, and clearing the state in between must change it.
    """
    known = _carrying.setdefault(target, {})
    key = (target.device, target.dtype)
    if key not in known:
        whole, parts = _state_after(target, [8]), _state_after(target, [6, 2])
        is_close = (whole - parts).norm() <= torch.finfo(target.dtype).eps ** 0.5 * whole.norm()
        known[key] = bool(is_close) and not torch.equal(parts, _state_after(target, [6, 2], clear=True))
    return known[key]


@torch.no_grad()
def _state_after(target: PreTrainedModel, widths: list[int], *, clear: bool = False) -> torch.Tensor:
    """The first recurrent layer's state after passes of these widths; `clear` empties it before the last.

    Of a layer without such a state (a convolution) it is the last hidden state, and its inputs are what is cleared.
    """
    decoder = target.get_decoder()
    ids = torch.arange(sum(widths), device=next(decoder.parameters()).device)[None]
    cache = DynamicCache(config=text_config(target))
    layer = next(layer for layer in cache.layers if isinstance(layer, LinearAttentionCacheLayerMixin))
    for i, part in enumerate(ids.split(widths, dim=1)):
        if clear and i == len(widths) - 1:
            for state in _tensors(layer.recurrent_states) or _tensors(layer.conv_states):
                state.zero_()
        outputs = decoder(input_ids=part, use_cache=True, **{cache_name(decoder): cache})
    states = _tensors(layer.recurrent_states) or [outputs.last_hidden_state[:, -1]]
    return states[0].float()


def _tensors(states: Any) -> list[torch.Tensor]:
    return [state for state in (states.values() if isinstance(states, dict) else [states]) if state is not None]


def is_on_meta(model: nn.Module) -> bool:
    """Whether weights are missing for good: on the meta device, and not there because accelerate offloads them."""
    if not any(parameter.is_meta for parameter in model.parameters()):
        return False
    return not any(hasattr(module, "_hf_hook") for module in model.modules())


__all__ = [
    "carries_state",
    "counts_slots",
    "decoder_layers",
    "describe",
    "embedding_module",
    "has_compiled_forward",
    "head_module",
    "is_compiled",
    "is_on_meta",
    "logit_rows",
    "rotary_kind",
    "skips_hidden_states",
    "table_shape",
    "text_config",
    "unwrap",
]
