"""Writing transformers' own DFlash assistant (`muse_glimmer_assistant`): no heads, no draft from the anchor slot."""

from __future__ import annotations

from . import commands
from .hf_keys import qwen3_keys
from .limits import Limits
from .muse import MODEL_TYPE, NAME
from .record import Record
from .writing import HowToWrite, Layout, Variant, folder_writer, plain_tensors

_LIMITS = Limits(
    heads=("none",), anchors=(False,), has_confidence=False, taps_embedding=True, window_rule="abs_all",
    tables="borrowed", has_bias=False, required=(),
)  # fmt: skip
_RENAMED = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}
_KEYS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "hidden_act", "rms_norm_eps", "max_position_embeddings", "attention_dropout", "rope_parameters", "layer_types",
)  # fmt: skip


def _layout(record: Record, _how: HowToWrite) -> Layout:
    keys = qwen3_keys(record)
    config = {
        "architectures": ["MuseGlimmerAssistantModel"], "model_type": MODEL_TYPE, **{key: keys[key] for key in _KEYS},
        **({} if keys["sliding_window"] is None else {"sliding_window": keys["sliding_window"]}),
        **{name: record[name] for name in ("block_size", "mask_token_id", "target_layer_ids")},
        # Those of its own target are the class's defaults.
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    return Layout(config, {_renamed(name): tensor for name, tensor in plain_tensors(record).items()})


def _renamed(name: str) -> str:
    prefix = next((old for old in _RENAMED if name.startswith(old)), None)
    return name if prefix is None else _RENAMED[prefix] + name.removeprefix(prefix)


WRITER = folder_writer(
    NAME, "transformers' DFlash (`speculation_type=\"dflash\"`)", (NAME,),
    Variant("DFlash", _LIMITS, _layout, commands.transformers_dflash),
)  # fmt: skip

__all__ = ["WRITER"]
