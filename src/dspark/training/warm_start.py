"""Warm start: draft layers that begin as the target's last layers.

In a draft layer, context features and the block go through the same key and value projections, but only the block goes
through `input_layernorm` (context features have had `hidden_norm`). Each layer's input-norm weight is therefore folded
into its q, k and v projections and the norm becomes a plain normalisation, so both kinds of input meet the same layer.
`fc` starts as the identity on the deepest tapped layer: its keys and values are then what the target's own next layer
would compute. The reference starts from random weights; this is ours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..modeling_dspark import DSparkDrafter
from ..peft_layers import base_parameters
from ..target import decoder_layers, describe, text_config
from .features import text_decoder

_NOISE = 0.02  # share of the deepest tap's size that the other taps add to a feature at the start


@torch.no_grad()
def warm_start(drafter: DSparkDrafter, target: PreTrainedModel) -> None:
    """Fill `drafter` from the last layers of `target`, in place.

    Args:
        drafter: Untrained, of the target's width, family `"llama"` or `"qwen3"`.
        target: Llama-like or Qwen3-like.

    Raises:
        ValueError: The target's layers are built differently from the draft layers; says how.
    """
    sources = list(decoder_layers(target))
    count = len(drafter.layers)
    reason = _why_not(drafter, target, sources)
    if reason is not None:
        raise ValueError(
            f"A warm start from {describe(target)} is impossible: {reason}. Use init='random', or a drafter whose "
            "layers are built like the target's."
        )
    for layer, source in zip(drafter.layers, sources[-count:], strict=True):
        copy_layer(layer, source)
    state = dict(drafter.named_parameters())
    state["norm.weight"].copy_(_final_norm(target).weight)
    state["hidden_norm.weight"].fill_(1.0)
    width, total = drafter.fc.weight.shape
    drafter.fc.weight.normal_(0.0, _NOISE / total**0.5)
    drafter.fc.weight[:, -width:] = torch.eye(width)


@torch.no_grad()
def copy_layer(layer: nn.Module, source: nn.Module) -> None:
    """Copy a target layer into a draft layer, its input norm folded into q, k and v; a bias the target lacks is 0."""
    weights, draft = dict(base_parameters(source)), dict(layer.named_parameters())
    for name, parameter in draft.items():
        parameter.copy_(weights[name]) if name in weights else parameter.zero_()
    norm = draft["input_layernorm.weight"]
    for projection in ("q_proj", "k_proj", "v_proj"):
        draft[f"self_attn.{projection}.weight"].mul_(norm)
    norm.fill_(1.0)


def _why_not(drafter: DSparkDrafter, target: PreTrainedModel, sources: list[nn.Module]) -> str | None:
    config = drafter.config
    if config.family not in ("llama", "qwen3"):
        return f"it is made for the families 'llama' and 'qwen3', not {config.family!r}"
    if len(drafter.layers) > len(sources):
        return f"the drafter has {len(drafter.layers)} layers, the target only {len(sources)}"
    partial = (getattr(text_config(target), "rope_parameters", None) or {}).get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        return f"the target rotates only {partial:.0%} of each head"
    wanted = {name: tuple(p.shape) for name, p in drafter.layers[0].named_parameters()}
    wanted.setdefault("self_attn.o_proj.bias", ())
    for source in sources[-len(drafter.layers) :]:
        found = {name: tuple(p.shape) for name, p in base_parameters(source)}
        # Qwen2 has biases on queries, keys and values only.
        found.setdefault("self_attn.o_proj.bias", wanted.get("self_attn.o_proj.bias", ()))
        if found != wanted:
            differing = sorted(set(found.items()) ^ set(wanted.items()))
            return f"its layers differ in {', '.join(sorted({name for name, _ in differing}))}"
        if not all(parameter.is_floating_point() for parameter in source.parameters()):
            return "its layers are quantised"
    if not _is_plain_rms_norm(_final_norm(target), config.rms_norm_eps):
        return "its norm is not an RMSNorm that multiplies by its weight"
    return None


def _is_plain_rms_norm(norm: Any, eps: float) -> bool:
    """Whether a norm multiplies by its weight (Gemma's multiplies by one more), tried on one vector."""
    weight = norm.weight.float()
    sample = torch.linspace(-1, 1, weight.shape[0], device=weight.device)
    expected = nn.functional.rms_norm(sample, tuple(weight.shape), weight, eps)
    return torch.allclose(norm(sample.to(norm.weight)).float(), expected, rtol=0.05, atol=0.05)


def _final_norm(target: PreTrainedModel) -> Any:
    return text_decoder(target).norm


__all__ = ["copy_layer", "warm_start"]
