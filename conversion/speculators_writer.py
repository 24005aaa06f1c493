"""Writing the layout of vllm-project/speculators: nested layer config, layer ids one up, offsets and their mask."""

from __future__ import annotations

from typing import Any

from . import commands
from .hf_keys import head_keys, is_dflash, qwen3_keys
from .limits import Limits
from .record import Record
from .writing import HowToWrite, Layout, Variant, folder_writer, offset_tensors, plain_tensors

VERSION = "0.9.0"  # of the package whose keys these are
_LIMITS = Limits(has_draft_vocab=True, taps_embedding=True, window_rule="ctx_from_anchor", causal="either")
_CLASSES = {"dspark": "DSparkDraftModel", "dflash": "DFlashDraftModel"}


def _layout(record: Record, how: HowToWrite, kind: str) -> Layout:
    sliding = [layer for layer in record["layers_attention"] if layer.window is not None]
    config: dict[str, Any] = {
        "architectures": [_CLASSES[kind]],
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in record["target_layer_ids"]],
        "block_size": record["block_size"],
        "draft_vocab_size": record["vocab_size"] if record["draft_vocab"] is None else len(record["draft_vocab"]),
        "mask_token_id": record["mask_token_id"],
        "sample_from_anchor": record["sample_from_anchor"],
        "sliding_window_non_causal": bool(sliding) and not sliding[0].causal_in_block,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "speculators_config": _proposals(record, how, kind),
        "transformer_layer_config": qwen3_keys(record),
    }
    if kind == "dspark":
        config |= head_keys(record)
    return Layout(config, {**plain_tensors(record), **offset_tensors(record, with_mask=True)})


def _proposals(record: Record, how: HowToWrite, kind: str) -> dict[str, Any]:
    note = record["target"] or {}
    architecture = how.target_architecture or note.get("architecture")
    method = {
        "proposal_type": "greedy", "speculative_tokens": record.num_draft_tokens, "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }  # fmt: skip
    return {
        "algorithm": kind,
        "default_proposal_method": "greedy",
        "proposal_methods": [method],
        "verifier": {
            "name_or_path": how.target or note.get("name"),
            "architectures": [] if architecture is None else [architecture],
        },
    }


def _dspark(record: Record, how: HowToWrite) -> Layout:
    return _layout(record, how, "dspark")


def _dflash(record: Record, how: HowToWrite) -> Layout:
    return _layout(record, how, "dflash")


def _without_tables(record: Record) -> str | None:
    if record["has_embed"] or (record["has_lm_head"] and record["draft_vocab"] is None):
        return "the package itself takes the target's embedding and whole LM head; engines read the drafter's own"
    return None


WRITER = folder_writer(
    "speculators", "speculators, vLLM", ("speculators",),
    Variant("DFlash", _LIMITS, _dflash, commands.vllm_dflash, fits=is_dflash, note=_without_tables),
    Variant("DSpark", _LIMITS, _dspark, commands.vllm_or_ours, note=_without_tables),
)  # fmt: skip

__all__ = ["WRITER"]
