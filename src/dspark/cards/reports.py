"""Reports a card takes its figures from: files of `dspark eval` and `dspark demo`, about this drafter and no other."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from dspark.conversion import Record

from ..evaluation.provenance import weights_hash
from ..evaluation.report_files import REPORT_FILE
from .figures import demo_section, eval_section

_SECTIONS = {"dspark eval": eval_section, "dspark demo": demo_section}


def report_section(path: str | Path, record: Record) -> str:
    """Markdown of one report's figures.

    Args:
        path: The file, or the folder that `dspark eval --out` wrote.
        record: The drafter.

    Raises:
        ValueError: It is no report, is damaged, or was taken with another drafter; names the file.
        OSError: It cannot be read.
    """
    path = Path(path) / REPORT_FILE if Path(path).is_dir() else Path(path)
    report = _read(path)
    try:
        label = _check_drafter(path, report, record)
        return _SECTIONS[report["what"]](report, label)
    except (KeyError, IndexError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ValueError(
            f"{path} is damaged: it lacks what a report of `{report['what']}` has ({error!r}). Run it again."
        ) from error


def _read(path: Path) -> dict[str, Any]:
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # not JSON, or not UTF-8
        raise ValueError(
            f"{path} is no report: {error}. `dspark eval --out` and `dspark demo --json` write one."
        ) from error
    what = report.get("what") if isinstance(report, dict) else None
    if what not in _SECTIONS:
        raise ValueError(
            f"{path} is no report of {' or '.join(f'`{name}`' for name in _SECTIONS)}: its `what` is {what!r}. A card "
            "shows no other figures."
        )
    if wrong := next(_not_finite(report), None):
        raise ValueError(f"{path} is damaged: {wrong} is not a finite number. Run the evaluation again.")
    return report


def _not_finite(value: Any, name: str = "") -> Iterator[str]:
    if isinstance(value, float) and not math.isfinite(value):
        yield name
    elif isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _not_finite(part, f"{name}.{key}" if name else str(key))


def _check_drafter(path: Path, report: dict[str, Any], record: Record) -> str:
    """The drafter's label in the report."""
    if report["what"] == "dspark demo":
        note, dtype = report["drafter"], report["settings"]["dtype"]
        labels = [""] if _is_of(record, note, dtype) else []
        seen = [_known(note)]
    else:
        configuration = report["configuration"]
        notes, dtype = configuration["drafters"], configuration["machine"]["dtype"]
        labels = [label for label, note in notes.items() if _is_of(record, note, dtype)]
        seen = [f"{label} ({_known(note)})" for label, note in notes.items()]
    if not labels:
        own = {"parameters": num_parameters(record), "weights_hash": _hash(record, dtype)}
        raise ValueError(
            f"{path} is about another drafter: it was taken with {', '.join(seen)}, and {record.source} has "
            f"{_known(own)}. Measure this one."
        )
    return labels[0]


def _is_of(record: Record, note: dict[str, Any], dtype: str) -> bool:
    if note["parameters"] != num_parameters(record):
        return False
    return note.get("weights_hash") in (None, _hash(record, dtype))  # early reports of the demo name no weights


def _known(note: dict[str, Any]) -> str:
    weights = f", weights {note['weights_hash']}" if note.get("weights_hash") else ""
    return f"{note['parameters']:,} parameters{weights}"


def num_parameters(record: Record) -> int:
    """Numbers a drafter stores, without the ids of a reduced vocabulary."""
    return sum(t.num_elements for name, t in (record.tensors or {}).items() if name != "draft_token_ids")


def _hash(record: Record, dtype: str) -> str:
    """As an evaluation that ran in `dtype` hashes them."""
    kind = getattr(torch, dtype)
    return weights_hash((name, tensor[...].to(kind)) for name, tensor in (record.tensors or {}).items())


__all__ = ["num_parameters", "report_section"]
