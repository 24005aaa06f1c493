"""`dspark profile`: the step times that schedulers decide by, measured on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from ..cpu import packed
from ..decoding.curve import curve_key
from ..evaluation.profile import profile_pair
from ..evaluation.provenance import public_name
from ..scheduling import ThroughputCurve
from .common import bad_input_exits, check_out_file, chosen_device, err, load_drafter, load_target, out, print_json
from .data import target_dtype


def profile(
    target: Annotated[str, typer.Option(help="Target: folder or Hub id.")],
    drafter: Annotated[str, typer.Option(help="Drafter: folder or Hub id.")],
    curve_file: Annotated[Path, typer.Option("--out", help="File to write, JSON.")],
    gguf_file: Annotated[str | None, typer.Option(help="GGUF file inside the target's folder.")] = None,
    tokens: Annotated[
        list[int], typer.Option(min=1, help="Tokens in the target's forward, over all rows. Repeatable.")
    ] = [1, 2, 4, 8, 16, 32, 64],  # noqa: B006 - typer reads it, nothing changes it
    contexts: Annotated[list[int], typer.Option(min=1, help="Tokens already in the cache. Repeatable.")] = [128, 1024],  # noqa: B006
    rows: Annotated[
        list[int],
        typer.Option(
            min=1,
            help="Rows of the batch. Repeatable: the drafter's side is timed with each, the target with the fewest, "
            "of which token counts are multiples.",
        ),
    ] = [1],  # noqa: B006
    repeats: Annotated[int, typer.Option(min=1, help="Timings of each shape; the median counts.")] = 5,
    dtype: Annotated[str, typer.Option(help="fp32, bf16, fp16, or auto: fp32 on a CPU, else bf16.")] = "auto",
    device: Annotated[str | None, typer.Option(help="Default: cuda where there is one, else cpu.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of torch. Default: torch's own.")] = None,
    pack: Annotated[bool, typer.Option(help="On a CPU: pack the linear layers of both models while it runs.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the curve as JSON on stdout.")] = False,
) -> None:
    """Measure how long a step takes by tokens in the target's forward, and what the drafter's side takes.

    Use the file as `SpeculationConfig(policy="scheduled", throughput_curve=ThroughputCurve.load(file))`. Measure with
    nothing else running, in the state that will decode: the same device, dtype, threads and packing.

    Example: dspark profile --target Qwen/Qwen3-4B --drafter my-drafter --out curve.json --tokens 1 --tokens 8

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
        with err.status("profile") as status, packed(model, wanted=pack), packed(draft, wanted=pack):
            curve = profile_pair(
                model, draft, token_counts=tokens, contexts=contexts, rows=rows, repeats=repeats, key=key,
                on_progress=lambda what: status.update(f"profile: {what}"),
            )  # fmt: skip
        curve.save(curve_file)
    if as_json:
        print_json(_figures(curve, rows))
        return
    out.print(_table(curve))
    for count in sorted(set(rows)):
        before = curve.draft_seconds(count)
        out.print(f"drafter's side: {before * 1e3:.2f} ms per round of {count} row(s)", highlight=False)
    err.print(f"{curve_file}: written", highlight=False)


def _figures(curve: ThroughputCurve, rows: list[int]) -> dict[str, Any]:
    """The curve's document with its medians: seconds and ratio to the fewest tokens, per context."""
    medians = {
        str(context): [
            {"tokens": n, "seconds": seconds, "ratio": seconds / curve.points(context)[0][1]}
            for n, seconds in curve.points(context)
        ]
        for context in curve.contexts
    }
    before = {str(count): curve.draft_seconds(count) for count in sorted(set(rows))}
    return {**curve.to_json(), "medians": medians, "draft_seconds": before}


def _table(curve: ThroughputCurve) -> Table:
    table = Table(title="The target's forward")
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


__all__ = ["profile"]
