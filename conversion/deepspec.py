"""Reader of the DeepSpec layout (deepseek-ai/DeepSpec), whose configs carry the target's model type.

Routes on `architectures` and fields, never on a file's name: the published `dflash_*_block7` folders are
`Qwen3DSparkModel` with `markov_rank` 0. Tensor names are the ones `DSparkDrafter` uses, so weights load as they are.
"""

from __future__ import annotations

from typing import Any

from dspark.configuration_dspark import DSparkConfig

# Rotary keys a config inherits from the target's, which the reference's Qwen3 drafter does not read.
_TARGETS_ROPE = ("mrope_section", "mrope_interleaved", "partial_rotary_factor")

ARCHITECTURES = {"Qwen3DSparkModel": "qwen3", "Gemma4DSparkModel": "gemma4"}

_REQUIRED = (
    "block_size", "target_layer_ids", "mask_token_id", "num_target_layers", "markov_rank", "enable_confidence_head",
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "rms_norm_eps",
)  # fmt: skip


def recognises(config: dict[str, Any]) -> bool:
    """Whether a raw config.json is a DeepSpec drafter's."""
    return any(name in ARCHITECTURES for name in config.get("architectures") or ())


def read_config(config: dict[str, Any], *, source: str) -> DSparkConfig:
    """DeepSpec config.json to `DSparkConfig`.

    Args:
        config: The raw dict.
        source: Folder or Hub id, for messages.

    Raises:
        ValueError: A field the format requires is missing, or the drafter uses parts DSpark drafters do not have.
    """
    family = next(ARCHITECTURES[name] for name in config["architectures"] if name in ARCHITECTURES)
    required = [*_REQUIRED]
    if config.get("markov_rank"):
        required.append("markov_head_type")
    if config.get("enable_confidence_head"):
        required.append("confidence_head_with_markov")
    if family == "gemma4":
        required += ["global_head_dim", "num_global_key_value_heads"]
    missing = [field for field in required if config.get(field) is None]
    if family == "gemma4" and not config.get("attention_k_eq_v"):
        missing = [field for field in missing if field != "num_global_key_value_heads"]
    if missing:
        raise ValueError(
            f"{source} is a DeepSpec drafter whose config.json lacks {', '.join(missing)}. These decide what the "
            "tensors mean and have no safe default: restore them from the training config."
        )
    common = {
        "family": family,
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["intermediate_size"],
        "num_hidden_layers": config["num_hidden_layers"],
        "num_attention_heads": config["num_attention_heads"],
        "rms_norm_eps": config["rms_norm_eps"],
        "attention_bias": bool(config.get("attention_bias", False)),
        "max_position_embeddings": config.get("max_position_embeddings", 40960),
        "initializer_range": config.get("initializer_range", 0.02),
        "block_size": config["block_size"],
        "sample_from_anchor": True,
        "mask_token_id": config["mask_token_id"],
        "target_layer_ids": config["target_layer_ids"],
        "num_target_layers": config["num_target_layers"],
        "markov_rank": config["markov_rank"],
        "markov_head_type": config.get("markov_head_type") if config["markov_rank"] else "none",
        "enable_confidence_head": config["enable_confidence_head"],
        "confidence_head_with_markov": bool(config.get("confidence_head_with_markov", False)),
        "confidence_head_bias": True,
        "share_embedding": False,
        "share_lm_head": False,
        "target": {"model_type": config.get("target_model_type") or config.get("model_type")},
        "dtype": config.get("dtype") or config.get("torch_dtype"),
    }
    special = _gemma4_fields(config, source) if family == "gemma4" else _qwen3_fields(config, source)
    try:
        return DSparkConfig(**common, **special)
    except ValueError as error:
        raise ValueError(f"The config.json of {source} (a DeepSpec drafter's) is not valid. {error}") from error


def _qwen3_fields(config: dict[str, Any], source: str) -> dict[str, Any]:
    return {
        "num_key_value_heads": config["num_key_value_heads"],
        "head_dim": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        "hidden_act": config.get("hidden_act", "silu"),
        "rope_parameters": _rope(config, source),
    }


def _gemma4_fields(config: dict[str, Any], source: str) -> dict[str, Any]:
    for field in ("enable_moe_block", "hidden_size_per_layer_input"):
        if config.get(field):
            raise ValueError(
                f"{source}: Gemma 4 drafters have no {field.replace('_', ' ')}, but the config sets {field}="
                f"{config[field]}. It is not a drafter the reference could have trained."
            )
    k_eq_v = bool(config.get("attention_k_eq_v"))
    rope = (config.get("rope_parameters") or {}).get("full_attention")
    if rope is None:
        raise ValueError(f"{source}: `rope_parameters` has no entry for 'full_attention', the draft layers' type.")
    return {
        "num_key_value_heads": config["num_global_key_value_heads"] if k_eq_v else config["num_key_value_heads"],
        "head_dim": config["global_head_dim"],
        "hidden_act": config.get("hidden_activation", "gelu_pytorch_tanh"),
        "rope_parameters": rope,
        "attention_k_eq_v": k_eq_v,
        "final_logit_softcapping": config.get("final_logit_softcapping"),
        "embed_scale": float(config["hidden_size"]) ** 0.5,
    }


def _rope(config: dict[str, Any], source: str) -> dict[str, Any]:
    """Rotary parameters of the transformers 4 keys (`rope_theta`, `rope_scaling`) or the 5 key (`rope_parameters`)."""
    merged: dict[str, Any] = {}
    for name in ("rope_theta", "rope_scaling", "rope_parameters"):
        part = _set_keys({name: config.get(name)} if name == "rope_theta" else config.get(name))
        if any(merged.get(key, value) != value for key, value in part.items()):
            raise ValueError(
                f"{source}: `{name}` gives {part}, other keys of the config {merged}: they disagree. Only one can be "
                "what the drafter was trained with: correct the config."
            )
        merged |= part
    if "rope_theta" not in merged:
        raise ValueError(
            f"{source}: no `rope_theta`, neither flat nor under `rope_parameters`. A default would only be noticed at "
            "long context: add the value the drafter was trained with."
        )
    return {"rope_type": "default", **{key: value for key, value in merged.items() if key not in _TARGETS_ROPE}}


def _set_keys(part: dict[str, Any] | None) -> dict[str, Any]:
    """Set keys only, `type` (transformers 4) under its later name."""
    return {"rope_type" if key == "type" else key: value for key, value in (part or {}).items() if value is not None}
