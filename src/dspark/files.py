"""Files that are whole or not there, files that grow line by line, and reading models without transformers' bars."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers.utils import logging


def write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """Have `write` fill a temporary file beside `path`, then rename it; an interruption leaves `path` as it was."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def whole_lines(path: Path) -> tuple[bytes, bool]:
    """What a file of lines holds, and whether a last line without its line break was cut off the file."""
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)
    return data[:whole], whole < len(data)


@contextmanager
def quiet_bars() -> Iterator[None]:
    """Hide transformers' own progress bars, which would break into ours."""
    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()


__all__ = ["quiet_bars", "whole_lines", "write_atomically"]
