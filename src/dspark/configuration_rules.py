"""The rules of `DSparkConfig`: what each field may hold and which fields go together, one function per topic.

Every message has the field, the value found, the rule and the way out. Nothing is corrected here.
"""

from __future__ import annotations

import math
from dataclasses import fields
from itertools import pairwise
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from .rope_rules import check_rope, is_number, is_positive

_COUNTS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "block_size",
)  # fmt: skip
# Larger ones only stand in damaged files, and reckoning with them takes all memory.
_MOST, _LONGEST_BLOCK = 2**31 - 1, 4096
_OPTIONAL_COUNTS = {
    "vocab_size": "the target's vocabulary",
    "draft_vocab_size": "the whole vocabulary",
    "target_hidden_size": "the drafter's `hidden_size`",
}
_FLAGS = (
    "attention_bias", "attention_k_eq_v", "fc_bias", "raw_target_embedding", "sample_from_anchor",
    "enable_confidence_head",
    "confidence_head_with_markov", "confidence_head_bias", "share_embedding", "share_lm_head",
)  # fmt: skip
_POSITIVE = ("rms_norm_eps", "embed_scale", "logit_scale", "final_logit_softcapping")
# Keys that transformers, its Trainer or the Hub put into any config beside the fields of its base class.
_COMMON_KEYS = {
    "model_type", "torch_dtype", "name_or_path", "attn_implementation", "experts_implementation", "output_attentions",
    "num_labels", "auto_map", "quantization_config", "per_layer_config", "tie_word_embeddings", "use_cache",
    "bos_token_id", "eos_token_id", "pad_token_id", *(field.name for field in fields(PreTrainedConfig)),
}  # fmt: skip


def unknown_keys(keys: Any, known: Any) -> list[str]:
    """Keys that are neither in `known` nor transformers' own (private names are its own), sorted."""
    return sorted(key for key in set(keys) - _COMMON_KEYS - set(known) if not key.startswith("_"))


def check_config(config: Any, dtype: Any = None) -> None:
    """Hold a config, and the dtype its base class is to have, to all rules.

    Raises:
        ValueError: A rule is broken.
    """
    _check_types(config)
    _check_numbers(config)
    _check_attention(config)
    _check_windows(config)
    check_rope(config.rope_parameters, config.head_dim)
    _check_block(config)
    _check_target_layers(config)
    _check_heads(config)
    _check_temperatures(config)
    _check_sharing(config)
    _check_dtype(dtype)


def check_raw(raw: dict[str, Any], model_type: str) -> None:
    """Hold a dict to what the base class takes for granted.

    Raises:
        ValueError: It is another model's, or a value is of another type.
    """
    if (kind := raw.get("model_type", model_type)) != model_type:
        raise ValueError(
            f"This is a config of model_type {kind!r}, not of {model_type!r}. Drafters in another format are read by "
            "`DSparkDrafter.from_pretrained`, their configs by `dspark.hub.read_config`."
        )
    if not isinstance(found := raw.get("quantization_config"), dict | None):
        raise ValueError(f"`quantization_config` must be an object or left out, got {found!r}.")


def check_choice(config: Any, field: str, allowed: tuple[str, ...]) -> None:
    """Hold a field to a list of names."""
    value = getattr(config, field)
    if value not in allowed:
        raise ValueError(f"`{field}` must be one of {', '.join(map(repr, allowed))}, got {value!r}.")


def _check_dtype(value: Any) -> None:
    named = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else value
    if value is not None and not isinstance(named, torch.dtype | dict):
        raise ValueError(f"`dtype` must be a dtype of torch such as 'bfloat16', got {value!r}.")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_types(config: Any) -> None:
    for field in _COUNTS:
        value = getattr(config, field)
        if not _is_int(value) or value < 1:
            raise ValueError(f"`{field}` must be an integer of at least 1, got {value!r}.")
        _check_size(field, value)
    for field, default in _OPTIONAL_COUNTS.items():
        value = getattr(config, field)
        if value is not None and (not _is_int(value) or value < 1):
            raise ValueError(f"`{field}` must be an integer of at least 1, or None for {default}, got {value!r}.")
        _check_size(field, value or 1)
    for field in _FLAGS:
        if not isinstance(getattr(config, field), bool):
            raise ValueError(f"`{field}` must be True or False, got {getattr(config, field)!r}.")
    if config.target is not None and not isinstance(config.target, dict):
        raise ValueError(f"`target` must be a dict of notes on the target, or None, got {config.target!r}.")


