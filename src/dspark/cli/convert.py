"""`dspark convert`: a drafter in another format, checked, with the command that serves it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from rich.table import Table

from dspark.conversion import WRITERS, ConversionReport, VerificationError
from dspark.conversion import convert as convert_drafter

from .common import bad_input_exits, check_source, err, out, print_json, term_ends_cleanly

NOT_THE_SAME = 1
_SHOWN = (
    "family", "block_size", "sample_from_anchor", "target_layer_ids", "mask_token_id", "markov_rank",
    "markov_head_type", "enable_confidence_head", "confidence_head_with_markov", "has_embed", "has_lm_head",
)  # fmt: skip


def convert(
    source: Annotated[str, typer.Argument(help="Drafter: folder, GGUF file or Hub id, in any format that is read.")],
    destination: Annotated[Path, typer.Argument(help="Where the result goes; must not exist (see --overwrite).")],
    to: Annotated[str, typer.Option(help=f"Format of the result: {', '.join(WRITERS)}.")],
    target: Annotated[
        str | None,
        typer.Option(help="Target: folder, GGUF file or Hub id. Not loaded; read where the format needs of it."),
    ] = None,
    gguf_file: Annotated[str | None, typer.Option(help="GGUF file inside the drafter's folder.")] = None,
    target_gguf_file: Annotated[str | None, typer.Option(help="GGUF file inside the target's folder.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="fp32, bf16 or fp16 for all weights. Default: as they are stored.")
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Most bytes of a file, e.g. 5GB.")] = "5GB",
    overwrite: Annotated[bool, typer.Option(help="Replace a drafter that is there.")] = False,
    verify: Annotated[bool, typer.Option(help="Load source and result and compare drafts before keeping it.")] = False,
    tolerance: Annotated[float, typer.Option(min=0.0, help="Largest difference of logits --verify allows.")] = 0.0,
    fill_zeros: Annotated[
        bool, typer.Option(help="Add a sequential head or confidence bias of zeros where the engine must have one.")
    ] = False,
    as_qwen3: Annotated[
        bool, typer.Option("--as-qwen3", help="Write Llama-like layers as Qwen3's, for engines that have no others.")
    ] = False,
    field: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=JSON", help="A field the source leaves open, e.g. sample_from_anchor=true."
        ),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the source on the Hub.")] = None,
    target_revision: Annotated[str | None, typer.Option(help="The same of the target.")] = None,
    subfolder: Annotated[str | None, typer.Option(help="Folder inside the source.")] = None,
    allow_pickle: Annotated[
        bool, typer.Option(help="Read a source without safetensors, as plain tensors only.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Write a drafter in the format of another framework or engine, and say how to serve it there.

    Tensors are copied one at a time, so memory is that of the largest one; the result appears whole or not at all.
    What a format cannot hold is refused with the field named; what is left out without changing a draft is listed.

    Example: dspark convert my-drafter my-drafter-vllm --to vllm --target Qwen/Qwen3-4B --verify

    Exit codes: 0 written, 1 --verify found another drafter (nothing is kept), 2 bad input.
    """
    with bad_input_exits():
        for place in (source, target):
            if place is not None:
                check_source(place)
        options: dict[str, Any] = {
            "gguf_file": gguf_file, "target_gguf_file": target_gguf_file, "dtype": dtype,
            "max_shard_size": max_shard_size, "overwrite": overwrite, "verify": verify, "tolerance": tolerance,
            "fill_zeros": fill_zeros, "as_qwen3": as_qwen3, "fields": dict(map(_field, field or [])),
            "revision": revision, "target_revision": target_revision, "subfolder": subfolder,
            "allow_pickle": allow_pickle,
        }  # fmt: skip
        try:
            with term_ends_cleanly(), _progress() as tell:
                report = convert_drafter(source, destination, to=to, target=target, progress=tell, **options)
        except VerificationError as error:
            err.print(f"[bold red]not the same:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
            raise typer.Exit(NOT_THE_SAME) from error
    if as_json:
        print_json(report.to_dict())
        return
    _show(report)


def _field(text: str) -> tuple[str, Any]:
    """`NAME=JSON`; what is no JSON is a text."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError(f"`--set` takes NAME=JSON, e.g. sample_from_anchor=true, got {text!r}.")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value
    except (ValueError, RecursionError) as error:
        raise ValueError(f"`--set {name}=` takes JSON of a usual size, got {value:.40}... ({error!s:.100})") from error


@contextmanager
def _progress() -> Iterator[Any]:
    """A bar on stderr, none where that is no terminal."""
    bar = Progress(
        TextColumn("writing"), BarColumn(), DownloadColumn(), console=err, transient=True, disable=not err.is_terminal
    )
    with bar:
        task = bar.add_task("writing", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _show(report: ConversionReport) -> None:
    title = escape(f"{report.source} ({report.read_as}) as {report.written_as}")
    what = Table(title=title, show_header=False)
    for column in ("what", "which"):
        what.add_column(column, overflow="fold")
    for name in _SHOWN:
        what.add_row(name, escape(str(report.record[name])))
    what.add_row("drafts per block", str(report.record.num_draft_tokens))
    out.print(what)
    for name, (before, after) in report.not_kept.items():
        words = f"not kept: {name} ({_brief(before)} in the source, read as {_brief(after)})"
        out.print(words, highlight=False, markup=False)
    for warning in report.warnings:
        out.print(f"warning: {warning}", highlight=False, markup=False)
    files = Table(title=escape(report.destination))
    for column, justify in (("file", "left"), ("bytes", "right"), ("sha256", "left")):
        files.add_column(column, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for entry in report.files:
        files.add_row(escape(entry.name), f"{entry.bytes:,}", entry.sha256)
    out.print(files)
    if (found := report.verification) is not None:
        confidence = "no confidence head" if found.confidence is None else f"of confidence logits {found.confidence:g}"
        out.print(
            f"verified: largest difference of draft logits {found.logits:g}, {confidence} (at most "
            f"{found.tolerance:g} was allowed)", highlight=False,
        )  # fmt: skip
    out.print("\nserve it:")
    out.print(report.serve_command, highlight=False, markup=False, soft_wrap=True)


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


__all__ = ["convert"]
