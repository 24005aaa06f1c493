"""Small drafters of every kind that a format may or may not hold, as records and folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from dspark import DSparkDrafter
from tests import small

ROWS = 310  # of a vocabulary with fewer tokens
_TAPS = {"target_layer_ids": [0, 1, 2], "raw_target_embedding": True}
_DFLASH = {
    "markov_rank": 0, "enable_confidence_head": False, "sample_from_anchor": False,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}


def _windows(rule: str, *, causal: bool, **fields: Any) -> dict[str, Any]:
    return {
        "attention_windows": [5, None], "window_rule": rule, "causal_in_block": [True, False] if causal else None,
        **fields,
    }  # fmt: skip


# Name to the fields in which it differs from a vanilla drafter that borrows the target's tables as they are stored.
KINDS: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "rank 0": {"markov_rank": 0, "enable_confidence_head": False},
    "rank 0, confidence": {"markov_rank": 0},
    "dflash": _DFLASH,
    "vanilla, silent anchor": {"sample_from_anchor": False},
    "gated, silent anchor": {"markov_head_type": "gated", "sample_from_anchor": False},
    "rnn, silent anchor": {"markov_head_type": "rnn", "sample_from_anchor": False},
    "rank 0, confidence, silent anchor": {"markov_rank": 0, "sample_from_anchor": False},
    "plain confidence": {"confidence_head_with_markov": False},
    "no confidence": {"enable_confidence_head": False},
    "reduced": {"draft_vocab_size": len(small.DRAFT_IDS)},
    "reduced rnn": {"draft_vocab_size": len(small.DRAFT_IDS), "markov_head_type": "rnn"},
    "reduced dflash": {**_DFLASH, "draft_vocab_size": len(small.DRAFT_IDS)},
    "embedding tap": {"target_layer_ids": [-1, 0, 2]},
    "windows from anchor": _windows("ctx_from_anchor", causal=True),
    "windows from anchor, both ways": _windows("ctx_from_anchor", causal=False),
    "windows per slot": _windows("per_slot_ctx", causal=True),
    "windows per slot, dflash": _windows("per_slot_ctx", causal=True, **_DFLASH),
    "windows over all": _windows("per_slot_all", causal=True),
    "windows both ways, dflash": _windows("abs_all", causal=False, **_DFLASH),
    "two windows": {"attention_windows": [5, 7], "window_rule": "ctx_from_anchor", "causal_in_block": [True, True]},
    "causal": {"causal_in_block": [False, True]},
    "own tables": {"share_embedding": False, "share_lm_head": False, "raw_target_embedding": False},
    "own tables, dflash": {
        **_DFLASH, "share_embedding": False, "share_lm_head": False, "raw_target_embedding": False,
    },
    "narrow": {
        "hidden_size": 24, "target_hidden_size": small.WIDTH, "share_embedding": False, "share_lm_head": False,
        "raw_target_embedding": False,
    },
    "bias": {"attention_bias": True},
    "as many key heads": {"num_key_value_heads": 2},
    "no confidence bias": {"confidence_head_bias": False},
    "fc bias": {"fc_bias": True},
    "yarn": {"rope_parameters": _YARN},
    "gelu": {"hidden_act": "gelu_pytorch_tanh"},
    "scaled embedding": {"embed_scale": 2.0},
    "scaled logits": {"logit_scale": 0.5},
    "soft cap": {"final_logit_softcapping": 5.0},
    "as the target sees it": {"raw_target_embedding": False},
    "llama": {"family": "llama"},
    "temperatures": {"confidence_temperatures": {"0": [1.0, 1.1, 1.2, 1.3], "1": [0.9, 0.8, 0.7, 0.6]}},
}  # fmt: skip


def drafter(kind: str) -> Any:
    """A drafter for `small.target()`; the same each time."""
    fields = {**_TAPS, **KINDS[kind]}
    return small.drafter(fields.pop("family", "qwen3"), **fields)


def saved(kind: str, folder: Path) -> Path:
    """Its folder in our own layout."""
    drafter(kind).save_pretrained(folder)
    return folder


def loaded(folder: Path) -> Any:
    """Any drafter in float32, its weights where the allocator puts them: the last bit of a product hangs on that."""
    model = DSparkDrafter.from_pretrained(folder, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def saved_target(folder: Path) -> Path:
    """The target's folder."""
    small.target().save_pretrained(folder)
    return folder


def saved_target_with_tokenizer(folder: Path) -> Path:
    """A target of `ROWS` rows with a byte-level BPE tokenizer of fewer tokens."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=alphabet)
    raw.train_from_iterator(["the cat sat on the mat"] * 3, trainer)
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>").save_pretrained(folder)
    small.target(vocab_size=ROWS).save_pretrained(folder)
    return folder


def copies_of_the_target(folder: Path) -> Path:
    """The vanilla drafter with copies of the target's tables."""
    model, target = drafter("own tables"), small.target()
    with torch.no_grad():
        model.embed_tokens.weight.copy_(target.get_input_embeddings().weight)
        model.lm_head.weight.copy_(target.get_output_embeddings().weight)
    model.save_pretrained(folder)
    return folder
