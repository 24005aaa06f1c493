"""The file of a `ThroughputCurve`: JSON of raw samples, with what the times belong to."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

_FORMAT, _VERSION = "dspark-throughput-curve", 1
_Curve = TypeVar("_Curve")
Table = dict[int, dict[int, list[float]]]


@dataclass(frozen=True)
class CurveKey:
    """What step times belong to; on anything else they mislead.

    Attributes:
        model: Public name of the target.
        device: Name of the device.
        dtype: Of the weights, as `float32`.
        attention: Attention implementation, as `sdpa`.
        threads: CPU threads of torch.
        packed: Whether the target's linear layers were packed for the CPU; None: not known (files of before).
    """

    model: str
    device: str
    dtype: str
    attention: str
    threads: int
    packed: bool | None = None

    def differences(self, now: CurveKey) -> list[str]:
        """Fields in which a curve's key differs from that of `now`, as `name: own in the curve, other's now`."""
        pairs = [(f.name, getattr(self, f.name), getattr(now, f.name)) for f in fields(self)]
        return [
            f"{name}: {_said(own)} in the curve, {_said(other)} now"
            for name, own, other in pairs
            if own != other and None not in (own, other)
        ]


class Document(NamedTuple):
    """A curve as the file holds it.

    Attributes:
        key: What the times belong to.
        target: Context length to token count to seconds.
        rows: Rows to token count to seconds, at the shortest context.
        draft: Rows to slots to seconds.
    """

    key: CurveKey | None
    target: Table
    rows: Table
    draft: Table

    def to_json(self) -> dict[str, Any]:
        """JSON-able form."""
        tables = {
            name: {str(a): {str(b): seconds for b, seconds in sorted(row.items())} for a, row in sorted(table.items())}
            for name, table in (("target", self.target), ("rows", self.rows), ("draft", self.draft))
        }
        key = None if self.key is None else asdict(self.key)
        return {"format": _FORMAT, "version": _VERSION, "key": key, **tables}

    @classmethod
    def from_json(cls, data: Any) -> Document:
        """Checked values.

        Raises:
            ValueError: Names the entry that is wrong.
        """
        if not isinstance(data, dict) or data.get("format") != _FORMAT:
            raise ValueError(f"it is no throughput curve (`format` is not {_FORMAT!r}). `dspark profile` writes one")
        if data.get("version") != _VERSION:
            raise ValueError(f"`version` is {data.get('version')!r}, this release reads {_VERSION}. Profile again")
        target = _table(data, "target", least=(0, 1))
        if not any(target.values()):
            raise ValueError("`target` holds no times")
        rows = _table(data, "rows", least=(1, 1)) if "rows" in data else {}
        return cls(_key(data.get("key")), target, rows, _table(data, "draft", least=(1, 0)))


def _said(value: Any) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _key(data: Any) -> CurveKey | None:
    if data is None:
        return None
    types = {"model": str, "device": str, "dtype": str, "attention": str, "threads": int}
    if not isinstance(data, dict) or data.keys() - {"packed"} != types.keys():
        raise ValueError(f"`key` must have the fields {', '.join(types)}, got {data!r}")
    if data.get("packed") is not None:
        types["packed"] = bool
    for name, kind in types.items():
        if type(data[name]) is not kind:
            raise ValueError(f"`key.{name}` must be of type {kind.__name__}, got {data[name]!r}")
    return CurveKey(**data)


def _table(data: dict[str, Any], name: str, *, least: tuple[int, int]) -> Table:
    table: Table = {}
    for outer, row in _object(data.get(name), name).items():
        numbers = table.setdefault(_count(outer, name, least[0]), {})
        for inner, seconds in _object(row, f"{name}.{outer}").items():
            place = f"{name}.{outer}.{inner}"
            numbers[_count(inner, f"{name}.{outer}", least[1])] = _seconds(seconds, place)
    return table


def _object(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"`{place}` must be an object of counts, got {value!r}")
    return value


def _count(text: str, place: str, least: int) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) < least:
        raise ValueError(f"`{place}` must have whole numbers of at least {least} as names, got {text!r}")
    return int(text)


def _seconds(value: Any, place: str) -> list[float]:
    is_list = isinstance(value, list) and len(value) > 0
    if not is_list or not all(type(v) in (int, float) and 0 < v < math.inf for v in value):
        raise ValueError(f"`{place}` must be a list of positive finite seconds, got {value!r}")
    return [float(v) for v in value]


def write(path: Path, data: dict[str, Any]) -> None:
    """Write JSON beside `path`, then rename it."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        temporary.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read(path: Path, parse: Callable[[Any], _Curve]) -> _Curve:
    """Parse a JSON file.

    Raises:
        ValueError: Not JSON, or `parse` refuses it; names the file.
        OSError: It is not there, or cannot be read.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"There is no curve file {path}. `dspark profile --target ... --drafter ... --out {path}` makes one."
        )
    try:
        return parse(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:  # JSON and text decoding errors are ones too
        raise ValueError(f"{path} cannot be used as a throughput curve: {error}.") from error


__all__ = ["CurveKey", "Document", "read", "write"]
