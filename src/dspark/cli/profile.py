"""`dspark profile`: the step times that schedulers decide by, measured on this machine."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from ..cpu import packed
from ..decoding.curve import curve_key
from ..evaluation.profile import default_slots, profile_pair
from ..evaluation.provenance import public_name
from ..scheduling import CurveKey, ThroughputCurve
from ..training.progress import WorkProgress, plural
from .common import (
    Pack,
    Threads,
    bad_input_exits,
    check_out_file,
    chosen_device,
    err,
    load_drafter,
    load_target,
    out,
    print_json,
    use_threads,
)
from .data import target_dtype


def profile(
    target: Annotated[str, typer.Option(help="Target: folder or Hub id.")],
    drafter: Annotated[str, typer.Option(help="Drafter: folder or Hub id.")],
    curve_file: Annotated[Path, typer.Option("--out", help="File to write, JSON.")],
    gguf_file: Annotated[str | None, typer.Option(help="GGUF file inside the target's folder.")] = None,
    rows: Annotated[list[int], typer.Option(min=1, help="Rows of the batches. Repeatable.")] = [1],  # noqa: B006 - typer reads it, nothing changes it
    slots: Annotated[
        list[int] | None,
        typer.Option(min=0, help="Drafts per row. Repeatable. Default: none, one, half and all of a block."),
    ] = None,
    contexts: Annotated[list[int], typer.Option(min=1, help="Tokens in each row's cache. Repeatable.")] = [128, 1024],  # noqa: B006
    repeats: Annotated[int, typer.Option(min=1, help="Timings of each shape; the median counts.")] = 3,
    dtype: Annotated[str, typer.Option(help="fp32, bf16, fp16, or auto: fp32 on a CPU, else bf16.")] = "auto",
    device: Annotated[str | None, typer.Option(help="Default: cuda where there is one, else cpu.")] = None,
    threads: Threads = None,
    pack: Pack = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the curve as JSON on stdout.")] = False,
) -> None:
    """Measure what a round takes in real rounds: the target's side by tokens in its forward, the drafter's by slots.

    Tokens in the forward are rows times one more than their drafts, so choose rows as your batches will have. Use the
    file as `SpeculationConfig(policy="scheduled", throughput_curve=ThroughputCurve.load(file))`. Measure with
    nothing else running, in the state that will decode: the same device, dtype, threads and packing.

    Example: dspark profile --target Qwen/Qwen3-4B --drafter my-drafter --out curve.json --rows 1 --rows 8

    Exit codes: 0 done, 2 bad input.
    """
    with bad_input_exits():
        check_out_file(curve_file)
        where = chosen_device(device)
        use_threads(threads)
        model, _ = load_target(target, gguf_file, target_dtype(dtype, where))
        draft = load_drafter(drafter, target_dtype(dtype, where))
        for module in (model, draft):
            torch.nn.Module.to(module, where)
        slots = default_slots(draft) if slots is None else slots
        total = 1 + len(set(contexts)) * len(set(rows))
        with (
            packed(model, wanted=pack),
            packed(draft, wanted=pack),
            # Each batch is named before it runs, so the first name finds -1 done.
            WorkProgress("Profiling", total, unit="batches", done=-1, console=err) as work,
        ):
            key = curve_key(model, gguf_file or public_name(target))
            curve = profile_pair(
                model, draft, rows=rows, slots=slots, contexts=contexts, repeats=repeats, key=key,
                on_progress=partial(_say, work),
            )  # fmt: skip
        curve.save(curve_file)
    if as_json:
        print_json(_figures(curve, rows, slots))
        return
    out.print(_table(curve, rows, slots))
    err.print(f"{curve_file}: written, of {_conditions(key)}", highlight=False, soft_wrap=True)


def _say(work: WorkProgress, what: str) -> None:
    """What is measured next; what was named before it is done."""
    if work.is_bar:
        work.advance(1, what)
    else:
        work.say(f"profile: {what}")


def _conditions(key: CurveKey) -> str:
    packing = "packed" if key.packed else "not packed"
    return f"{key.model} on {key.device} ({key.dtype}, {key.attention}, {plural(key.threads, 'thread')}, {packing})"


def _figures(curve: ThroughputCurve, rows: list[int], slots: list[int]) -> dict[str, Any]:
    """The curve's document with its medians; `ratio` is to the fewest tokens, drafting is by rows and slots."""
    medians = {
        str(context): [
            {"tokens": n, "seconds": seconds, "ratio": seconds / curve.points(context)[0][1]}
            for n, seconds in curve.points(context)
        ]
        for context in curve.contexts
    }
    before = {str(r): {str(n): curve.draft_seconds(r, n) for n in sorted(set(slots))} for r in sorted(set(rows))}
    return {**curve.to_json(), "medians": medians, "draft_seconds": before}


def _table(curve: ThroughputCurve, rows: list[int], slots: list[int]) -> Table:
    """Medians in milliseconds by rows and drafts; at longer contexts the curve knows tokens only."""
    first, *longer = curve.contexts
    table = Table(
        title="Milliseconds of a round",
        caption=f"Target: at {first:,} cached tokens per row; the ratio is to the first line's. At longer contexts: "
        "of all rows with so many tokens in the forward."
        if longer
        else None,
    )
    for name in ("rows", "drafts", "tokens", "drafter", "target", "ratio", *(f"at {context:,}" for context in longer)):
        table.add_column(name, justify="right")
    by_rows = curve.to_json()["rows"]
    known = {context: dict(curve.points(context)) for context in longer}
    least: float | None = None
    for count in sorted(set(rows)):
        for drafts in sorted(set(slots)):
            tokens = count * (1 + drafts)
            seconds = median(by_rows[str(count)][str(tokens)])
            least = least or seconds
            before = curve.draft_seconds(count, drafts)
            table.add_row(
                str(count), str(drafts), str(tokens), f"{before * 1e3:.1f}", f"{seconds * 1e3:.1f}",
                f"{seconds / least:.2f}", *(f"{points[tokens] * 1e3:.1f}" for points in known.values()),
            )  # fmt: skip
        table.add_section()
    return table


__all__ = ["profile"]
