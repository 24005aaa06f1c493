"""Tiny random targets of every family we know, and the table of what a drafter does for each.

`SUPPORT` is the single source: `decoding/test_targets.py` has one test per cell, and `python -m tests.zoo` prints the
table as Markdown for the README. Weights are scaled up so that texts are varied: a model that repeats one token agrees
with any mistake.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import GenerationConfig, PreTrainedModel

VOCAB = 96
WINDOW = 8  # of every sliding-window layer: far shorter than the texts
IMAGE, IMAGE_START, IMAGE_END = VOCAB - 5, VOCAB - 4, VOCAB - 3
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Target:
    """How to build one tiny target.

    Attributes:
        model: Class in `transformers`; its config is the class's own.
        fields: Differences to the common sizes of the text decoder.
        nested: Config fields beside `text_config` of a multimodal model; None for a text model.
        images: Turns random ids into a prompt with an image, for models that look at one.
        attention: Attention implementations, the one most tests use first.
        scale, embedding_scale, seed: Factors on matrices and embeddings, and where weights start.
    """

    model: str
    fields: dict[str, Any] = field(default_factory=dict)
    nested: dict[str, Any] | None = None
    images: Callable[[torch.Tensor], dict[str, torch.Tensor]] | None = None
    attention: tuple[str, ...] = ("sdpa", "eager")
    scale: float = 20.0
    embedding_scale: float = 3.0
    seed: int = 0

    @property
    def absent(self) -> str | None:
        """Why this transformers cannot build it, or None."""
        if hasattr(transformers, self.model):
            return None
        return f"transformers {transformers.__version__} has no {self.model}"


_MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_SLIDING = {
    "head_dim": 8,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}
_DELTA = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
_MAMBA_2 = {"mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16}
_GEMMA = {**_SLIDING, "query_pre_attn_scalar": 8}
_GEMMA_4 = {
    **_SLIDING,
    "global_head_dim": 16,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
}
_GEMMA_4_SHARED = {
    **_SLIDING,
    "num_hidden_layers": 6,
    "layer_types": [*_SLIDING["layer_types"], "sliding_attention", "full_attention"],
    "global_head_dim": 16,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 4,
    "num_kv_shared_layers": 2,
}
_MLA = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
}  # fmt: skip
# Many index heads: with few, most scores are exactly 0 and the library's choice among ties depends on the pass.
_SPARSE = {"head_dim": 8, "index_topk": 6, "index_head_dim": 16, "index_n_heads": 16}
_MROPE = {"head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
_QWEN_VISION = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4,
    "window_size": 16, "fullatt_block_indexes": [1], "deepstack_visual_indexes": [0], "num_position_embeddings": 16,
}  # fmt: skip
_PATCH_VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4, "projection_dim": 16,
}  # fmt: skip


def _with_image(ids: torch.Tensor, num_tokens: int = 4) -> torch.Tensor:
    ids = ids.clone()
    ids[:, 1] = IMAGE_START
    ids[:, 2 : 2 + num_tokens] = IMAGE
    ids[:, 2 + num_tokens] = IMAGE_END
    return ids


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _qwen_image(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    ids = _with_image(ids)
    return {
        "input_ids": ids,
        "mm_token_type_ids": (ids == IMAGE).int(),
        "pixel_values": _noise(16, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }


def _llava_image(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": _with_image(ids), "pixel_values": _noise(1, 3, 8, 8)}


def _gemma_image(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    ids = _with_image(ids)
    return {"input_ids": ids, "token_type_ids": (ids == IMAGE).long(), "pixel_values": _noise(1, 3, 8, 8)}


_QWEN_IDS = {
    "image_token_id": IMAGE, "vision_start_token_id": IMAGE_START, "vision_end_token_id": IMAGE_END,
    "video_token_id": VOCAB - 2,
}  # fmt: skip

TARGETS: dict[str, Target] = {
    "Llama": Target("LlamaForCausalLM", {"head_dim": 8}),
    "Qwen2": Target("Qwen2ForCausalLM"),
    "Qwen3": Target("Qwen3ForCausalLM", {"head_dim": 8}),
    "Qwen3-MoE": Target("Qwen3MoeForCausalLM", {"head_dim": 8, **_MOE}),
    "Mixtral": Target("MixtralForCausalLM", {"head_dim": 8, "sliding_window": None, **_MOE}),
    "DeepSeek-V3": Target("DeepseekV3ForCausalLM", _MLA),
    "DeepSeek-V3.2 (sparse)": Target("DeepseekV32ForCausalLM", {**_MLA, **_SPARSE}),
    "Phi-3": Target("Phi3ForCausalLM"),
    "Phi-4 (partial rotary)": Target(
        "Phi3ForCausalLM",
        {
            "num_attention_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
        },
    ),
    "OLMo": Target("OlmoForCausalLM"),
    "OLMo 2": Target("Olmo2ForCausalLM", scale=3.0, seed=4),
    "GPT-NeoX": Target("GPTNeoXForCausalLM", embedding_scale=1.0, seed=4),
    "GPT-2": Target("GPT2LMHeadModel", {"n_inner": 48}),
    "Bloom (ALiBi)": Target("BloomForCausalLM", attention=("eager",), scale=8.0, embedding_scale=1.0, seed=4),
    "MPT (ALiBi)": Target("MptForCausalLM", attention=("eager",), embedding_scale=1.0, seed=1),
    "Falcon (ALiBi)": Target("FalconForCausalLM", {"alibi": True}, scale=3.0, seed=2),
    "LLaVA": Target(
        "LlavaForConditionalGeneration",
        {"model_type": "llama"},
        {"vision_config": {"model_type": "clip_vision_model", **_PATCH_VISION}, "image_token_id": IMAGE},
        _llava_image,
    ),
    "Qwen2.5-VL": Target(
        "Qwen2_5_VLForConditionalGeneration", _MROPE, {"vision_config": _QWEN_VISION, **_QWEN_IDS}, _qwen_image
    ),
    "Qwen3-VL": Target(
        "Qwen3VLForConditionalGeneration", _MROPE, {"vision_config": _QWEN_VISION, **_QWEN_IDS}, _qwen_image
    ),
    "Mistral": Target("MistralForCausalLM", {"head_dim": 8, "sliding_window": WINDOW}),
    "Gemma 2": Target("Gemma2ForCausalLM", _GEMMA, attention=("eager",)),
    "Gemma 3": Target("Gemma3ForCausalLM", _GEMMA),
    "Gemma 3 (images)": Target(
        "Gemma3ForConditionalGeneration",
        _GEMMA,
        {
            "vision_config": {**_PATCH_VISION, "patch_size": 2},
            "image_token_index": IMAGE,
            "boi_token_index": IMAGE_START,
            "eoi_token_index": IMAGE_END,
            "mm_tokens_per_image": 4,
        },
        _gemma_image,
    ),
    "Gemma 4": Target("Gemma4ForCausalLM", _GEMMA_4),
    "Gemma 4 (shared keys)": Target("Gemma4ForCausalLM", _GEMMA_4_SHARED),
    "Gemma 4 (multimodal, text)": Target(
        "Gemma4ForConditionalGeneration", _GEMMA_4_SHARED, {"vision_config": None, "audio_config": None}
    ),
    "GPT-OSS": Target("GptOssForCausalLM", {**_SLIDING, **_MOE}, attention=("eager",)),
    "Qwen3-Next": Target("Qwen3NextForCausalLM", {**_DELTA, **_MOE, "shared_expert_intermediate_size": 16}, scale=3.0),
    "Qwen3.5": Target("Qwen3_5ForCausalLM", _DELTA, scale=3.0),
    "OLMo hybrid": Target("OlmoHybridForCausalLM", _DELTA, embedding_scale=1.0),
    "LFM2": Target("Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"] * 2}, scale=3.0),
    "Falcon-H1": Target("FalconH1ForCausalLM", {"head_dim": 8, "mamba_d_ssm": 64, **_MAMBA_2}, embedding_scale=1.0),
    "Mamba 2": Target(
        "Mamba2ForCausalLM",
        {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 16},
        attention=("eager",),
        scale=3.0,
    ),
    "Mamba": Target("MambaForCausalLM", {"state_size": 4, "time_step_rank": 4}, attention=("eager",), scale=3.0),
    "Jamba": Target(
        "JambaForCausalLM",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
        },
        scale=3.0,
    ),
    "RecurrentGemma": Target(
        "RecurrentGemmaForCausalLM",
        {"attention_window_size": WINDOW, "lru_width": 32, "head_dim": 8},
        scale=3.0,
    ),
    "RWKV": Target("RwkvForCausalLM", {"attention_hidden_size": 32}, attention=("eager",), scale=3.0),
}


def config_of(name: str, **changes: Any) -> Any:
    """Config of a target, with fields of its text decoder changed."""
    spec = TARGETS[name]
    config_class = getattr(transformers, spec.model).config_class
    fields = {**_SIZES, **spec.fields, **changes}
    if spec.nested is None:
        return config_class(**fields)
    return config_class(text_config=fields, **spec.nested, tie_word_embeddings=False)


def new_target(
    name: str, attention: str | None = None, *, scale: float | None = None, **changes: Any
) -> PreTrainedModel:
    """A target of its own, for tests that change it; `scale` and fields of its config as given."""
    spec = TARGETS[name]
    torch.manual_seed(spec.seed)
    model = getattr(transformers, spec.model)._from_config(
        config_of(name, **changes), attn_implementation=attention or spec.attention[0]
    )
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() > 1:
                is_embedding = any(part in key for part in ("emb", "wte", "wpe"))
                parameter.mul_(spec.embedding_scale if is_embedding else scale or spec.scale)
    model.generation_config = GenerationConfig()  # no pad token: plain generate would mask it in a prompt
    return model.eval()


@lru_cache
def target(name: str, attention: str | None = None) -> PreTrainedModel:
    """A shared target: no test may leave a trace on it."""
    return new_target(name, attention)


def prompt(length: int, seed: int | None = None) -> torch.Tensor:
    """Random text prompt, int64 `[1, length]`, without padding or image tokens."""
    generator = torch.Generator().manual_seed(length if seed is None else seed)
    return torch.randint(2, IMAGE, (1, length), generator=generator)


def inputs(name: str, length: int) -> dict[str, torch.Tensor]:
    """Inputs of a prompt; from 12 tokens on with an image, where the target takes one."""
    ids, images = prompt(length), TARGETS[name].images
    return {"input_ids": ids} if images is None or length < 12 else images(ids)


EXACT, REFUSED, NOT_OFFERED = "exact", "refused", "not offered"
COLUMNS = {
    "sdpa": "text of the default attention",
    "eager": "text of `attn_implementation='eager'`",
    "left padding": "a prompt behind padding",
    "chunked prefill": "`prefill_chunk_size`",
    "inputs_embeds": "a prompt given as embeddings only",
    "own cache": "a half-filled cache of the caller's, used again afterwards",
    "static cache": "`cache_implementation='static'`",
    "batch": "several rows, left-padded",
}


@dataclass(frozen=True)
class Cell:
    """What happens to one target in one column.

    Attributes:
        verdict: `EXACT`: ids of plain generate; `REFUSED`: ValueError before any pass; `NOT_OFFERED`: plain generate
            itself fails.
        reason: Why it is not exact, for the table.
        says: What the refusal says.
        plain_fails_before: Plain generate fails in transformers before this version.
        offered_before: A cell that is not offered from this version on, and exact before it.
    """

    verdict: str = EXACT
    reason: str = ""
    says: str = ""
    plain_fails_before: str = ""
    offered_before: str = ""

    @property
    def verdict_here(self) -> str:
        """The verdict under this transformers."""
        was_offered = self.offered_before and Version(transformers.__version__) < Version(self.offered_before)
        return EXACT if was_offered else self.verdict

    @property
    def skipped(self) -> str | None:
        """Why the cell cannot be tested under this transformers, or None."""
        found, needed = transformers.__version__, self.plain_fails_before
        if not needed or Version(found) >= Version(needed):
            return None
        return f"plain generate itself fails here in transformers {found}, before {needed}"


@dataclass(frozen=True)
class Row:
    """A family of targets and what a drafter does for it; columns not named in `differences` are exact."""

    target: str
    differences: dict[str, Cell] = field(default_factory=dict)

    @property
    def cells(self) -> dict[str, Cell]:
        """Every column's cell."""
        return {column: self.differences.get(column, Cell()) for column in COLUMNS}


