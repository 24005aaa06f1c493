"""Writing our own layout: any record goes into it."""

from __future__ import annotations

import json
from pathlib import Path

from . import commands
from .own import NAME
from .record import Record
from .stream import FileSum
from .writing import TARGET, HowToWrite, Layout, Writer, plain_tensors, write_layout


def _write(record: Record, folder: Path, how: HowToWrite) -> list[FileSum]:
    config = json.loads(record.to_config(architectures=["DSparkDrafter"]).to_json_string(use_diff=False))
    tensors = plain_tensors(record)
    if record["draft_vocab"] is not None:
        tensors["draft_token_ids"] = (record.tensors or {})["draft_token_ids"]
    return write_layout(Layout(config, tensors), folder, how, dtype=record["dtype"])


def _refuses(record: Record) -> str | None:
    try:
        record.to_config()
    except ValueError as error:
        return str(error)
    return None


def _serve(record: Record, target: str | None, folder: str) -> str:
    return commands.ours(record, target or TARGET, folder)


WRITER = Writer(NAME, "this package", (NAME,), _refuses, _write, _serve)

__all__ = ["WRITER"]
