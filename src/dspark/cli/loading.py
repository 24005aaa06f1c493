"""Loading targets and drafters for commands; what can be none is refused in words before anything big is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from ..configuration_dspark import DSparkConfig
from ..modeling_dspark import DSparkDrafter
from .common import check_source


def load_pair(
    target: str, drafter: str | Path, gguf_file: str | None, dtype: torch.dtype, device: str = "cpu"
) -> tuple[Any, Any, Any]:
    """Target, tokenizer and drafter on a device; the small drafter first, so that a wrong one is said soon.

    Raises:
        ValueError, OSError: As [`load_target`].
    """
    draft = load_drafter(drafter, dtype)
    model, tokenizer = load_target(target, gguf_file, dtype)
    for module in (model, draft):
        torch.nn.Module.to(module, device)
    return model, tokenizer, draft


def load_target(source: str, gguf_file: str | None, dtype: torch.dtype) -> tuple[PreTrainedModel, Any]:
    """Target and tokenizer of a folder or Hub id.

    Raises:
        ValueError: There is no such folder, or no tokenizer or GGUF file of that name in it.
        OSError: The model cannot be loaded.
    """
    check_source(source)
    _check_gguf(source, gguf_file)
    _check_config(source)
    extra = {"gguf_file": gguf_file} if gguf_file else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **extra)
    except (OSError, ValueError) as error:
        found = _gguf_files(source) if gguf_file is None else []
        hint = f" It holds {', '.join(found)}: name it with --gguf-file." if found else ""
        is_here = Path(source).exists()
        where = "" if is_here else f" There is no folder {source} here, and on the Hub it could not be read."
        reason = " ".join(str(error).split())
        reason = reason if len(reason) <= 200 else f"{reason[:200]}..."
        raise ValueError(
            f"No tokenizer could be loaded from {source}, which texts need.{where}{hint} ({reason})"
        ) from error
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **extra).eval()
    return model, tokenizer


def _check_config(source: str) -> None:
    """Refuse a local folder that holds a drafter where a target is wanted, or no config that could be one."""
    try:
        config = json.loads((Path(source) / "config.json").read_text())
    except (OSError, ValueError):
        return  # not a local folder, or transformers says what is wrong with it
    if not isinstance(config, dict):
        raise ValueError(f"{Path(source) / 'config.json'} must hold a JSON object, got {type(config).__name__}.")
    if config.get("model_type") == DSparkConfig.model_type:
        raise ValueError(
            f"{source} is a drafter. --target names the model whose text is wanted, and --drafter the drafter."
        )


def _check_gguf(source: str, gguf_file: str | None) -> None:
    """Refuse a GGUF file that a local folder lacks, which transformers would look for on the Hub."""
    folder = Path(source)
    if folder.is_file():
        raise ValueError(
            f"The target {source} is a file. Name its folder with --target {folder.parent} and a GGUF file in it with "
            f"--gguf-file {folder.name}."
        )
    if gguf_file is None or not folder.is_dir() or (folder / gguf_file).is_file():
        return
    found = _gguf_files(source)
    hint = f"There are: {', '.join(found)}." if found else "It holds no GGUF file: leave --gguf-file out."
    raise ValueError(f"The folder {source} has no file {gguf_file!r} (--gguf-file). {hint}")


def _gguf_files(source: str) -> list[str]:
    return sorted(path.name for path in Path(source).glob("*.gguf"))


def load_drafter(source: str | Path, dtype: torch.dtype) -> DSparkDrafter:
    """Drafter of a folder or Hub id."""
    check_source(str(source))
    return DSparkDrafter.from_pretrained(source, dtype=dtype).eval()


__all__ = ["load_drafter", "load_pair", "load_target"]
