"""Changing single fields of a drafter's config.json, in place or in a copy, all or nothing; weights in a copy only."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .configuration_dspark import DSparkConfig
from .files import write_atomically
from .modeling_dspark import DSparkDrafter

_NAME = "config.json"


def check_can_update(folder: str | os.PathLike[str]) -> None:
    """Refuse folders whose config.json cannot be changed in place, before any work is done.

    Raises:
        ValueError: The folder holds no drafter in our own format.
        OSError: It cannot be written to.
    """
    _read(Path(folder))
    if not os.access(folder, os.W_OK):
        raise OSError(f"{folder} cannot be written to (a read-only folder?). Write a copy elsewhere with --out.")


def update_config_file(folder: str | os.PathLike[str], **fields: Any) -> None:
    """Set fields of a drafter's config.json; key order and all other values stay. A crash leaves the old file whole.

    Args:
        folder: A drafter in our own format.
        **fields: Fields of `DSparkConfig` and their new values, JSON-able.

    Raises:
        ValueError: Not such a folder, or the changed config breaks a rule; the file is unchanged.
        OSError: It cannot be written.
    """
    path = Path(folder) / _NAME
    raw = {**_read(Path(folder)), **fields}
    DSparkConfig.from_dict(raw)
    write_atomically(path, lambda temporary: temporary.write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8"))


def copy_with(
    source: str,
    folder: str | os.PathLike[str],
    change: Callable[[DSparkDrafter], None] | None = None,
    **fields: Any,
) -> None:
    """Write a copy of a drafter with other fields; the folder appears whole.

    A folder in our own format is copied file by file, so its weights are the same bytes unless `change` is given;
    anything else (`DSparkDrafter.from_pretrained` reads it) is converted, in its stored dtype.

    Args:
        source: Local folder or Hub id.
        folder: Must not exist yet.
        change: Changes the weights of the drafter, loaded in its stored dtype, before it is written.
        **fields: As [`update_config_file`].

    Raises:
        ValueError: The changed config breaks a rule.
        OSError: `folder` exists or cannot be written.
    """
    folder = Path(folder).absolute()
    check_is_new(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.tmp-{os.getpid()}")
    try:
        if is_own_format(source):
            shutil.copytree(source, temporary)
            for path in (temporary, *temporary.rglob("*")):  # a copy of what is read-only is not
                path.chmod(path.stat().st_mode | stat.S_IWUSR)
        if change is not None or not temporary.exists():
            drafter = DSparkDrafter.from_pretrained(source, dtype="auto")
            if change is not None:
                change(drafter)
            drafter.save_pretrained(temporary)
        update_config_file(temporary, **fields)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_is_new(folder: str | os.PathLike[str]) -> None:
    """Refuse a folder that exists or cannot be made.

    Raises:
        OSError: It does, or cannot.
    """
    folder = Path(folder).absolute()
    if os.path.lexists(folder):
        raise OSError(f"{folder} exists already. Name a new folder.")
    above = next(parent for parent in folder.parents if parent.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise OSError(f"{folder} cannot be made: {above} is no folder that can be written to.")


def is_own_format(source: str) -> bool:
    """Whether `source` is a local folder with a config.json of ours."""
    try:
        _read(Path(source))
    except ValueError:
        return False
    return True


def _read(folder: Path) -> dict[str, Any]:
    path = folder / _NAME
    if not path.is_file():
        raise ValueError(f"{folder} is not a drafter's folder: it has no {_NAME}.")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON ({error}).") from error
    found = raw.get("model_type") if isinstance(raw, dict) else None
    if found != DSparkConfig.model_type:
        raise ValueError(
            f"{path} has model_type {found!r}, not {DSparkConfig.model_type!r}: only drafters in our own format are "
            "changed in place. Write a copy with --out; it is converted."
        )
    return raw


__all__ = ["check_can_update", "check_is_new", "copy_with", "is_own_format", "update_config_file"]
