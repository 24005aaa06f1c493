"""`dspark profile`: the step times that schedulers decide by, measured on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from ..cpu import packed
from ..decoding.curve import curve_key
from ..evaluation.profile import default_slots, profile_pair
from ..evaluation.provenance import public_name
from ..scheduling import ThroughputCurve
from .common import bad_input_exits, check_out_file, chosen_device, err, load_drafter, load_target, out, print_json
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
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of torch. Default: torch's own.")] = None,
    pack: Annotated[bool, typer.Option(help="On a CPU: pack the linear layers of both models while it runs.")] = True,
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
        if threads is not None:
            torch.set_num_threads(threads)
        model, _ = load_target(target, gguf_file, target_dtype(dtype, where))
        draft = load_drafter(drafter, target_dtype(dtype, where))
        for module in (model, draft):
            torch.nn.Module.to(module, where)
        key = curve_key(model, gguf_file or public_name(target))
        slots = default_slots(draft) if slots is None else slots
        with err.status("profile") as status, packed(model, wanted=pack), packed(draft, wanted=pack):
            curve = profile_pair(
                model, draft, rows=rows, slots=slots, contexts=contexts, repeats=repeats, key=key,
                on_progress=lambda what: status.update(f"profile: {what}"),
            )  # fmt: skip
        curve.save(curve_file)
    if as_json:
        print_json(_figures(curve, rows, slots))
        return
    out.print(_target_table(curve))
    out.print(_drafter_table(curve, rows, slots))
    err.print(f"{curve_file}: written", highlight=False)


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


def _target_table(curve: ThroughputCurve) -> Table:
    table = Table(title="The target's side")
    table.add_column("tokens", justify="right")
    for context in curve.contexts:
        table.add_column(f"ms at {context}", justify="right")
        table.add_column("ratio", justify="right")
    for index, tokens in enumerate(curve.token_counts()):
        cells = []
        for context in curve.contexts:
            points = curve.points(context)
            seconds = points[index][1]
            cells += [f"{seconds * 1e3:.2f}", f"{seconds / points[0][1]:.2f}"]
        table.add_row(str(tokens), *cells)
    return table


def _drafter_table(curve: ThroughputCurve, rows: list[int], slots: list[int]) -> Table:
    table = Table(title="The drafter's side")
    table.add_column("rows", justify="right")
    for count in sorted(set(slots)):
        table.add_column(f"ms, {count} drafts", justify="right")
    for row in sorted(set(rows)):
        table.add_row(str(row), *(f"{curve.draft_seconds(row, n) * 1e3:.2f}" for n in sorted(set(slots))))
    return table


__all__ = ["profile"]