def _refused(reason: str, says: str, *columns: str) -> dict[str, Cell]:
    return {column: Cell(REFUSED, reason, says) for column in columns or COLUMNS}


def _not_offered(reason: str, *columns: str) -> dict[str, Cell]:
    return {column: Cell(NOT_OFFERED, reason) for column in columns}


_EAGER_ONLY = _not_offered("the class has eager attention only", "sdpa")
_NO_ATTENTION = _not_offered("it has no attention", "sdpa")
_NO_EMBEDS = _not_offered("plain generate takes no embeddings for it", "inputs_embeds")
_NO_CHUNKS = _not_offered("plain generate cannot read its prompt in chunks", "chunked prefill")
_ONE_ROW = _refused(
    "rows of a batch need layers that attend to all their tokens or to a window of them", "Batches of 4 rows", "batch"
)
_WINDOWED = _refused(
    "a static window loses what it evicts (exact while the text fits into the window)",
    "static sliding-window layer",
    "static cache",
)
_LATE_CHUNKS = {"chunked prefill": Cell(plain_fails_before="5.21")}
_NO_CARRY = _refused("a pass over several tokens starts from an empty recurrent state", "from an empty state")
_OUTSIDE = _refused("its state is kept outside transformers' caches", "without a drafter")
_DIFFERENCES: dict[str, dict[str, Cell]] = {
    "DeepSeek-V3.2 (sparse)": {
        **_ONE_ROW,
        **_refused("a static sparse layer has no rollback", "StaticIndexedLayer", "static cache"),
    },
    "Bloom (ALiBi)": _EAGER_ONLY,
    "MPT (ALiBi)": _EAGER_ONLY,
    "Falcon (ALiBi)": _not_offered("plain generate fails on it", "static cache"),
    "Qwen2.5-VL": _LATE_CHUNKS,
    "Qwen3-VL": _LATE_CHUNKS,
    "Mistral": _WINDOWED,
    "Gemma 2": {**_WINDOWED, "sdpa": Cell(NOT_OFFERED, "eager attention only since 5.21", offered_before="5.21")},
    "Gemma 3": _WINDOWED,
    "Gemma 3 (images)": {**_WINDOWED, **_NO_EMBEDS},
    "Gemma 4": _WINDOWED,
    "Gemma 4 (shared keys)": _WINDOWED,
    "Gemma 4 (multimodal, text)": {**_WINDOWED, **_NO_EMBEDS},
    "GPT-OSS": {**_WINDOWED, **_EAGER_ONLY},
    "Qwen3-Next": _ONE_ROW,
    "Qwen3.5": _ONE_ROW,
    "OLMo hybrid": _ONE_ROW,
    "LFM2": _ONE_ROW,
    "Falcon-H1": {
        **_ONE_ROW,
        **_NO_EMBEDS,
        **_refused("layers with a static and a recurrent part", "StaticFullAttentionLayer", "static cache"),
    },
    "Mamba 2": {**_ONE_ROW, **_NO_ATTENTION, **_NO_CHUNKS},
    "Mamba": {**_NO_CARRY, **_NO_ATTENTION, **_NO_CHUNKS},
    "Jamba": _NO_CARRY,
    "RecurrentGemma": {**_OUTSIDE, **_NO_CHUNKS},
    "RWKV": {**_OUTSIDE, **_NO_ATTENTION, **_NO_CHUNKS},
}
SUPPORT = [Row(name, _DIFFERENCES.get(name, {})) for name in TARGETS]
_SIGNS = {EXACT: "exact", REFUSED: "refused", NOT_OFFERED: "–"}


def markdown() -> str:
    """`SUPPORT` as a Markdown table with the reasons below."""
    reasons: list[str] = []
    lines = ["| target | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for row in SUPPORT:
        signs = []
        for cell in row.cells.values():
            reason = cell.reason or (cell.plain_fails_before and f"from transformers {cell.plain_fails_before} on")
            if reason and reason not in reasons:
                reasons.append(reason)
            signs.append(_SIGNS[cell.verdict] + (f" ({reasons.index(reason) + 1})" if reason else ""))
        lines.append(f"| {row.target} | " + " | ".join(signs) + " |")
    columns = "; ".join(f"*{column}*: {meaning}" for column, meaning in COLUMNS.items())
    notes = [f"({number}) {reason}." for number, reason in enumerate(reasons, 1)]
    return "\n".join([*lines, "", f'{columns}. "–": plain generate does not offer it.', "", *notes])


if __name__ == "__main__":
    print(markdown())
