"""The tables of formats in the READMEs, made from the registry; `python -m dspark.conversion.tables` prints them."""

from __future__ import annotations

from .limits import Limits
from .registry import FORMATS, WRITERS
from .writing import Writer

_HEADS = ("vanilla", "gated", "rnn")


def format_table() -> list[str]:
    """What is read: a row per format."""
    rows = [f"| `{entry.name}` | {entry.title} |" for entry in FORMATS.values()]
    return ["| format | written by |", "|---|---|", *rows]


def writer_table() -> list[str]:
    """What is written: a row per format, and per kind of drafter where it takes them differently."""
    rows = [row for writer in WRITERS.values() for row in _rows(writer)]
    return ["| `--to` | read by | kind | does not take |", "|---|---|---|---|", *rows]


def _rows(writer: Writer) -> list[str]:
    kinds: dict[str, list[str]] = {}
    for kind, limits in writer.rows:
        kinds.setdefault(_not_taken(limits), []).append(kind)
    if not kinds:
        kinds[_rest(writer)] = ["all"]
    start = f"| `{writer.name}` | {writer.title}"
    return [f"{start} | {', '.join(names)} | {refused} |" for refused, names in kinds.items()]


def _rest(writer: Writer) -> str:
    return "what its section names" if writer.suffix else "nothing: all settings have a place"


def _not_taken(limits: Limits) -> str:
    missing = [head for head in _HEADS if head not in limits.heads]
    is_dflash = limits.heads == ("none",)  # which says it has no heads and a silent anchor slot
    parts = [f"{' and '.join(missing)} heads"] if missing and not is_dflash else []
    if "none" not in limits.heads:
        parts.append("rank 0 (zeros can be added)")
    if limits.anchors == (True,):
        parts.append("silent anchor slots")
    if not limits.has_draft_vocab:
        parts.append("reduced vocabularies")
    if not limits.taps_embedding:
        parts.append("the embedding as a tapped layer")
    parts.append("windows" if limits.window_rule is None else f"windows but `{limits.window_rule}`")
    if limits.tables == "borrowed":
        parts.append("tables that are not the target's")
    if limits.rope_types == ("default",):
        parts.append("scaled rotary positions")
    return ", ".join(parts)


if __name__ == "__main__":
    import sys

    sys.stdout.write("\n".join([*format_table(), "", *writer_table(), ""]))

__all__ = ["format_table", "writer_table"]
