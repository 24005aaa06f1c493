"""The flat layout engines read (vLLM, SGLang, mlx-dspark, TokenSpeed, TensorRT-LLM): DeepSpec's keys and then some.

Head settings may be at the top or in `dspark_config` or `dflash_config`; embedding and LM head are optional; a reduced
vocabulary has offsets in `d2t`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import specforge
from .checkpoint import Checkpoint
from .deepspec import ARCHITECTURES, ENGINE_KEYS
from .names import FLAT, map_names
from .parts import (
    BACKBONE,
    NO_SCALE,
    REST,
    backbone,
    full_attention,
    heads,
    layer_kinds,
    offset_vocabulary,
    tables,
    target_width,
)
from .reading import Reader
from .record import Record

NAME = "flat"
_INNER = ("", "dspark_config.", "dflash_config.")
_BACKBONES = ("Qwen3ForCausalLM",)  # TensorRT-LLM names the backbone


def recognises(checkpoint: Checkpoint) -> bool:
    """Whether it is a Qwen3 drafter's config with keys that only engines' layouts have."""
    config = checkpoint.config
    if checkpoint.is_gguf or "speculators_model_type" in config or specforge.recognises(checkpoint):
        return False
    names = config.get("architectures") or []
    if any(ARCHITECTURES.get(name) == "qwen3" for name in names):
        return any(config.get(key) is not None for key in ENGINE_KEYS)
    has_block = config.get("block_size") is not None and isinstance(config.get("dflash_config"), dict)
    return has_block and any(name in _BACKBONES for name in names)


def read(checkpoint: Checkpoint, choices: Mapping[str, Any]) -> Record:
    """Record of a folder in an engine's layout.

    Raises:
        ValueError: A field is missing or said twice, or engines read it in different ways.
    """
    reader = Reader(NAME, checkpoint, choices)
    stored = checkpoint.tensors
    reader.tensors = None if stored is None else map_names(reader.source, stored, FLAT, reader.ignored)
    places = {
        name: [prefix + name for prefix in _INNER] for name in ("block_size", "mask_token_id", "target_layer_ids")
    }
    reader.require([*map(tuple, places.values()), tuple(f"{prefix}markov_rank" for prefix in _INNER), *BACKBONE])
    for name, paths in places.items():
        reader.take(name, *paths)
    reader.take("vocab_size")
    reader.take("num_target_layers", rule=(None, "not in the config; known with the target"))
    backbone(reader)
    reader.rope(checkpoint.config)
    _attention(reader)
    _anchor(reader)
    held = reader.tensors
    rules: dict[str, tuple[Any, str]] = {}
    if held is not None:
        has_confidence = any(name.startswith("confidence_head.") for name in held)
        rules["enable_confidence_head"] = (has_confidence, "enabled where confidence_head.* is stored")
        rules["confidence_head_with_markov"] = (_sees_markov(reader), "by the columns of confidence_head.proj.weight")
    heads(reader, under=_INNER, rules=rules)
    offset_vocabulary(reader, stored, reader.count("draft_vocab_size"))
    tables(reader, without=(False, reader.fields["draft_vocab"].value is not None))
    target_width(reader)
    _scales(reader)
    reader.take("confidence_temperatures", rule=(None, "none in the config"))
    reader.fill({**NO_SCALE, **REST})
    return reader.record()


def _sees_markov(reader: Reader) -> bool:
    proj = (reader.tensors or {}).get("confidence_head.proj.weight")
    return proj is not None and proj.shape[-1] > reader.fields["hidden_size"].value


def _anchor(reader: Reader) -> None:
    """`sample_from_anchor`, also written as mlx-dspark's `logits_start` (0: the anchor slot drafts)."""
    flag, start = reader.flag("sample_from_anchor"), reader.get("logits_start")
    if start not in (None, 0, 1) or isinstance(start, bool):
        raise ValueError(f"{reader.source}: `logits_start` must be 0 (the anchor slot drafts) or 1, got {start!r}.")
    if flag is not None and start is not None and flag != (start == 0):
        raise ValueError(
            f"{reader.source}: `sample_from_anchor` {flag} and `logits_start` {start} disagree. Correct one of them."
        )
    if flag is None and start is not None:
        reader.set("sample_from_anchor", start == 0, "config.json: logits_start")
        return
    reader.take("sample_from_anchor", rule=(True, "flat configs draft from the anchor slot unless they say otherwise"))


def _attention(reader: Reader) -> None:
    flags = [reader.flag(key) for key in ("is_causal", "dflash_query_causal", "dflash_config.causal")]
    is_causal = any(flags)
    windows = layer_kinds(reader)
    if not any(windows) and not is_causal:
        full_attention(reader, "config.json: layer_types; rule of the format: bidirectional blocks")
        return
    if "attention_windows" not in reader.choices or "causal_in_block" not in reader.choices:
        raise ValueError(
            f"{reader.source} has layers with windows {windows} or causal blocks, and engines that read this layout "
            "cut them in different ways. Say how the drafter was trained: pass `attention_windows`, `window_rule` and "
            "`causal_in_block` (see `DSparkConfig`)."
        )
    full_attention(reader, "replaced by the caller")


def _scales(reader: Reader) -> None:
    reader.take("final_logit_softcapping", rule=(None, "no cap unless the config has one"))
    scale = reader.take("logit_scale", rule=(1.0, "no scale unless the config has one"))
    if scale != 1 and reader.fields["markov_rank"].value:
        raise ValueError(
            f"{reader.source}: `logit_scale` {scale} with a Markov head: engines apply it before or after the bias. "
            "Pass `logit_scale=1.0` and fold it into the weights."
        )


__all__ = ["NAME", "read", "recognises"]
