"""Drafters and lookalikes that are known and cannot be run as a `DSparkDrafter`: how each is told, and why not.

Loading one as its relative would go through and draft wrongly; so they are named.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from .checkpoint import Checkpoint

_MLA = "its layers are multi-head latent attention, which draft layers here do not have"
_V4 = (
    "it is DeepSeek-V4's embedded drafter: latent attention, experts and hyper-connections inside the target's own "
    "checkpoint. Serve it with an engine that runs the target, e.g. `vllm serve TARGET --speculative-config "
    '\'{"method":"dspark","num_speculative_tokens":5}\'`'
)
_DFLASH2 = "it is DFlash 2: convolutions in the layers and a candidate selector, which is another model"
_XPRESS = "it is XPress: a refiner head iterates over the block, which is another model"
_DOMINO = "it is Domino: a GRU over the prefix replaces the sequential head, which is another model"
_LFM2 = "its layers are LFM2's, convolutions and interleaved rotary positions"
_LOG_SNR = "it is conditioned on a noise level (log-SNR) by an MLP, which is another model"
_SINKS = "its attention has learned sinks, which draft layers here do not have"
_HYPER = "it has hyper-connections (HyperDSpark), which is another model"

ARCHITECTURES: dict[str, str] = {
    "DeepseekV4DSparkModel": _MLA, "DeepseekV41DSparkModel": _MLA, "DSparkV41DraftModel": _V4,
    "KimiK3DSparkModel": _MLA,
    "K3DSparkModel": _MLA, "Glm5_2DSparkModel": _MLA, "MiniMaxM3DSparkModel": "its layers are MiniMax's",
    "Qwen3OmniDSparkModel": "it drafts for an omni-modal target, with positions of its own",
    "Lfm2DSparkDraftModel": _LFM2, "DominoDraftModel": _DOMINO, "DFlash2DraftModel": _DFLASH2,
    "XPressDraftModel": _XPRESS,
}  # fmt: skip
# Path in the config, test of its value, reason.
_KEYS: tuple[tuple[str, Any, str], ...] = (
    ("dspark_block_size", ..., _V4),
    ("dspark_target_layer_ids", ..., _V4),
    ("text_config.dspark_block_size", ..., _V4),
    ("speculators_model_type", "dflash2", _DFLASH2),
    ("speculators_model_type", "xpress", _XPRESS),
    ("dflash_config.projector_type", "domino", _DOMINO),
    ("dflash_config.selector_rank", ..., _DFLASH2),
    ("selector_rank", ..., _DFLASH2),
    ("attention_sink_bias", True, _SINKS),
    ("add_swa_attention_sink_bias", True, _SINKS),
    ("log_snr_conditioning", True, _LOG_SNR),
    ("hc_count", ..., _HYPER),
    ("rope_is_neox_style", False, "its rotary positions are interleaved, draft layers here turn halves"),
    ("enable_qwen35_gated_q_proj", True, "its queries carry an output gate, as Qwen3.5's, which is another layer"),
    ("quantization_config", ..., "its weights are quantised for one engine; load the unquantised drafter"),
)
_GGUF_KEYS: tuple[tuple[str, Any, str], ...] = (
    ("dflash.selector_rank", ..., _DFLASH2),
    ("dflash.conv_kernel_size", ..., _DFLASH2),
    ("dspark.dspark.log_snr_conditioning", True, _LOG_SNR),
    ("dspark.dspark.noise_token_id", ..., _V4),
)
TENSORS: tuple[tuple[str, str], ...] = (
    (r"^mtp\.\d+\.", _V4),
    (r"^(prefix_gru|embed_proj)\.", _DOMINO),
    (r"^candidate_selector\.|\.(attention_conv|mlp_conv)\.", _DFLASH2),
    (r"^refiner_head\.", _XPRESS),
    (r"^(log_snr_embed|dspark\.log_snr_fc\d)\.", _LOG_SNR),
    (
        r"^(layer_fusion|context_norm|hidden_correction)\b",
        "it is DFly: layer fusion and hidden correction, another model",
    ),
    (r"\b(sinks|attn_sinks|attention_sink_bias)$", _SINKS),
    (r"\.self_attn\.(q_a_proj|kv_a_proj_with_mqa|kv_b_proj)\.", _MLA),
    (r"(^|\.)hc_(attn|ffn|head)_", _HYPER),
    (r"^mask_hidden$", "it has a learned state for mask slots (mask_hidden), which the block here does not take"),
    (r"\.(weight_scale|weight_scale_2|input_scale|qweight|qzeros)$", "its weights are quantised for one engine"),
)


def reason_to_refuse(checkpoint: Checkpoint) -> str | None:
    """Why a known kind of checkpoint cannot be run, with all that gave it away; None: it is none of those."""
    found = [*_by_config(checkpoint), *_by_tensors(checkpoint)]
    if not found:
        return _gated_queries(checkpoint)
    why = found[0][0]
    return f"{why} ({'; '.join(sign for reason, sign in found if reason == why)})"


def _by_config(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Reasons and what gave them away: architectures and keys."""
    config = checkpoint.config
    for name in config.get("architectures") or []:
        if name in ARCHITECTURES:
            yield ARCHITECTURES[name], f"architectures: {name}"
    for path, wanted, why in _GGUF_KEYS if checkpoint.is_gguf else _KEYS:
        value = config.get(path) if checkpoint.is_gguf else _at(config, path)
        if value is not None and (wanted is ... or value == wanted):
            yield why, path if isinstance(value, dict) else f"{path}: {value!r}"


def _by_tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    for pattern, why in TENSORS:
        names = sorted(name for name in checkpoint.tensors or () if re.search(pattern, name))
        if names:
            yield why, f"tensors {names[0]} to {names[-1]}" if len(names) > 1 else f"tensor {names[0]}"


def _gated_queries(checkpoint: Checkpoint) -> str | None:
    tensors = checkpoint.tensors or {}
    query, norm = (tensors.get(f"layers.0.self_attn.{name}.weight") for name in ("q_proj", "q_norm"))
    output = tensors.get("layers.0.self_attn.o_proj.weight")
    if None in (query, norm, output) or query is None or output is None or len(query.shape) != 2:
        return None
    if query.shape[0] == 2 * output.shape[-1]:
        return f"its queries carry an output gate, as Qwen3.5's ({query.key} has twice the rows o_proj has columns)"
    return None


def _at(config: Mapping[str, Any], path: str) -> Any:
    value: Any = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


__all__ = ["ARCHITECTURES", "TENSORS", "reason_to_refuse"]
