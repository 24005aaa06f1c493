"""`dspark inspect`: what a checkpoint is, what every decision was read from, and why it is refused where it is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.markup import escape
from rich.table import Table

from dspark.conversion import FORMATS, SEMANTIC_FIELDS, Record, check_finite, check_tensors

from ..hub import read_record
from .common import BAD_INPUT, bad_input_exits, check_source, out, print_json

_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_NOTE = (
    "name",
    "architecture",
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "vocab_size",
    "rope_type",
    "rope_theta",
)


def inspect(
    source: Annotated[
        str, typer.Argument(help="Drafter: folder, GGUF file or Hub id, in any format that can be read.")
    ],
    gguf_file: Annotated[str | None, typer.Option(help="GGUF file inside the folder or repository.")] = None,
    subfolder: Annotated[str | None, typer.Option(help="Folder inside the repository.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON, also when it is refused.")] = False,
) -> None:
    """Say what a drafter is: format, settings as they will be used and where each was read, tensors, what it borrows.

    The weights are read once, tensor by tensor, to find numbers that are not finite; no model is built.

    Exit codes: 0 a drafter that can be loaded, 2 anything else, with the reason.
    """
    how = {"gguf_file": gguf_file, "subfolder": subfolder, "revision": revision}
    with bad_input_exits():
        try:
            facts = _inspected(source, {key: value for key, value in how.items() if value is not None})
        except (ValueError, OSError, ImportError) as error:
            if not as_json:
                raise
            print_json({"source": source, "refused": str(error)})
            raise typer.Exit(BAD_INPUT) from error
    if as_json:
        print_json(facts)
        return
    out.print(Group(*_tables(facts)))


def _inspected(source: str, how: dict[str, Any]) -> dict[str, Any]:
    check_source(source)
    record = read_record(Path(source).expanduser() if Path(source).expanduser().exists() else source, **how)
    config = record.to_config()
    check_tensors(record, config)
    tensors = record.tensors or {}
    for tensor in tensors.values():
        tensor[...]
    check_finite(record)
    size = sum(tensor.num_elements for tensor in tensors.values())
    return {
        "source": source,
        "format": record.format,
        "written_by": FORMATS[record.format].title,
        **{name: _plain(name, record[name]) for name in SEMANTIC_FIELDS if name != "target"},
        "num_draft_tokens": config.num_draft_tokens,
        "draft_vocab_size": config.draft_vocab_size,
        "borrows_from_target": record.missing,
        "read_from": {name: record.fields[name].source for name in SEMANTIC_FIELDS},
        "fits_target": _fitting(record),
        "target": config.target,
        "tensors": len(tensors),
        "parameters": size,
        "dtypes": sorted({tensor.dtype for tensor in tensors.values()}),
        "bytes": {"stored": sum(t.num_bytes for t in tensors.values()), **{k: n * size for k, n in _BYTES.items()}},
        "ignored": record.ignored,
        "warnings": record.warnings,
    }


def _plain(name: str, value: Any) -> Any:
    """A value as JSON has it; of a reduced vocabulary its size and ends."""
    if name == "draft_vocab" and value is not None:
        return {"size": len(value), "lowest": value[0], "highest": value[-1]}
    if name == "layers_attention":
        return [layer._asdict() for layer in value]
    return value if value is None or isinstance(value, bool | int | float | str | list | dict) else str(value)


def _fitting(record: Record) -> dict[str, Any]:
    """What a target must have."""
    layers = record["num_target_layers"]
    return {
        "hidden_size": record["target_hidden_size"] or record["hidden_size"],
        "num_hidden_layers": layers if layers is not None else f"at least {max(record['target_layer_ids']) + 2}",
        "vocab_size": record["vocab_size"] if record["vocab_size"] is not None else "any",
    }


def _tables(facts: dict[str, Any]) -> list[Table]:
    what = Table(title=escape(f"{facts['source']}: {facts['format']}"), caption=facts["written_by"])
    for column in ("field", "value", "read from"):
        what.add_column(column, overflow="fold")
    for name in SEMANTIC_FIELDS:
        if name != "target":
            what.add_row(name, escape(_shown(facts[name])), escape(facts["read_from"][name]))
    rest = Table(show_header=False)
    for column in ("what", "which"):
        rest.add_column(column, overflow="fold")
    rest.add_row("drafts per block", str(facts["num_draft_tokens"]))
    rest.add_row("borrows from target", ", ".join(facts["borrows_from_target"]) or "nothing")
    rest.add_row("fits targets with", ", ".join(f"{key} {value}" for key, value in facts["fits_target"].items()))
    rest.add_row("trained for", escape(_note(facts["target"])))
    rest.add_row("tensors", f"{facts['tensors']} ({facts['parameters']:,} numbers, {', '.join(facts['dtypes'])})")
    rest.add_row("memory", ", ".join(f"{key} {value:,} B" for key, value in facts["bytes"].items()))
    for name, why in facts["ignored"].items():
        rest.add_row("not used", escape(f"{name}: {why}"))
    for warning in facts["warnings"]:
        rest.add_row("warning", escape(warning))
    return [what, rest]


def _shown(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):  # layers
        return "; ".join(_layer(layer) for layer in value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {part}" for key, part in value.items())
    return str(value)


def _layer(layer: dict[str, Any]) -> str:
    sight = "full" if layer["window"] is None else f"window {layer['window']} ({layer['window_rule']})"
    return sight + (", causal" if layer["causal_in_block"] else "")


def _note(target: dict[str, Any] | None) -> str:
    """The note on the target without its hashes."""
    note = target or {}
    parts = [f"{key.replace('_', ' ')} {note[key]}" for key in _NOTE if note.get(key) is not None]
    hashed = sum(1 for key, value in note.items() if key.endswith(("_hash", "_hashes")) and value)
    return "; ".join(parts + ([f"{hashed} hashes of its weights"] if hashed else [])) or "not noted"


__all__ = ["inspect"]
