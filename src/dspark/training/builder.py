"""`new_drafter`: an untrained drafter that fits a target in sizes, rotary embedding, norms, taps and mask token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn
from transformers import PreTrainedModel

from ..configuration_dspark import DSparkConfig, Family, MarkovHeadType
from ..modeling_dspark import DSparkDrafter
from ..target import decoder_layers, describe, head_module, text_config, unwrap
from ..target_note import fingerprint
from .bigram_start import Bigrams, bigram_start
from .features import vocabulary_rows
from .vocabulary import check_draft_vocab, choose_mask_token
from .warm_start import warm_start

Init = Literal["target", "random"]
# Rotary settings that speak of parts a draft layer does not have: image positions, partly rotated heads.
_DROPPED_ROPE = ("mrope_section", "mrope_interleaved", "partial_rotary_factor")


@dataclass(frozen=True)
class DrafterShape:
    """What a new drafter looks like; what is not here follows the target.

    Attributes:
        family: Draft-layer family; None: as the target (`"qwen3"` where it norms queries and keys, `"gemma4"` for
            Gemma 4, else `"llama"`).
        num_hidden_layers: Draft layers (the reference: 5).
        block_size: Input slots of a block, and drafts per round (the reference: 7).
        markov_rank: Rank of the sequential head (the reference: 256); 0: no head.
        markov_head_type: `"vanilla"`, `"gated"` or `"rnn"`.
        enable_confidence_head: Whether the drafter predicts acceptance.
        target_layer_ids: Tapped layers; None: `num_taps` evenly spaced in 1..N-3 of the target's N layers.
        num_taps: How many layers to tap when they are not named (the reference: 5).
        draft_vocab: Sorted target ids the drafter can write; None: all.
        mask_token_id: Filler of the block's slots; None: found by `choose_mask_token`.
        init: `"target"`: start from the target's last layers, and the head from the answers' bigrams where they are
            given; `"random"`.
    """

    family: Family | None = None
    num_hidden_layers: int = 5
    block_size: int = 7
    markov_rank: int = 256
    markov_head_type: MarkovHeadType | None = None
    enable_confidence_head: bool = True
    target_layer_ids: Sequence[int] | None = None
    num_taps: int = 5
    draft_vocab: Sequence[int] | None = None
    mask_token_id: int | None = None
    init: Init = "target"


def new_drafter(
    target: PreTrainedModel,
    shape: DrafterShape | None = None,
    *,
    tokenizer: Any = None,
    bigrams: Bigrams | None = None,
    target_name: str | None = None,
    **fields: Any,
) -> DSparkDrafter:
    """Build an untrained float32 drafter for `target`.

    Args:
        target: Its weights are read (warm start, reduced head), never changed. Pass it before packing or quantising.
        shape: What the drafter looks like; or give its fields as keywords: `new_drafter(target, block_size=7)`.
        tokenizer: The target's, to find a mask token (not needed with `mask_token_id`) and for the note on the target.
        bigrams: Of the answers to train on: with `init="target"` a vanilla or gated head starts from them; without
            them it starts at zero, as if there were none.
        target_name: Public name of the target for that note; None: the Hub id it was loaded from.
        **fields: Fields of [`DrafterShape`].

    Returns:
        The drafter; `config.target` notes the target, and under `mask_token` why that token was chosen.

    Raises:
        ValueError: The target lacks what the family needs, an id is out of range, or a warm start is impossible.
    """
    if shape is None:
        shape = DrafterShape(**fields)
    elif fields:
        raise ValueError(f"Pass either a DrafterShape or its fields, got both (fields {sorted(fields)}).")
    if shape.init not in get_args(Init):
        raise ValueError(f"`init` must be one of {', '.join(map(repr, get_args(Init)))}, got {shape.init!r}.")
    model = unwrap(target)
    mask = choose_mask_token(model, tokenizer, shape.mask_token_id)
    drafter = DSparkDrafter(_config(model, shape, mask.token_id))
    with torch.no_grad():
        if shape.draft_vocab is not None:
            _own_head(drafter, model, shape.draft_vocab)
        if drafter.markov_head is not None:
            # The first step then equals a drafter without a sequential head.
            drafter.markov_head.markov_w2.weight.zero_()
            if bigrams is not None and shape.init == "target":
                bigram_start(drafter.markov_head, bigrams, drafter.draft_token_ids)
        if shape.init == "target":
            warm_start(drafter, model)
    note = fingerprint(model, tokenizer=tokenizer, drafter=drafter, name=target_name)
    drafter.config.target = {**note, "mask_token": mask.reason}
    return drafter


def default_target_layer_ids(num_target_layers: int, num_taps: int) -> list[int]:
    """`num_taps` layers evenly spaced in 1..N-3 (reference rule); fewer where the target has fewer.

    36 layers, 5 taps: [1, 9, 17, 25, 33].
    """
    last = max(num_target_layers - 3, min(num_target_layers - 2, 0))
    first = min(1, last)
    if num_taps < 1:
        raise ValueError(f"A drafter taps at least 1 layer, got num_taps={num_taps}.")
    steps = max(num_taps - 1, 1)
    return sorted({round(last - (last - first) * step / steps) for step in range(num_taps)})


def _config(target: PreTrainedModel, shape: DrafterShape, mask_token_id: int) -> DSparkConfig:
    config = text_config(target)
    layers = config.num_hidden_layers
    taps = shape.target_layer_ids
    return DSparkConfig(
        vocab_size=vocabulary_rows(target),
        draft_vocab_size=None if shape.draft_vocab is None else len(shape.draft_vocab),
        num_hidden_layers=shape.num_hidden_layers,
        block_size=shape.block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=default_target_layer_ids(layers, shape.num_taps) if taps is None else list(taps),
        num_target_layers=layers,
        markov_rank=shape.markov_rank,
        markov_head_type=shape.markov_head_type if shape.markov_rank else None,
        enable_confidence_head=shape.enable_confidence_head,
        **_geometry(target, shape.family or target_family(target)),
    )


def target_family(target: PreTrainedModel) -> Family:
    """The draft-layer family that fits a target."""
    if "gemma4" in text_config(target).model_type:
        return "gemma4"
    attention = getattr(decoder_layers(target)[-1], "self_attn", None)
    head_dim = getattr(attention, "head_dim", None)
    norm = getattr(getattr(attention, "q_norm", None), "weight", None)
    # Norms over all heads at once (OLMo 2) are another thing.
    return "qwen3" if norm is not None and norm.shape == (head_dim,) else "llama"


def _geometry(target: PreTrainedModel, family: Family) -> dict[str, Any]:
    config = text_config(target)
    # Sizes may differ between layers (Gemma 4); the last one is of the full-attention kind that drafts imitate.
    layer = config.per_layer_config[config.num_hidden_layers - 1]
    heads = layer.num_attention_heads
    attention = getattr(decoder_layers(target)[-1], "self_attn", None)
    k_eq_v = getattr(layer, "attention_k_eq_v", None)
    if family == "gemma4" and k_eq_v is None:
        raise ValueError(
            f"The family 'gemma4' takes the sizes of Gemma 4's global layers, which {describe(target)} does not have. "
            "Leave `family` open, or name 'llama' or 'qwen3'."
        )
    return {
        "family": family,
        "hidden_size": config.hidden_size,
        "intermediate_size": getattr(layer, "intermediate_size", None) or 4 * config.hidden_size,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(layer, "num_key_value_heads", None) or heads,
        "head_dim": getattr(layer, "head_dim", None) or config.hidden_size // heads,
        "hidden_act": getattr(layer, "hidden_act", None) or getattr(layer, "hidden_activation", None) or "silu",
        "rms_norm_eps": getattr(layer, "rms_norm_eps", None) or 1e-6,
        "attention_bias": getattr(getattr(attention, "q_proj", None), "bias", None) is not None,
        "attention_k_eq_v": family == "gemma4" and bool(k_eq_v),
        "max_position_embeddings": getattr(config, "max_position_embeddings", None) or 40960,
        "rope_parameters": _rope(config, family),
        "initializer_range": getattr(config, "initializer_range", None) or 0.02,
        "final_logit_softcapping": getattr(config, "final_logit_softcapping", None),
    }


def _rope(config: Any, family: Family) -> dict[str, Any] | None:
    """Flat rotary parameters of the target's full-attention layers."""
    rope = dict(getattr(config, "rope_parameters", None) or {})
    nested = {name: value for name, value in rope.items() if isinstance(value, dict)}
    if nested:
        rope = dict(nested.get("full_attention") or next(iter(nested.values())))
    dropped = () if family == "gemma4" else _DROPPED_ROPE
    return {name: value for name, value in rope.items() if name not in dropped} or None


def _own_head(drafter: DSparkDrafter, target: PreTrainedModel, draft_vocab: Sequence[int]) -> None:
    head = head_module(target)
    ids = torch.tensor(check_draft_vocab(draft_vocab, drafter.config.vocab_size or 0))
    if not isinstance(head, nn.Linear) or head.bias is not None or not head.weight.is_floating_point():
        raise ValueError(
            f"A reduced draft vocabulary copies rows of the target's LM head, but that of {describe(target)} is not a "
            "plain linear layer without bias. Leave `draft_vocab` out: the drafter then borrows the whole head."
        )
    assert drafter.lm_head is not None
    assert drafter.draft_token_ids is not None
    drafter.lm_head.weight.copy_(head.weight[ids.to(head.weight.device)])
    drafter.draft_token_ids.copy_(ids)


__all__ = ["DrafterShape", "Init", "default_target_layer_ids", "new_drafter", "target_family"]
