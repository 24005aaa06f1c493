"""What a drafter borrows from its target: embedding and LM head, by reference, called as modules and never read.

Only so do quantised, packed and offloaded targets work: their weights are not the numbers they stand for.
"""

from __future__ import annotations

from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.func import functional_call
from transformers import PreTrainedModel

from .target import describe, embedding_module, head_module, text_config, unwrap


class SharedModules(NamedTuple):
    """What a drafter borrows from its target, by reference: modules that are called, weights never touched."""

    embedding: nn.Module | None
    lm_head: nn.Module | None


class TeacherHead(NamedTuple):
    """The target's LM head as the training forward reads it; `rows [Vd, D_t]` are those of a reduced vocabulary."""

    lm_head: nn.Module
    softcap: float | None
    rows: torch.Tensor | None


def borrow(config: Any, target: PreTrainedModel) -> SharedModules:
    """The modules a drafter with this config borrows from `target`; wrappers of the target are looked through.

    Raises:
        ValueError: The target lacks one.
    """
    target = unwrap(target)
    parts = (
        ("embedding", config.share_embedding, embedding_module(target)),
        ("LM head", config.share_lm_head, head_module(target)),
    )
    lacking = [name for name, is_shared, module in parts if is_shared and module is None]
    if lacking:
        raise ValueError(
            f"This drafter borrows the target's {' and '.join(lacking)}, and {describe(target)} has none. Pass the "
            "whole causal LM, or load a drafter that stores its own."
        )
    return SharedModules(*(module if is_shared else None for _, is_shared, module in parts))


def teacher_head(target: PreTrainedModel, draft_token_ids: torch.Tensor | None) -> TeacherHead | None:
    """The head whose law the drafter is trained towards; None for a target without one.

    Args:
        target: The target.
        draft_token_ids: int64 `[Vd]`, the reduced vocabulary, or None.
    """
    target = unwrap(target)
    head = head_module(target)
    if head is None:
        return None
    softcap = getattr(text_config(target), "final_logit_softcapping", None)
    # Only a plain weight has rows to take; quantised layers are `nn.Linear` too.
    is_plain = isinstance(head, nn.Linear) and head.bias is None and type(head.weight) is nn.Parameter
    if draft_token_ids is None or softcap is not None or not is_plain or not _holds_numbers(head.weight):
        return TeacherHead(head, softcap, None)
    return TeacherHead(head, softcap, head.weight.detach()[draft_token_ids.to(head.weight.device)])


def call_head(head: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Logits of a borrowed head, called in its own dtype and on its own device."""
    stored = next(chain(head.parameters(), head.buffers()), None)
    if stored is None:
        return _call(head, hidden)
    # A quantised head takes activations as they are.
    dtype = stored.dtype if _holds_numbers(stored) else hidden.dtype
    # On the meta device is what accelerate offloads; its hook moves the input.
    return _call(head, hidden.to(hidden.device if stored.is_meta else stored.device, dtype))


def call_embedding(embedding: nn.Module, token_ids: torch.Tensor) -> torch.Tensor:
    """Embeddings of `token_ids`, looked up on the embedding's own device."""
    stored = next(chain(embedding.parameters(), embedding.buffers()), None)
    return _call(embedding, token_ids if stored is None or stored.is_meta else token_ids.to(stored.device))


def own_factor(embedding: nn.Module) -> float:
    """What an embedding module multiplies its rows by (Gemma: the root of the width); 1 for plain ones."""
    factor = getattr(embedding, "scalar_embed_scale", getattr(embedding, "embed_scale", 1.0))
    return float(factor)


def _call(module: nn.Module, argument: torch.Tensor) -> torch.Tensor:
    """`module(argument)`, with gradients for the argument only: what is borrowed is not trained, frozen or not."""
    if not torch.is_grad_enabled():
        return module(argument)
    trainable = {name: weight.detach() for name, weight in module.named_parameters() if weight.requires_grad}
    return functional_call(module, trainable, (argument,)) if trainable else module(argument)


def _holds_numbers(stored: torch.Tensor) -> bool:
    """Whether a weight is stored as the numbers themselves, not as integer or 8-bit codes."""
    return stored.is_floating_point() and stored.element_size() > 1


__all__ = ["SharedModules", "TeacherHead", "borrow", "call_embedding", "call_head", "own_factor", "teacher_head"]
