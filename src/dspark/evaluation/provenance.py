"""What the figures were taken with: models and their hashes, prompting, machine, versions. No local path goes in.

Two result files whose provenance differs are never mixed; `differences` names what differs.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from ..configuration_dspark import DSparkConfig
from ..modeling_dspark import DSparkDrafter
from ..target_note import fingerprint, hash_rows, tokenizer_note
from ..version import __version__
from .prompt_sets import Prompting
from .settings import EvaluationSettings

_OF_SAVING = ("_name_or_path", "architectures", "confidence_temperatures", "dtype", "target", "transformers_version")
_SWITCHES = ("enable_thinking", "thinking", "reasoning_effort")


def public_name(source: str | Path) -> str:
    """Hub id as it is, local folder or file by its last part."""
    path = Path(source)
    return path.resolve().name if path.exists() else str(source)


def provenance(
    target: PreTrainedModel,
    tokenizer: Any,
    drafters: Mapping[str, DSparkDrafter],
    settings: EvaluationSettings,
    *,
    target_name: str,
    prompting: Prompting,
    packed: bool,
) -> dict[str, Any]:
    """JSON-able description of a run; taken before anything is packed, since packed weights cannot be hashed.

    Args:
        target: The target.
        tokenizer: Its tokenizer.
        drafters: Label to drafter.
        settings: What will be run.
        target_name: Public name of the target.
        prompting: How prompts become ids.
        packed: Whether linears will be packed for the CPU.
    """
    note = {
        "target": fingerprint(target, tokenizer=tokenizer, name=target_name),
        "drafters": {label: _drafter_note(drafter) for label, drafter in drafters.items()},
        "settings": {**asdict(settings), "sampling": "temperature only: no top-k, top-p or penalties"},
        "prompting": _prompting_note(tokenizer, prompting),
        "machine": machine_note(target, packed=packed),
        "versions": versions(),
    }
    return json.loads(json.dumps(note))  # as it will be read back: tuples become lists


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Entries in which two descriptions differ, as `name: value in a, value in b`."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = list(dict.fromkeys([*a, *b]))
        prefix = f"{path}." if path else ""
        return [line for key in keys for line in differences(a.get(key), b.get(key), f"{prefix}{key}")]
    return [] if a == b else [f"{path}: {a} there, {b} now"]


def _drafter_note(drafter: DSparkDrafter) -> dict[str, Any]:
    config = drafter.config
    return {
        "parameters": drafter.num_parameters(),
        "weights_hash": weights_hash(drafter.named_parameters()),
        "config_hash": _config_hash(config),
        "block_size": config.block_size,
        "draft_positions": config.num_draft_tokens,
        "draft_vocab_size": config.draft_vocab_size,
        "sequential_head": config.markov_head_type,
        "has_confidence_head": bool(config.enable_confidence_head),
        "confidence_temperatures": config.confidence_temperatures,
        "trained_for": (config.target or {}).get("name"),
    }


def _config_hash(config: DSparkConfig) -> str:
    """Hash of what a config says beyond where and how it was saved, and the temperatures, which are told by number."""
    fields = {name: value for name, value in config.to_dict().items() if name not in _OF_SAVING}
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()[:16]


def weights_hash(weights: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Hash of a sample of every matrix a drafter stores, by its name; the borrowed ones are the target's."""
    hashes = [f"{name}:{hash_rows(weight)}" for name, weight in weights if weight.dim() == 2]
    return hashlib.sha256("\n".join(sorted(hashes)).encode()).hexdigest()[:16]


def _prompting_note(tokenizer: Any, prompting: Prompting) -> dict[str, Any]:
    note = tokenizer_note(tokenizer)
    uses_template = note["chat_template_hash"] is not None and not prompting.raw
    return {
        "chat_template_hash": note["chat_template_hash"] if uses_template else None,
        "template_args": prompting.template_args if uses_template else None,
        "thinking": _thinking(note, prompting) if uses_template else "no template",
    }


def _thinking(note: dict[str, Any], prompting: Prompting) -> str:
    given = {name: value for name, value in (prompting.template_args or {}).items() if name in _SWITCHES}
    if given:
        return ", ".join(f"{name}={value}" for name, value in given.items())
    return "the template's default" if note["has_thinking_switch"] else "no switch in the template"


def versions() -> dict[str, str]:
    """Of this package and what it stands on."""
    return {
        "dspark": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def machine_note(target: PreTrainedModel, *, packed: bool) -> dict[str, Any]:
    """What a run's times hang on: device, dtype, threads, packing, attention, cache."""
    device = target.device
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return {
        "device": device.type,
        "device_name": name,
        "dtype": str(target.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "packed": packed,
        "attention": getattr(target.config, "_attn_implementation", None),
        "cache": target.generation_config.cache_implementation or "dynamic",
    }


__all__ = ["differences", "machine_note", "provenance", "public_name", "versions", "weights_hash"]
