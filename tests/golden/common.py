"""Readers of the golden data (see its README for what each file holds)."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from dspark import DSparkDrafter
from tests.conftest import golden_root


def names(kind: str) -> list[str]:
    """Drafts that have a json in `vectors`, `traces` or `training`."""
    return sorted(p.stem for p in (golden_root() / kind).glob("*.json") if "." not in p.stem)


def read(kind: str, name: str) -> dict[str, Any]:
    return json.loads((golden_root() / kind / f"{name}.json").read_text())


def cases(kind: str) -> list[tuple[str, int]]:
    """Draft name and case index of every case whose tensors are at hand (a clone has a subset)."""
    return [
        (name, i)
        for name in names(kind)
        for i, case in enumerate(read(kind, name)["cases"])
        if (golden_root() / kind / case["file"]).is_file()
    ]


def tensors(kind: str, file: str) -> dict[str, torch.Tensor]:
    return load_file(golden_root() / kind / file)


def drafter(name: str, **kwargs: Any) -> DSparkDrafter:
    kwargs.setdefault("dtype", torch.float32)
    return DSparkDrafter.from_pretrained(golden_root() / "drafts" / name, **kwargs).eval()


@lru_cache
def target(path: str, attn: str = "sdpa") -> PreTrainedModel:
    folder: Path = golden_root() / path
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attn).eval()