def _check_size(field: str, value: int) -> None:
    most = _LONGEST_BLOCK if field == "block_size" else _MOST
    if value > most:
        raise ValueError(
            f"`{field}` must be at most {most}, got {value!r}: the config is damaged, or another model's."
        )


def _check_numbers(config: Any) -> None:
    for field in _POSITIVE:
        value = getattr(config, field)
        if field == "final_logit_softcapping" and value is None:
            continue
        if not is_positive(value):
            rule = "a positive number" if not is_number(value) or value <= 0 else "a number that float32 can hold"
            raise ValueError(f"`{field}` must be {rule}, got {value!r}.")
    if not is_number(config.initializer_range) or config.initializer_range < 0:
        raise ValueError(f"`initializer_range` must be a number of at least 0, got {config.initializer_range!r}.")
    if not is_number(config.attention_dropout) or not 0 <= config.attention_dropout < 1:
        raise ValueError(f"`attention_dropout` must be a number in [0, 1), got {config.attention_dropout!r}.")


def _check_attention(config: Any) -> None:
    if config.num_attention_heads % config.num_key_value_heads:
        raise ValueError(
            f"`num_attention_heads` ({config.num_attention_heads}) must be a multiple of `num_key_value_heads` "
            f"({config.num_key_value_heads}): every key/value head serves the same number of query heads."
        )
    if config.head_dim % 2:
        raise ValueError(
            f"`head_dim` must be even, as rotary positions turn its halves together, got {config.head_dim}."
        )
    if config.attention_k_eq_v and config.family != "gemma4":
        raise ValueError(f"`attention_k_eq_v` belongs to the family 'gemma4', got family {config.family!r}.")
    if not isinstance(config.hidden_act, str) or config.hidden_act not in ACT2FN:
        raise ValueError(
            f"`hidden_act` must be an activation transformers knows, e.g. 'silu' or 'gelu_pytorch_tanh', got "
            f"{config.hidden_act!r}."
        )


def _check_windows(config: Any) -> None:
    windows, layers = config.attention_windows, config.num_hidden_layers
    is_list = isinstance(windows, list) and len(windows) == layers
    if windows is not None and not (is_list and all(w is None or (_is_int(w) and 0 < w <= _MOST) for w in windows)):
        raise ValueError(
            f"`attention_windows` must have a positive integer or None for each of {layers} draft layers, or be None, "
            f"got {windows!r}."
        )
    if any(w is not None for w in windows or ()) != (config.window_rule is not None):
        raise ValueError(
            f"`attention_windows` ({windows}) and `window_rule` ({config.window_rule!r}) disagree: a rule goes with "
            "at least one window, and a window means nothing without its rule."
        )
    causal = config.causal_in_block
    is_list = isinstance(causal, list) and len(causal) == layers
    if causal is not None and not (is_list and all(isinstance(value, bool) for value in causal)):
        raise ValueError(
            f"`causal_in_block` must have True or False for each of {layers} draft layers, or be None, got {causal!r}."
        )


def _check_block(config: Any) -> None:
    if config.block_size < 2 and not config.sample_from_anchor:
        raise ValueError(
            f"`block_size` must be at least 2 with `sample_from_anchor=False`, got {config.block_size}. It counts the "
            "anchor and the masks, and the anchor slot then predicts nothing."
        )
    if config.mask_token_id is None:
        raise ValueError(
            "`mask_token_id` is missing. Set it to the id the drafter was trained with (DeepSpec: 151669 for "
            "Qwen3, 4 for Gemma 4); a padding or EOS id in its place lowers acceptance without an error."
        )
    known = config.vocab_size
    if not _is_int(config.mask_token_id) or not 0 <= config.mask_token_id < (known or math.inf):
        raise ValueError(
            f"`mask_token_id` must be an id of the target's vocabulary, 0..{'V-1' if known is None else known - 1}, "
            f"got {config.mask_token_id!r}. Set it to the id the drafter was trained with."
        )
    has_table = not (config.share_embedding and config.share_lm_head and not config.markov_rank)
    if known is None and (has_table or config.draft_vocab_size is not None):
        raise ValueError(
            "`vocab_size` is None, and the drafter stores a table over the vocabulary (an embedding, an LM head, a "
            "sequential head or a reduced vocabulary): set it to the target's number of rows."
        )
    if config.draft_vocab_size is not None and config.draft_vocab_size > config.vocab_size:
        raise ValueError(
            f"`draft_vocab_size` must lie in 1..vocab_size ({config.vocab_size}), got {config.draft_vocab_size}. "
            "Leave it None for the whole vocabulary."
        )


