"""The finished drafter on disk: one folder that appears whole, with `training.json` on how it came to be."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from ..files import quiet_bars
from ..version import __version__

PROVENANCE_NAME = "training.json"


def save_drafter(
    drafter: PreTrainedModel,
    folder: str | os.PathLike[str],
    provenance: dict[str, Any],
    weights: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write a folder that `DSparkDrafter.from_pretrained` loads, whole or not at all.

    Everything goes to a folder beside it, which then takes its name; an earlier folder of that name is replaced only
    then. An interruption leaves the earlier one, or none.

    Args:
        drafter: What to save.
        folder: Where.
        provenance: Written as `training.json`.
        weights: Its whole weights, where it holds only a part of them (FSDP).
    """
    folder = Path(folder).absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.tmp-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with quiet_bars():
            drafter.save_pretrained(temporary, **({} if weights is None else {"state_dict": weights}))
        (temporary / PROVENANCE_NAME).write_text(json.dumps(provenance, indent=1, default=str) + "\n")
        _replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _replace(temporary: Path, folder: Path) -> None:
    if not folder.exists():
        temporary.rename(folder)
        return
    # A folder cannot be renamed over a full one: the earlier one steps aside, and back if the rename fails.
    aside = folder.with_name(f".{folder.name}.old-{os.getpid()}")
    folder.rename(aside)
    try:
        temporary.rename(folder)
    except OSError:
        aside.rename(folder)
        raise
    shutil.rmtree(aside)


def environment() -> dict[str, Any]:
    """Command line, versions and commit, for `training.json`."""
    return {
        "command": sys.argv,
        "versions": {
            "dspark": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "git_commit": _git_commit(),
    }


def _git_commit() -> str | None:
    """Commit of the checkout this package runs from, with `+` when it has changes; None outside one."""
    git = ["git", "-C", str(Path(__file__).parent)]

    def told(*words: str) -> str:
        return subprocess.run([*git, *words], capture_output=True, text=True, check=True).stdout.strip()

    try:
        told("ls-files", "--error-unmatch", Path(__file__).name)  # a project that holds our install is not ours
        commit = told("rev-parse", "--short=12", "HEAD")
        changes = told("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+" if changes else "")


__all__ = ["PROVENANCE_NAME", "environment", "save_drafter"]
