"""`dspark profile`: the step times that schedulers decide by, measured on this machine."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

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
    out,
    print_json,
    use_threads,
)
from .data import target_dtype
from .loading import load_pair
from .tables import print_table


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
        model, _, draft = load_pair(target, drafter, gguf_file, target_dtype(dtype, where), where)
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
    _show(curve, rows, slots)
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


def _show(curve: ThroughputCurve, rows: list[int], slots: list[int]) -> None:
    """Medians in milliseconds by rows and drafts; at longer contexts the curve knows tokens only."""
    first, *longer = curve.contexts
    by_rows = curve.to_json()["rows"]
    known = [dict(curve.points(context)) for context in longer]
    shapes = [(count, drafts, count * (1 + drafts)) for count in sorted(set(rows)) for drafts in sorted(set(slots))]
    seconds = [median(by_rows[str(count)][str(tokens)]) for count, _, tokens in shapes]
    lines = [
        [*map(str, shape), f"{curve.draft_seconds(*shape[:2]) * 1e3:.1f}", f"{own * 1e3:.1f}",
         f"{own / seconds[0]:.2f}", *(f"{points[shape[2]] * 1e3:.1f}" for points in known)]
        for shape, own in zip(shapes, seconds, strict=True)
    ]  # fmt: skip
    print_table(
        out,
        "Milliseconds of a round",
        ("rows", "drafts", "tokens", "drafter", "target", "ratio", *(f"target at {context:,}" for context in longer)),
        lines,
        caption=f"target: at {first:,} cached tokens per row; ratio: to the first line"
        + ("; at longer contexts whatever the rows of so many tokens" if longer else ""),
        num_keys=2,
    )


__all__ = ["profile"]
