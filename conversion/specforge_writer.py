"""Writing SpecForge's layout: heads in `dflash_config`, tables always the target's, the kind decides on the anchor.

Head keys stand at the top too, where SGLang looks for them; both copies are the same.
"""

from __future__ import annotations

from typing import Any

from . import commands
from .hf_keys import head_keys, is_dflash, qwen3_keys
from .limits import Limits
from .record import Record
from .writing import HowToWrite, Layout, Variant, folder_writer, plain_tensors

_KNOWN = ("vocab_size", "num_target_layers")
_DSPARK = Limits(anchors=(True,), window_rule="per_slot_ctx", causal="always", tables="borrowed", required=_KNOWN)
_DFLASH = Limits(
    heads=("none",), anchors=(False,), has_confidence=False, window_rule="per_slot_ctx", causal="always",
    tables="borrowed", required=_KNOWN,
)  # fmt: skip


def _config(record: Record, inner: dict[str, Any], architecture: str) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        **qwen3_keys(record),
        "block_size": record["block_size"],
        "num_target_layers": record["num_target_layers"],
        "draft_vocab_size": record["vocab_size"],
        "dflash_config": {
            # Its classes refuse the one for the other.
            "attention_mode": "gqa" if record["num_key_value_heads"] < record["num_attention_heads"] else "mha",
            "mask_token_id": record["mask_token_id"],
            "target_layer_ids": record["target_layer_ids"],
            **inner,
        },
    }


def _dspark(record: Record, _how: HowToWrite) -> Layout:
    heads = head_keys(record)
    inner = {"projector_type": "dspark", "confidence_head_alpha": float(record["enable_confidence_head"]), **heads}
    return Layout({**_config(record, inner, "DSparkDraftModel"), **heads}, plain_tensors(record))


def _dflash(record: Record, _how: HowToWrite) -> Layout:
    return Layout(_config(record, {}, "DFlashDraftModel"), plain_tensors(record))  # no projector_type: DFlash


WRITER = folder_writer(
    "specforge", "SpecForge, SGLang", ("specforge",),
    Variant("DFlash", _DFLASH, _dflash, commands.sglang_dflash, fits=is_dflash),
    Variant("DSpark", _DSPARK, _dspark, commands.sglang),
)  # fmt: skip

__all__ = ["WRITER"]