def _check_target_layers(config: Any) -> None:
    ids, count = config.target_layer_ids, config.num_target_layers
    if not ids:
        raise ValueError(
            "`target_layer_ids` is missing. Name the decoder layers of the target whose outputs the drafter reads, "
            "e.g. [1, 9, 17, 25, 33] for Qwen3-4B."
        )
    if count is not None and (not _is_int(count) or not 1 <= count <= _MOST):
        raise ValueError(
            f"`num_target_layers` must be the target's number of decoder layers, or None if unknown, got {count!r}."
        )
    if not isinstance(ids, list) or not all(map(_is_int, ids)):
        raise ValueError(f"`target_layer_ids` must be a list of integers, got {ids!r}.")
    if any(b <= a for a, b in pairwise(ids)):
        raise ValueError(f"`target_layer_ids` must be strictly increasing, got {ids}.")
    if ids[0] < -1 or ids[-1] >= (_MOST if count is None else count) - 1:
        bound, of = ("N-2", "N") if count is None else (count - 2, count)
        raise ValueError(
            f"`target_layer_ids` must lie in -1..{bound} for a target of {of} layers, got {ids}. -1 is the "
            "embedding output; the last layer is refused, as transformers returns it after the final norm."
        )


def _check_heads(config: Any) -> None:
    rank, kind = config.markov_rank, config.markov_head_type
    if not _is_int(rank) or rank < 0 or (rank > 0) != (kind != "none"):
        raise ValueError(
            f"`markov_rank` ({rank!r}) and `markov_head_type` ({kind!r}) disagree: rank 0 goes with 'none', a "
            "positive integer with 'vanilla', 'gated' or 'rnn'."
        )
    if config.confidence_head_with_markov and not (config.enable_confidence_head and rank):
        raise ValueError(
            "`confidence_head_with_markov=True` needs both `enable_confidence_head=True` and a sequential head "
            f"(`markov_rank` > 0), got {config.enable_confidence_head} and {rank}."
        )


def _check_temperatures(config: Any) -> None:
    temperatures = config.confidence_temperatures
    if temperatures is None:
        return
    if isinstance(temperatures, dict):
        _check_decoding_temperatures(list(temperatures))
    for row in temperatures.values() if isinstance(temperatures, dict) else [temperatures]:
        is_list = isinstance(row, list) and len(row) == config.num_draft_tokens
        if not is_list or not all(map(is_positive, row)):
            raise ValueError(
                f"`confidence_temperatures` must be {config.num_draft_tokens} positive numbers, one per draft "
                f"position, or such lists by decoding temperature, or None, got {temperatures!r}."
            )
    if not config.enable_confidence_head:
        raise ValueError(
            f"`confidence_temperatures` is {temperatures}, but there is no confidence head to divide "
            "(`enable_confidence_head=False`). Leave it None."
        )


def _check_decoding_temperatures(keys: list[Any]) -> None:
    try:
        values = [float(key) for key in keys]
    except (TypeError, ValueError):
        values = [-1.0]
    if not values or not all(math.isfinite(value) and value >= 0 for value in values):
        raise ValueError(
            "`confidence_temperatures` as a dict must be keyed by decoding temperatures, numbers of at least 0 (0 is "
            f"greedy) such as '0' and '1.0', got {', '.join(map(repr, keys)) or 'none'}."
        )
    if len(set(values)) < len(values):
        raise ValueError(
            f"`confidence_temperatures` must name each decoding temperature once, got {', '.join(map(repr, keys))}."
        )


def _check_sharing(config: Any) -> None:
    width = config.target_hidden_size or config.hidden_size
    if width != config.hidden_size and (config.share_embedding or config.share_lm_head):
        raise ValueError(
            f"`target_hidden_size` ({width}) differs from `hidden_size` ({config.hidden_size}), so neither embedding "
            "nor LM head can be borrowed: set `share_embedding=False` and `share_lm_head=False`."
        )
    if config.draft_vocab_size is not None and config.share_lm_head:
        raise ValueError(
            f"`share_lm_head=True` with `draft_vocab_size` {config.draft_vocab_size}: the target's head has all of "
            "V's rows. Store the reduced head with the drafter (`share_lm_head=False`)."
        )


__all__ = ["check_choice", "check_config", "check_raw", "unknown_keys"]
