"""Where a result goes: it appears whole beside what was there, or not at all."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dspark.files import read_json

from .gguf_file import open_gguf
from .registry import is_recognised

# What a folder of weights holds; a folder with anything else is not replaced.
_OF_WEIGHTS = re.compile(r"[^/]+\.(json|jsonl|safetensors|gguf|yaml|md|txt|png|py|jinja)|LICENSE|\.gitattributes")
_GGUF = ".gguf"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def fresh(destination: Path, sources: Iterable[str | None], *, overwrite: bool) -> Iterator[Path]:
    """A path beside `destination` to write to; it takes that name when the block ends well, and is gone otherwise.

    Args:
        destination: File or folder to be.
        sources: What is read meanwhile: paths, Hub ids or None.
        overwrite: Replace what is there, a drafter.

    Raises:
        ValueError: It is one of the sources or holds one, or exists and may not be replaced.
        OSError: It cannot be written; says why.
    """
    destination, sources = Path(os.path.abspath(destination.expanduser())), list(sources)
    made: list[Path] = []
    temporary: Path | None = None
    try:
        _check(destination, sources, overwrite=overwrite)
        temporary = _beside(destination)
        made += [parent for parent in destination.parents if not parent.exists()]
        destination.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        _check(destination, sources, overwrite=overwrite)  # something may have appeared there meanwhile
        _put(temporary, destination)
    except BaseException as error:
        if temporary is not None:
            _remove(temporary)
        with suppress(OSError):  # someone else may use a new parent by now
            for parent in made:
                if parent.exists():
                    parent.rmdir()
        if isinstance(error, OSError) and (reason := _about(error, destination, temporary)) is not None:
            raise OSError(error.errno, f"{destination} cannot be written: {reason}. Nothing was kept.") from error
        raise


def _about(error: OSError, destination: Path, temporary: Path | None) -> str | None:
    """What is wrong with the destination; None: the error is about something else."""
    if error.errno in _FULL:
        return f"{error.strerror}. Make room, or name a place on another disk"
    name = Path(os.path.abspath(os.fsdecode(error.filename))) if isinstance(error.filename, str | bytes) else None
    # A part of the way to it, or what is written beside it (a GGUF file once more aside).
    is_way = name is not None and name in (destination, *destination.parents)
    is_aside = name is not None and temporary is not None and temporary.name in str(name)
    if is_way or is_aside:
        return f"{error.strerror} ({name}). Name a place in a folder that can be written to"
    return None


def _beside(destination: Path) -> Path:
    """A name that nothing has, and that is no longer than names may be."""
    suffix = _GGUF if destination.suffix == _GGUF else ""
    return destination.with_name(f".{destination.stem[:40]}.tmp-{secrets.token_hex(4)}{suffix}")


def _check(destination: Path, sources: Iterable[str | None], *, overwrite: bool) -> None:
    for source in sources:
        place = None if source is None else Path(source).expanduser()
        if place is None or not place.exists():
            continue
        read = place.resolve()
        is_read = destination.exists() and any(destination.samefile(path) for path in (read, *read.parents))
        if is_read or (destination.is_file() and destination.resolve().parent == read):
            raise ValueError(
                f"The destination {destination} is what is read, holds it or is one of its files ({source}). Name "
                "another place: a conversion never writes over its source."
            )
    if not destination.exists() and not destination.is_symlink():
        return
    if not overwrite:
        raise ValueError(
            f"{destination} exists already. Name another place, or pass `--overwrite` (`overwrite=True`)."
        )
    foreign = _foreign(destination)
    if foreign:
        raise ValueError(
            f"{destination} is not replaced: it {foreign}, which is no part of a drafter. Name another place, or move "
            "it away yourself."
        )


def _foreign(destination: Path) -> str | None:
    """What in `destination` a drafter's file or folder would not have, after "it"."""
    if destination.is_symlink():
        return "is a link"
    if not destination.is_dir():
        return _foreign_file(destination)
    held = sorted(destination.iterdir())
    strange = [path for path in held if not path.is_file() or not _OF_WEIGHTS.fullmatch(path.name)]
    if strange:
        return f"holds {strange[0].name}"
    config = destination / "config.json"
    if config.exists():
        return None if _is_drafters(config) else "holds a config.json that is no drafter's"
    models = [path for path in held if path.suffix == _GGUF]
    if held and not models:
        return f"holds {held[0].name} and no config.json"
    return next((f"holds {path.name}" for path in models if _foreign_file(path)), None)


def _is_drafters(config: Path) -> bool:
    try:
        raw = read_json(config)
        return isinstance(raw, dict) and is_recognised(raw)
    except (ValueError, OSError):
        return False


def _foreign_file(path: Path) -> str | None:
    if path.suffix != _GGUF or not path.is_file():
        return "is a file"
    try:
        kind = open_gguf(str(path))[0].get("general.architecture")
    except OSError:
        return "is a file that is no GGUF file"
    return None if kind in ("dflash", "dspark") else f"is a GGUF file of a model ({kind!r})"


def _put(temporary: Path, destination: Path) -> None:
    """Give `temporary` its name; what was there is moved aside first and comes back if that fails."""
    if not destination.exists():
        os.rename(temporary, destination)
        return
    aside = _beside(destination)
    try:
        os.rename(destination, aside)
        os.rename(temporary, destination)
    except BaseException:
        if aside.exists() and not destination.exists():
            os.rename(aside, destination)
        raise
    _remove(aside)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
        return
    with suppress(OSError):  # what could not be written is not there
        path.unlink()


__all__ = ["fresh"]
