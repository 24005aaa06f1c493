"""`convert`: a drafter in any format that is read to any that is written, whole or not at all.

What the result says is read back and held against the source: a field that is not kept is named in the report, one
that would change a draft stops the conversion.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dspark.any_format import read_any
from dspark.files import quiet_bars

from .as_qwen3 import as_qwen3
from .checkpoint import open_checkpoint
from .choices import check_names
from .destination import fresh
from .layout import check_tensors
from .record import Record
from .registry import WRITERS, read_record
from .resolving import explicit, fit_to_target, with_tables, with_zeros, without_tables
from .stream import FileSum, Progress, parse_size
from .target_tables import TargetTables, open_target
from .verifying import NOT_DRAFTING, Verification, VerificationError, differences, verify
from .writing import HowToWrite, Writer

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_DTYPES |= {name: name for name in _DTYPES.values()}


@dataclass(frozen=True)
class ConversionOptions:
    """How [`convert`] goes about it.

    Attributes:
        dtype: `fp32`, `bf16` or `fp16` (or as torch names them) of all floating-point tensors; None: as stored. Of
            formats with their own quantisation, its name.
        max_shard_size: Most bytes of a file, e.g. `5GB`.
        overwrite: Replace a drafter at the destination.
        verify: Compare drafts of source and result before the result is kept.
        tolerance: Largest difference of logits that verification allows; 0: none.
        fill_zeros: Add a sequential head or a confidence bias of zeros where an engine cannot do without.
        as_qwen3: Write Llama-like layers as Qwen3's, where an engine has no others: the same up to rounding.
        fields: Fields of the record that the source leaves open, decided.
        gguf_file: GGUF file inside the source's folder.
        target_gguf_file: GGUF file inside the target's folder.
        revision: Of a source on the Hub.
        target_revision: Of a target on the Hub.
        subfolder: Folder inside the source.
        allow_pickle: Read a source without safetensors, as plain tensors.
        progress: Called with bytes of tensors done and in all.
    """

    dtype: str | None = None
    max_shard_size: str = "5GB"
    overwrite: bool = False
    verify: bool = False
    tolerance: float = 0.0
    fill_zeros: bool = False
    as_qwen3: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)
    gguf_file: str | None = None
    target_gguf_file: str | None = None
    revision: str | None = None
    target_revision: str | None = None
    subfolder: str | None = None
    allow_pickle: bool = False
    progress: Progress | None = None

    def of_source(self) -> dict[str, Any]:
        """What opens the source."""
        names = ("gguf_file", "revision", "subfolder", "allow_pickle")
        return {name: getattr(self, name) for name in names if getattr(self, name)}


@dataclass(frozen=True)
class ConversionReport:
    """What [`convert`] did.

    Attributes:
        source, destination: From where to where.
        read_as: Format of the source.
        written_as: Format of the result.
        record: What was written.
        files: Name, bytes and SHA-256 of each.
        not_kept: Fields the layout does not hold: value in the source, value the result is read with.
        warnings: What a user should know.
        serve_command: The engine's command.
        verification: What the comparison found; None: it was not asked for.
    """

    source: str
    destination: str
    read_as: str
    written_as: str
    record: Record
    files: list[FileSum]
    not_kept: dict[str, tuple[Any, Any]]
    warnings: list[str]
    serve_command: str
    verification: Verification | None

    def to_dict(self) -> dict[str, Any]:
        """For JSON, without the record."""
        return {
            "source": self.source, "destination": self.destination, "read_as": self.read_as,
            "written_as": self.written_as, "files": [entry._asdict() for entry in self.files],
            "not_kept": {name: {"source": a, "result": b} for name, (a, b) in self.not_kept.items()},
            "warnings": self.warnings, "serve_command": self.serve_command,
            "verification": None if self.verification is None else self.verification.to_dict(),
        }  # fmt: skip


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    to: str,
    target: str | os.PathLike[str] | None = None,
    **options: Any,
) -> ConversionReport:
    """Write a drafter in another format.

    Tensors are read and written one at a time; the result appears at `destination` when it is whole.

    Args:
        source: Folder, GGUF file or Hub id in any format of `FORMATS`.
        destination: Folder (or file, where the format is one) to be.
        to: A format of `WRITERS`.
        target: Folder, GGUF file or Hub id of the target: needed where the format wants to know about it, or stores
            copies of its tables. It is not loaded.
        **options: See [`ConversionOptions`].

    Raises:
        ValueError: The format cannot hold this drafter (the field is named), or a file is damaged or in the way.
        OSError: A file is missing or damaged.
        VerificationError: The result drafts otherwise than the source.
    """
    how = ConversionOptions(**options)
    check_names(how.fields)
    writer = _writer(to)
    if isinstance(source, str | Path) and Path(source).expanduser().exists():
        source = Path(source).expanduser()
    tables = None if target is None else _open_target(target, how)
    found = _read(source, how)
    record = _fitted(found, writer, tables, how)
    place = Path(destination).expanduser()
    settings = HowToWrite(
        folder=str(place), dtype=_dtype(how.dtype, writer), max_shard_size=parse_size(how.max_shard_size),
        target=None if target is None else _served(target, writer, how), progress=how.progress,
        target_architecture=None if tables is None else tables.architecture,
    )  # fmt: skip
    sources = [*_places(source, how.subfolder, how.gguf_file), *_places(target, how.target_gguf_file)]
    with fresh(place, sources, overwrite=how.overwrite) as temporary:
        files = writer.write(record, temporary, settings)
        result = _read(temporary, ConversionOptions())
        not_kept = _not_kept(writer.terms(record), result, writer, settings)
        borrowed = tables if found.missing or result.missing else None
        checked = _verified(source, temporary, borrowed, settings, how) if how.verify else None
    return ConversionReport(
        str(source), str(place), found.format, writer.name, record, files, not_kept,
        [*record.warnings, *writer.notes(record), *_about_temperatures(not_kept)],
        writer.serve_command(record, settings.target, str(place)), checked,
    )  # fmt: skip


def _writer(name: str) -> Writer:
    if name not in WRITERS:
        raise ValueError(f"`to` must be one of {', '.join(WRITERS)}, got {name!r}.")
    return WRITERS[name]


def _dtype(name: str | None, writer: Writer) -> str | None:
    if name is None or writer.suffix:
        return name
    if name not in _DTYPES:
        raise ValueError(f"`dtype` must be one of {', '.join(_DTYPES)}, got {name!r}.")
    return _DTYPES[name]


def _served(target: str | os.PathLike[str], writer: Writer, how: ConversionOptions) -> str:
    """The target as the engine is given it: an engine of GGUF files gets the file, others the folder."""
    return str(Path(target, how.target_gguf_file) if writer.suffix and how.target_gguf_file else target)


def _places(source: str | os.PathLike[str] | None, *parts: str | None) -> list[str]:
    """A source and what in it is read."""
    if source is None:
        return []
    named = [part for part in parts if part is not None]
    return [str(source), *([str(Path(source, *named))] if named else [])]


def _open_target(target: str | os.PathLike[str], how: ConversionOptions) -> TargetTables:
    hub = {} if how.target_revision is None else {"revision": how.target_revision}
    return open_target(target, gguf_file=how.target_gguf_file, **hub)


def _read(source: Any, how: ConversionOptions) -> Record:
    """Record of a whole checkpoint: every tensor is there, of the shape its config asks for."""
    raw, record = read_any(source, how.of_source(), dict(how.fields))
    if record is None:
        record = read_record(open_checkpoint(source, raw, **how.of_source()), **how.fields)
    check_tensors(record, record.to_config())
    return record


def _fitted(record: Record, writer: Writer, target: TargetTables | None, how: ConversionOptions) -> Record:
    """The record as the writer takes it.

    Raises:
        ValueError: It does not; says why.
    """
    record = explicit(record)
    if target is not None:
        record = fit_to_target(record, target)
    if how.as_qwen3:
        record = as_qwen3(record, target)
    if target is not None:
        tables = writer.tables(record)
        if tables == "stored" and record.missing:
            record = with_tables(record, target)
        if tables == "borrowed":
            record = without_tables(record, target)
    reason = writer.refuses(record)
    if reason is not None and how.fill_zeros:
        record = with_zeros(record)
        reason = writer.refuses(record)
    if reason is not None:
        raise ValueError(f"{record.source} ({record.format}) cannot be written as {writer.name}. {reason}.")
    return record


def _not_kept(record: Record, result: Record, writer: Writer, how: HowToWrite) -> dict[str, tuple[Any, Any]]:
    """Fields the result is read with another value for.

    Raises:
        ValueError: One of them decides what is drafted.
    """
    found = differences(record, result)
    if how.dtype is not None or not writer.is_exact:
        found.pop("dtype", None)
    wrong = {name: pair for name, pair in found.items() if name not in NOT_DRAFTING}
    if wrong or result.format not in writer.reads_as:
        raise ValueError(
            f"The result would be read as {result.format} with "
            f"{', '.join(f'`{name}` {after!r} instead of {before!r}' for name, (before, after) in wrong.items())}. "
            f"{writer.name} does not hold this drafter; nothing was written."
        )
    return {name: pair for name, pair in found.items() if pair[0] is not None}


def _verified(
    source: Any, result: Path, target: TargetTables | None, settings: HowToWrite, how: ConversionOptions
) -> Verification:
    from dspark.modeling_dspark import DSparkDrafter  # here: conversion is read by the module the drafter is in

    dtype = getattr(torch, settings.dtype, torch.float32) if settings.dtype else torch.float32

    def load(place: Any, **kwargs: Any) -> Any:
        model = DSparkDrafter.from_pretrained(place, dtype=dtype, **kwargs).float().eval()
        for parameter in model.parameters():
            # Where a tensor lay in its file decides its alignment in memory, and that the last bit of a product.
            parameter.data = parameter.data.clone()
        return model

    with quiet_bars():
        return verify(
            lambda: load(source, **how.of_source(), **how.fields),
            lambda: load(result),
            target,
            tolerance=how.tolerance,
        )


def _about_temperatures(not_kept: Mapping[str, Any]) -> list[str]:
    if "confidence_temperatures" not in not_kept:
        return []
    return [
        "The format holds no confidence temperatures: an engine that uses the confidence calibrates it anew (sglang "
        "is given a file of them)."
    ]


__all__ = ["ConversionOptions", "ConversionReport", "VerificationError", "convert"]
