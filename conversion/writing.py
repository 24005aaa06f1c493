"""What a writer is: which records it takes, how they look in its layout, and the command that serves the result.

Layouts of safetensors folders are data (`Limits`, a function from record to config and tensor names); bytes are
written by `stream`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .limits import Limits, Tables, reasons_against
from .record import Record
from .stored import StoredTensor
from .stream import FileSum, Progress, sum_of, write_tensors

TARGET = "TARGET"  # stands in commands where no target was named


@dataclass(frozen=True)
class HowToWrite:
    """What the caller decides about a result.

    Attributes:
        folder: Where the result will be, for formats that name it.
        dtype: Of all floating-point tensors; None: as they are stored.
        max_shard_size: Most bytes of a file, unless one tensor is larger.
        target: Folder or Hub id of the target, for formats that note it; None: not known.
        target_architecture: Its class.
        progress: Called with the bytes of tensors done so far and in all.
    """

    folder: str = ""
    dtype: str | None = None
    max_shard_size: int = 5_000_000_000
    target: str | None = None
    target_architecture: str | None = None
    progress: Progress | None = None


@dataclass(frozen=True)
class Layout:
    """A record in a layout: config.json, tensors by the names they get, other texts by file name."""

    config: dict[str, Any]
    tensors: dict[str, StoredTensor]
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Variant:
    """One kind of drafter that a format holds.

    Attributes:
        title: What kind, for tables.
        limits: What it cannot hold.
        layout: From record and what the caller decided.
        serve: Record, target and folder to the engine's command.
        fits: Whether a record is of this kind; the last variant takes all that are left.
        note: What its engine computes in another way, for a record it takes; None: nothing.
    """

    title: str
    limits: Limits
    layout: Callable[[Record, HowToWrite], Layout]
    serve: Callable[[Record, str, str], str]
    fits: Callable[[Record], bool] = lambda _record: True
    note: Callable[[Record], str | None] = lambda _record: None


@dataclass(frozen=True)
class Writer:
    """A format that can be written.

    Attributes:
        name: On the command line.
        title: What reads the result, for tables.
        reads_as: Formats (in `FORMATS`) the result may be recognised as.
        refuses: The reason why a record does not go into it, naming fields; None: it does.
        write: Record, destination and how; returns the files with their sums.
        serve_command: Record, target or None, destination.
        tables: Where the format has embedding and LM head from, for a record.
        notes: What a user should know though the record is taken.
        terms: The record as the result is read: the same drafter, in what fields the format has for it.
        rows: Kinds of drafter and their limits, for tables.
        suffix: Of a result that is one file; empty: it is a folder.
        is_exact: Whether numbers are kept as they are when no dtype is asked for.
    """

    name: str
    title: str
    reads_as: tuple[str, ...]
    refuses: Callable[[Record], str | None]
    write: Callable[[Record, Path, HowToWrite], list[FileSum]]
    serve_command: Callable[[Record, str | None, str], str]
    tables: Callable[[Record], Tables] = lambda _record: "optional"
    notes: Callable[[Record], list[str]] = lambda _record: []
    terms: Callable[[Record], Record] = lambda record: record
    rows: tuple[tuple[str, Limits], ...] = ()
    suffix: str = ""
    is_exact: bool = True


def folder_writer(name: str, title: str, reads_as: tuple[str, ...], *variants: Variant) -> Writer:
    """A writer of safetensors folders with these kinds of drafter, the first that fits."""

    def kind(record: Record) -> Variant:
        return next(variant for variant in variants if variant.fits(record) or variant is variants[-1])

    def refuses(record: Record) -> str | None:
        return "; ".join(reasons_against(record, kind(record).limits, name)) or None

    def write(record: Record, folder: Path, how: HowToWrite) -> list[FileSum]:
        if (reason := refuses(record)) is not None:
            raise ValueError(f"{record.source} cannot be written as {name}. {reason}.")
        return write_layout(kind(record).layout(record, how), folder, how, dtype=record["dtype"])

    def notes(record: Record) -> list[str]:
        note = kind(record).note(record)
        return [] if note is None else [f"{name}: {note}"]

    return Writer(
        name, title, reads_as, refuses, write,
        lambda record, target, folder: kind(record).serve(record, target or TARGET, folder),
        tables=lambda record: kind(record).limits.tables, notes=notes,
        rows=tuple((variant.title, variant.limits) for variant in variants),
    )  # fmt: skip


def write_layout(layout: Layout, folder: Path, how: HowToWrite, *, dtype: Any) -> list[FileSum]:
    """Write a folder: texts first, then tensors one at a time; `folder` is made.

    Args:
        layout: What to write.
        folder: Must not exist.
        how: What the caller decided.
        dtype: What the config says where the caller wants none.

    Raises:
        ValueError: A number is NaN or infinite, or becomes so in the dtype asked for.
    """
    folder.mkdir()
    config = {**layout.config, "dtype": how.dtype or str(dtype or "float32").removeprefix("torch.")}
    texts = {"config.json": json.dumps(config, indent=2) + "\n", **layout.files}
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    sums = [sum_of(folder / name) for name in sorted(texts)]
    return sums + write_tensors(
        folder, layout.tensors, dtype=how.dtype, max_shard_size=how.max_shard_size, progress=how.progress
    )


def plain_tensors(record: Record) -> dict[str, StoredTensor]:
    """A record's tensors but the reduced vocabulary's ids, in a fixed order; layouts have these ids in other forms."""
    tensors = record.tensors or {}
    return {name: tensors[name] for name in sorted(tensors) if name != "draft_token_ids"}


def offset_tensors(record: Record, *, with_mask: bool = False) -> dict[str, StoredTensor]:
    """`d2t` (target id = i + d2t[i]) of a reduced vocabulary, and `t2d`, True for its ids; empty without one."""
    held = (record.tensors or {}).get("draft_token_ids")
    if record["draft_vocab"] is None or held is None:
        return {}
    ids = torch.tensor(record["draft_vocab"], dtype=torch.int64)
    found = {"d2t": held.transformed("ids to offsets", ids - torch.arange(len(ids)))}
    if with_mask:
        mask = torch.zeros(record["vocab_size"], dtype=torch.bool)
        mask[ids] = True
        found["t2d"] = held.transformed("ids to a mask", mask)
    return found


__all__ = [
    "TARGET", "HowToWrite", "Layout", "Variant", "Writer", "folder_writer", "offset_tensors", "plain_tensors",
    "write_layout",
]  # fmt: skip
