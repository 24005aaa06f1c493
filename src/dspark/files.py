"""Files that are whole or not there, files that grow line by line, strict JSON, models without transformers' bars."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers.utils import logging

# What can be a repository's name; anything else is a path.
_HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?", re.ASCII)


def check_place(source: str | os.PathLike[str]) -> None:
    """Refuse what can only be a local path and is not there.

    Raises:
        FileNotFoundError: It is not there.
    """
    place = os.fspath(source)
    if os.path.exists(place) or _HUB_ID.fullmatch(place):
        return
    home = os.path.expanduser(place)
    way_out = (
        f"Its `~` is not written out: {home}."
        if os.path.exists(home)
        else "Name a local folder or a Hub id (owner/name)."
    )
    raise FileNotFoundError(f"There is no folder {place}. {way_out}")


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
    """What a file of JSON records holds, and whether a half-written last one was cut off the file.

    A last record that lacks only its line break gets it.

    Raises:
        ValueError: The file ends in something that is no record, begun or whole; it is left as it is.
    """
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    tail = data[whole:]
    if not tail:
        return data, False
    if not tail.startswith(b"{"):
        raise ValueError(f"{path} ends in {tail[:40]!r}, which is no JSON record. Use another name; it is left alone.")
    try:
        json.loads(tail)
    except ValueError:
        os.truncate(path, whole)
        return data[:whole], True
    with path.open("ab") as file:
        file.write(b"\n")
    return data + b"\n", False


def some(names: Sequence[str], separator: str = ", ", most: int = 20) -> str:
    """Names for a message: the first `most`, and how many more there are."""
    more = [f"and {len(names) - most} more"] if len(names) > most else []
    return separator.join([*names[:most], *more])


def write_json(path: Path, value: Any) -> None:
    """One JSON document in a file, whole or not at all."""
    text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def read_json(path: str | os.PathLike[str]) -> Any:
    """What a JSON file holds, read strictly: of a key that is there twice nobody knows which value was meant.

    Raises:
        OSError: It is no UTF-8 JSON, nested too deep, or has a key twice; names the file.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=_object)
        json.dumps(found, ensure_ascii=False).encode()  # half a character, written \\ud800, could not be shown
        return found
    except (ValueError, RecursionError) as error:
        raise OSError(
            f"{path} cannot be read as JSON ({error!s:.200}). Correct it, or download or save it again."
        ) from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} is there twice")
    return found


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


__all__ = ["check_place", "quiet_bars", "read_json", "some", "whole_lines", "write_atomically", "write_json"]
