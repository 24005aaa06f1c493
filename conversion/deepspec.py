"""DeepSpec's own layout (deepseek-ai/DeepSpec, and NeMo AutoModel, which writes the same): flat keys, native names.

Routes on `architectures` and fields, never on a file's name: the published `dflash_*_block7` folders are
`Qwen3DSparkModel` with `markov_rank` 0. Tensor names are the ones `DSparkDrafter` uses, so weights load as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .checkpoint import Checkpoint
from .names import NATIVE, map_names
from .parts import BACKBONE, NO_SCALE, REST, backbone, full_attention, heads, tables, target_width
from .reading import Reader
from .record import Record

NAME = "deepspec"
ARCHITECTURES = {"Qwen3DSparkModel": "qwen3", "Gemma4DSparkModel": "gemma4"}
# What this layout's own writer never puts into a config; engines' layouts with the same architecture do.
ENGINE_KEYS = (
    "dflash_config", "dspark_config", "sample_from_anchor", "logits_start", "draft_vocab_size", "has_lm_head",
    "has_embed_tokens",
)  # fmt: skip
_REQUIRED = (
    "block_size", "target_layer_ids", "mask_token_id", "num_target_layers", "markov_rank", "enable_confidence_head",
)  # fmt: skip


def recognises(checkpoint: Checkpoint) -> bool:
    """Whether it is DeepSpec's: its architecture, and none of the keys that engines add."""
    config = checkpoint.config
    is_theirs = any(name in ARCHITECTURES for name in config.get("architectures") or ())
    return is_theirs and all(config.get(key) is None for key in ENGINE_KEYS)


def read(checkpoint: Checkpoint, choices: Mapping[str, Any]) -> Record:
    """Record of a DeepSpec folder.

    Raises:
        ValueError: A field the format requires is missing, or the drafter uses parts DSpark drafters do not have.
    """
    reader = Reader(NAME, checkpoint, choices)
    config = checkpoint.config
    family = next(ARCHITECTURES[name] for name in config["architectures"] if name in ARCHITECTURES)
    reader.require(_required(config, family))
    stored = checkpoint.tensors
    reader.tensors = None if stored is None else map_names(reader.source, stored, NATIVE, reader.ignored)
    reader.set("family", family, f"config.json: architectures {config['architectures']}")
    for name in ("vocab_size", "block_size", "target_layer_ids", "mask_token_id", "num_target_layers"):
        reader.take(name)
    backbone(reader)
    if family == "gemma4":
        _gemma4(reader)
    else:
        reader.rope(config)
    full_attention(reader, "rule of the format: whole context, bidirectional blocks")
    reader.set("sample_from_anchor", True, "rule of the format: the anchor slot drafts")
    heads(reader)
    tables(reader, without=(True, True))
    # A folder that lost its copies of the target's tables is told so, not taken for one that borrows them.
    for name in ("has_embed", "has_lm_head"):
        reader.set(name, True, "rule of the format: copies of the target's tables are stored")
    reader.set("raw_target_embedding", False, "rule of the format: the embedding is stored")
    target_width(reader)
    reader.set("draft_vocab", None, "rule of the format: the whole vocabulary")
    kind = config.get("target_model_type") or config.get("model_type")
    reader.set("target", {"model_type": kind}, "config.json: target_model_type or model_type")
    reader.fill({**NO_SCALE, **REST})
    return reader.record()


def _required(config: Mapping[str, Any], family: str) -> list[str]:
    required = [*_REQUIRED, *BACKBONE]
    if config.get("markov_rank"):
        required.append("markov_head_type")
    if config.get("enable_confidence_head"):
        required.append("confidence_head_with_markov")
    if family == "gemma4":
        required.append("global_head_dim")
        required += ["num_global_key_value_heads"] if config.get("attention_k_eq_v") else []
    return required


def _gemma4(reader: Reader) -> None:
    """What differs for Gemma 4: the geometry of its global layers, scaled embeddings, a soft cap.

    Raises:
        ValueError: Parts that no drafter of the reference has, or no rotary parameters for its layers.
    """
    config, source = reader.config, reader.source
    for field in ("enable_moe_block", "hidden_size_per_layer_input"):
        if config.get(field):
            raise ValueError(
                f"{source}: Gemma 4 drafters have no {field.replace('_', ' ')}, but the config sets {field}="
                f"{config[field]}. It is not a drafter the reference could have trained."
            )
    rope = reader.get("rope_parameters.full_attention")
    if rope is None:
        raise ValueError(f"{source}: `rope_parameters` has no entry for 'full_attention', the draft layers' type.")
    reader.set("rope_parameters", rope, "config.json: rope_parameters.full_attention")
    k_eq_v = bool(reader.flag("attention_k_eq_v"))
    reader.set("attention_k_eq_v", k_eq_v, "config.json: attention_k_eq_v")
    reader.take("num_key_value_heads", "num_global_key_value_heads" if k_eq_v else "num_key_value_heads")
    reader.take("head_dim", "global_head_dim")
    reader.take("hidden_act", "hidden_activation", rule=("gelu_pytorch_tanh", "Gemma 4's activation"))
    width = float(reader.fields["hidden_size"].value)
    reader.set("embed_scale", width**0.5, "rule of the format: Gemma 4 scales by the root of hidden_size")
    reader.take("final_logit_softcapping", rule=(None, "no cap unless the config has one"))


__all__ = ["ARCHITECTURES", "ENGINE_KEYS", "NAME", "read", "recognises"]
