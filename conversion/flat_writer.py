"""Writing what engines read: one flat config with every key in every place one of them looks it up.

vLLM, SGLang, TensorRT-LLM and mlx-dspark differ in what they can run, not in how it is written. Gemma 4 goes to vLLM
and mlx-dspark in DeepSpec's own layout, a headless drafter with a silent anchor to vLLM and SGLang as DFlash.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from . import commands
from .deepspec_writer import GEMMA4, NUM_ANCHORS, gemma4_layout, is_gemma4
from .hf_keys import head_keys, is_dflash, qwen3_keys
from .limits import Limits
from .record import Record
from .sglang_sts import SglangSts, to_json
from .writing import HowToWrite, Layout, Variant, folder_writer, offset_tensors, plain_tensors

_SILU = ("silu",)
_VLLM = Limits(heads=("vanilla",), has_draft_vocab=True, taps_embedding=True, is_narrow=True, activations=_SILU)
_SGLANG = Limits(heads=("vanilla", "gated", "rnn"), has_draft_vocab=True, tables="borrowed", activations=_SILU)
_TENSORRT = Limits(heads=("vanilla",), anchors=(True,), activations=_SILU)
_MLX = Limits(
    heads=("none", "vanilla"), has_draft_vocab=True, activations=_SILU, rope_types=("default",),
)  # fmt: skip
_DFLASH = Limits(
    heads=("none",), anchors=(False,), has_confidence=False, tables="borrowed", activations=_SILU,
    required=("vocab_size", "num_target_layers"),
)  # fmt: skip
_VLLM_GEMMA4 = replace(GEMMA4, heads=("vanilla",))
_MLX_GEMMA4 = replace(GEMMA4, heads=("none", "vanilla"), taps_embedding=False)


def superset(record: Record) -> dict[str, Any]:
    """The keys of all engines; ids stand at the top and in `dflash_config`, as each looks in another place."""
    vocab = record["draft_vocab"]
    return {
        "architectures": ["Qwen3DSparkModel"],
        **qwen3_keys(record),
        "block_size": record["block_size"],
        "sample_from_anchor": record["sample_from_anchor"],
        "mask_token_id": record["mask_token_id"],
        "target_layer_ids": record["target_layer_ids"],
        "num_target_layers": record["num_target_layers"],
        "target_hidden_size": record["target_hidden_size"] or record["hidden_size"],
        "draft_vocab_size": record["vocab_size"] if vocab is None else len(vocab),
        "num_anchors": NUM_ANCHORS,
        **head_keys(record),
        "dflash_config": {
            "mask_token_id": record["mask_token_id"], "target_layer_ids": record["target_layer_ids"],
        },
    }  # fmt: skip


def _layout(record: Record, _how: HowToWrite) -> Layout:
    return Layout(superset(record), {**plain_tensors(record), **offset_tensors(record)})


def _sglang_layout(record: Record, how: HowToWrite) -> Layout:
    layout = _layout(record, how)
    rows = record["confidence_temperatures"]
    if rows is None:
        return layout
    texts = {name: to_json(SglangSts(tuple(row))) for name, row in commands.sts_files(rows).items()}
    return replace(layout, files=texts)


def _tensorrt_layout(record: Record, how: HowToWrite) -> Layout:
    """Its class is found by the backbone's name; the settings of the server go beside it."""
    layout = _layout(record, how)
    yaml = (
        "speculative_config:\n  decoding_type: DSpark\n"
        f"  max_draft_len: {record.num_draft_tokens}\n  speculative_model: {json.dumps(how.folder)}\n"
    )
    config = {**layout.config, "architectures": ["Qwen3ForCausalLM"]}
    return replace(layout, config=config, files={commands.TENSORRT_FILE: yaml})


def _mlx_layout(record: Record, how: HowToWrite) -> Layout:
    layout = _layout(record, how)
    keys = {"logits_start": 0 if record["sample_from_anchor"] else 1, "has_lm_head": record["has_lm_head"]}
    return replace(layout, config={**layout.config, **keys})


def _dflash_layout(record: Record, _how: HowToWrite) -> Layout:
    config = {
        "architectures": ["DFlashDraftModel"],
        **qwen3_keys(record),
        "block_size": record["block_size"],
        "num_target_layers": record["num_target_layers"],
        "is_causal": False,
        "dflash_config": {
            "mask_token_id": record["mask_token_id"], "target_layer_ids": record["target_layer_ids"],
            "block_size": record["block_size"],
        },
    }  # fmt: skip
    return Layout(config, plain_tensors(record))


def _vllm_note(record: Record) -> str | None:
    if -1 in record["target_layer_ids"]:
        return "it taps the embedding output (layer id -1) by its rules, but nobody is known to have tried"
    return None


def _vllm_gemma_note(record: Record) -> str | None:
    parts = ["it leaves out the confidence head"] if record["enable_confidence_head"] else []
    if record["final_logit_softcapping"] is not None:
        parts.append("it caps the sequential head's bias too, so drafts can differ a little (the output does not)")
    return "; ".join(parts) or None


VLLM = folder_writer(
    "vllm", "vLLM", ("flat", "deepspec", "zlab-dflash"),
    Variant("Gemma 4", _VLLM_GEMMA4, gemma4_layout, commands.vllm, fits=is_gemma4, note=_vllm_gemma_note),
    Variant("DFlash", _DFLASH, _dflash_layout, commands.vllm_dflash, fits=is_dflash),
    Variant("DSpark", _VLLM, _layout, commands.vllm, note=_vllm_note),
)  # fmt: skip
SGLANG = folder_writer(
    "sglang", "SGLang", ("flat", "zlab-dflash"),
    Variant("DFlash", _DFLASH, _dflash_layout, commands.sglang_dflash, fits=is_dflash),
    Variant("DSpark", _SGLANG, _sglang_layout, commands.sglang),
)  # fmt: skip
TENSORRT_LLM = folder_writer(
    "tensorrt-llm", "TensorRT-LLM", ("flat",), Variant("DSpark", _TENSORRT, _tensorrt_layout, commands.tensorrt_llm)
)
MLX_DSPARK = folder_writer(
    "mlx-dspark", "mlx-dspark", ("flat", "deepspec"),
    Variant("Gemma 4", _MLX_GEMMA4, gemma4_layout, commands.mlx_dspark, fits=is_gemma4),
    Variant("DSpark", _MLX, _mlx_layout, commands.mlx_dspark),
)  # fmt: skip

__all__ = ["MLX_DSPARK", "SGLANG", "TENSORRT_LLM", "VLLM", "superset"]
