"""Writing DeepSpec's layout: flat keys, copies of the target's tables, every slot drafts.

Engines load it as it is, so their writers use it where it is all they read (Gemma 4).
"""

from __future__ import annotations

from typing import Any

from . import commands
from .hf_keys import head_keys, qwen3_keys
from .limits import Limits
from .record import Record
from .writing import HowToWrite, Layout, Variant, folder_writer, plain_tensors

NUM_ANCHORS = 512  # read in training only, but the model's `__init__` wants it
_KNOWN = ("vocab_size", "num_target_layers")
QWEN3 = Limits(anchors=(True,), taps_embedding=True, tables="stored", required=_KNOWN)
GEMMA4 = Limits(
    families=("gemma4",), anchors=(True,), taps_embedding=True, tables="stored", gemma=True, required=_KNOWN
)
# What Gemma 4's config has under other names, or not at all.
_QWEN3_ONLY = (
    "model_type", "hidden_act", "rope_theta", "rope_scaling", "rope_parameters", "use_sliding_window",
    "max_window_layers",
)  # fmt: skip


def qwen3_layout(record: Record, _how: HowToWrite) -> Layout:
    """A Qwen3 drafter."""
    config = {"architectures": ["Qwen3DSparkModel"], **qwen3_keys(record), **drafter_keys(record)}
    return Layout(config, plain_tensors(record))


def gemma4_layout(record: Record, _how: HowToWrite) -> Layout:
    """A Gemma 4 drafter: the geometry of the target's global layers, under the keys these have there."""
    shared = {key: value for key, value in qwen3_keys(record).items() if key not in _QWEN3_ONLY}
    config = {
        "architectures": ["Gemma4DSparkModel"], "model_type": "gemma4_text", **shared,
        "global_head_dim": record["head_dim"], "num_global_key_value_heads": record["num_key_value_heads"],
        "attention_k_eq_v": record["attention_k_eq_v"], "hidden_activation": record["hidden_act"],
        "rope_parameters": {"full_attention": record["rope_parameters"]},
        "final_logit_softcapping": record["final_logit_softcapping"], "enable_moe_block": False,
        "hidden_size_per_layer_input": 0, "target_model_type": "gemma4", "target_text_model_type": "gemma4_text",
        **drafter_keys(record),
    }  # fmt: skip
    return Layout(config, plain_tensors(record))


def drafter_keys(record: Record) -> dict[str, Any]:
    """What a drafter's config has beside its layers'; keys that say nothing are left out, as the reference does."""
    keys = head_keys(record)
    if not record["markov_rank"]:
        del keys["markov_head_type"]
    if not record["enable_confidence_head"]:
        del keys["confidence_head_with_markov"]
    names = ("block_size", "mask_token_id", "target_layer_ids", "num_target_layers")
    return {**{name: record[name] for name in names}, "num_anchors": NUM_ANCHORS, **keys}


def is_gemma4(record: Record) -> bool:
    """Whether its layers are Gemma 4's."""
    return record["family"] == "gemma4"


WRITER = folder_writer(
    "deepspec", "DeepSpec, NeMo AutoModel", ("deepspec",),
    Variant("Gemma 4", GEMMA4, gemma4_layout, commands.vllm_or_ours, fits=is_gemma4),
    Variant("Qwen3", QWEN3, qwen3_layout, commands.vllm_or_ours),
)  # fmt: skip

__all__ = ["GEMMA4", "QWEN3", "WRITER", "drafter_keys", "gemma4_layout", "is_gemma4", "qwen3_layout"]
