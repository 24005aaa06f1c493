"""What the commands of `dspark bench` share: their options, models, prompts, curves and tables."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from ..cpu import optimize_for_cpu
from ..speculation import SpeculationConfig
from .common import (
    BY_CURVE,
    GPU,
    Curve,
    Threads,
    chosen_device,
    load_curve,
    out,
    use_threads,
)
from .data import target_dtype
from .loading import load_pair
from .tables import print_table

Target = Annotated[str, typer.Option(help="Target: folder or Hub id.")]
Drafter = Annotated[str, typer.Option(help="Drafter: folder or Hub id.")]
Gguf = Annotated[str | None, typer.Option(help="GGUF file inside the target's folder.")]
PromptFiles = Annotated[
    list[Path], typer.Option(help="Prompt file, as `dspark eval` takes them. Default: shipped sets.")
]
Dtype = Annotated[str, typer.Option(help="fp32, bf16, fp16, or auto: fp32 on a CPU, else bf16.")]
Device = Annotated[str | None, typer.Option(help="Default: cuda where there is one, else cpu.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print figures as JSON.")]


def chosen_pair(
    target: str, drafter: str, gguf_file: str | None, dtype: str, device: str | None, threads: int | None
) -> tuple[Any, Any, Any]:
    """Target, tokenizer and drafter on their device.

    Raises:
        ValueError: A folder, device or dtype that is none.
        OSError: A model cannot be loaded.
    """
    where = chosen_device(device)
    use_threads(threads)
    return load_pair(target, drafter, gguf_file, target_dtype(dtype, where), where)


def pack(stack: ExitStack, *models: Any) -> None:
    """Pack what is on a CPU until the stack closes."""
    for model in models:
        if model.device.type == "cpu":
            stack.enter_context(optimize_for_cpu(model))


def mixed_prompts(sets: dict[str, list[str]], count: int) -> list[str]:
    """Prompts of all sets in turns, `count` of them, from the start again where there are too few."""
    turns = [text for group in zip(*sets.values(), strict=False) for text in group]
    return [turns[i % len(turns)] for i in range(count)]


def policy_ways(names: Sequence[str], survival_threshold: float, curve: Any) -> dict[str, SpeculationConfig]:
    """Settings by policy; the threshold is for `threshold`, the curve for policies that decide by one.

    Raises:
        ValueError: An unknown policy.
    """
    return {
        name: SpeculationConfig(
            name,  # type: ignore[arg-type]
            survival_threshold=survival_threshold if name == "threshold" else 0.0,
            throughput_curve=curve if name in BY_CURVE else None,
        )
        for name in names
    }


def show(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table."""
    print_table(out, title, header, rows)


__all__ = [
    "GPU", "AsJson", "Curve", "Device", "Drafter", "Dtype", "Gguf", "PromptFiles", "Target", "Threads",
    "chosen_pair", "load_curve", "mixed_prompts", "pack", "policy_ways", "show",
]  # fmt: skip
