"""Where a result goes: it appears whole beside what was there, or not at all."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# What a folder of weights holds; a folder with anything else is not replaced.
_OF_WEIGHTS = re.compile(r"[^/]+\.(json|jsonl|safetensors|gguf|yaml|md|txt|png|py|jinja)|LICENSE|\.gitattributes")


@contextmanager
def fresh(destination: Path, sources: Iterable[str | None], *, overwrite: bool) -> Iterator[Path]:
    """A path beside `destination` to write to; it takes that name when the block ends well, and is gone otherwise.

    Args:
        destination: File or folder to be.
        sources: What is read meanwhile: paths, Hub ids or None.
        overwrite: Replace what is there.

    Raises:
        ValueError: It is one of the sources or holds one, or exists and may not be replaced.
    """
    destination = Path(os.path.abspath(destination.expanduser()))
    _check(destination, sources, overwrite=overwrite)
    made = [parent for parent in destination.parents if not parent.exists()]
    destination.parent.mkdir(parents=True, exist_ok=True)
    temporary = destination.with_name(f".{destination.stem}.tmp-{os.getpid()}{destination.suffix}")
    try:
        yield temporary
        _put(temporary, destination)
    except BaseException:
        _remove(temporary)
        with suppress(OSError):  # someone else may use a new parent by now
            for parent in made:
                parent.rmdir()
        raise


def _check(destination: Path, sources: Iterable[str | None], *, overwrite: bool) -> None:
    for source in sources:
        place = None if source is None else Path(source).expanduser()
        if place is None or not place.exists():
            continue
        read = place.resolve()
        if destination.resolve() in (read, *read.parents):
            raise ValueError(
                f"The destination {destination} is what is read, or holds it ({source}). Name another folder: a "
                "conversion never writes over its source."
            )
    if not destination.exists() and not destination.is_symlink():
        return
    if not overwrite:
        raise ValueError(
            f"{destination} exists already. Name another place, or pass `--overwrite` (`overwrite=True`)."
        )
    foreign = _foreign(destination)
    if foreign:
        raise ValueError(f"{destination} is not replaced: it holds {foreign}, which is no part of a drafter.")


def _foreign(destination: Path) -> str | None:
    """What in `destination` a drafter's folder would not have."""
    if destination.is_symlink():
        return "a link"
    if not destination.is_dir():
        return None if destination.suffix == ".gguf" else "a file"
    strange = [path for path in destination.iterdir() if not path.is_file() or not _OF_WEIGHTS.fullmatch(path.name)]
    return strange[0].name if strange else None


def _put(temporary: Path, destination: Path) -> None:
    """Give `temporary` its name; what was there is moved aside first and comes back if that fails."""
    if not destination.exists():
        os.rename(temporary, destination)
        return
    aside = destination.with_name(f".{destination.name}.old-{os.getpid()}")
    os.rename(destination, aside)
    try:
        os.rename(temporary, destination)
    except BaseException:
        os.rename(aside, destination)
        raise
    _remove(aside)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


__all__ = ["fresh"]
