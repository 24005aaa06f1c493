"""`dspark bench`: batches by policy, recorded acceptance, the serving frontier, and whether its seconds are real.

The commands for one row, `round` and `peers`, are in files of their own.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape

from ..decoding.curve import curve_key
from ..evaluation.batches import PLAIN, BatchCell, measure_batches
from ..evaluation.frontier_report import frontier_report, frontier_tables, verdicts, write_frontier
from ..evaluation.prompt_sets import chat_ids, gather_prompts
from ..evaluation.record_trace import record_trace
from ..evaluation.replay import write_text
from ..evaluation.step_model import check_step_model
from ..scheduling import POLICIES
from ..simulation import Workload, frontier, join_traces, load_traces, save_traces, simulated_policies
from .bench_peers import peers
from .bench_round import round_command
from .bench_shared import (
    GPU,
    AsJson,
    Curve,
    Device,
    Drafter,
    Dtype,
    Gguf,
    PromptFiles,
    Target,
    Threads,
    chosen_pair,
    load_curve,
    mixed_prompts,
    pack,
    policy_ways,
    show,
)
from .common import bad_input_exits, check_out_file, err, out, print_json

app = typer.Typer(help="Measure rounds, peers and batches, record acceptance, simulate serving.", no_args_is_help=True)
app.command("round")(round_command)
app.command()(peers)

_LOADS = [1, 2, 4, 8, 16, 32, 64, 128, 256]


@app.command()
def batches(
    target: Target,
    drafter: Drafter,
    gguf_file: Gguf = None,
    prompts: PromptFiles = [],  # noqa: B006 - typer reads it, nothing changes it
    size: Annotated[list[int], typer.Option(min=1, help="Rows of a batch. Repeatable.")] = [1, 2, 4, 8, 16],  # noqa: B006
    policy: Annotated[list[str], typer.Option(help="Policies. Repeatable.")] = list(POLICIES),  # noqa: B006
    survival_threshold: Annotated[float, typer.Option(min=0, max=1, help="Of the policy `threshold`.")] = 0.3,
    curve: Curve = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="New tokens per row.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs over all prompts.")] = 2,
    dtype: Dtype = "auto",
    device: Device = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Tokens per second by batch size, plain and with every policy, greedily, side by side in one run.

    Prompts are mixed over the sets, so rows have different lengths; every batch size decodes as many of them as the
    largest batch has. Every row's ids are compared with plain decoding.

    Exit codes: 0 done, 1 ids differ from plain generate in fp32, 2 bad input.
    """
    with bad_input_exits():
        model, tokenizer, draft = chosen_pair(target, drafter, gguf_file, dtype, device, threads)
        known = None if curve is None else load_curve(curve)
        ways = policy_ways(policy, survival_threshold, known)
        texts = mixed_prompts(gather_prompts([], prompts, limit=max(size)), max(size))
        ids = [chat_ids(tokenizer, text) for text in texts]
        with ExitStack() as stack:
            pack(stack, model, draft)
            status = stack.enter_context(err.status("bench"))
            cells = measure_batches(
                model, draft, ids, ways, size, max_new_tokens=max_new_tokens, repeats=repeats,
                progress=lambda cell: status.update(f"{cell.batch_size} rows, {cell.way}"),
            )  # fmt: skip
    if as_json:
        print_json([_cell_json(cell) for cell in cells])
    else:
        _show_batches(cells)
    if model.dtype == torch.float32 and not all(cell.is_equal for cell in cells):
        raise typer.Exit(1)


@app.command()
def record(
    target: Target,
    drafter: Drafter,
    out_file: Annotated[Path, typer.Option("--out", help="File to write, e.g. traces.safetensors.")],
    gguf_file: Gguf = None,
    prompts: PromptFiles = [],  # noqa: B006
    limit: Annotated[int | None, typer.Option(min=1, help="Prompts from the start of each set.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="New tokens per prompt.")] = 128,
    dtype: Dtype = "auto",
    device: Device = None,
    threads: Threads = None,
) -> None:
    """Record what the drafter's block brings at every place of the target's greedy answers, for `bench frontier`.

    Exit codes: 0 done, 2 bad input.
    """
    with bad_input_exits():
        check_out_file(out_file)
        sets = gather_prompts([], prompts, limit=limit)
        model, tokenizer, draft = chosen_pair(target, drafter, gguf_file, dtype, device, threads)
        layers = draft.config.target_layer_ids or []
        traces = []
        with ExitStack() as stack:
            pack(stack, model, draft)
            status = stack.enter_context(err.status("record"))
            for name, texts in sets.items():
                written = []
                for number, text in enumerate(texts, start=1):
                    status.update(f"{name}: {number} of {len(texts)}")
                    ids = chat_ids(tokenizer, text).to(model.device)
                    written.append(write_text(model, ids, layers, max_new_tokens=max_new_tokens))
                traces.append(record_trace(name, draft, model, written))
        save_traces(traces, out_file)
    for trace in traces:
        length = trace.accepted_length()
        err.print(f"{escape(trace.domain)}: {trace.num_texts} texts, accepted length {length:.2f}", highlight=False)


@app.command()
def check(
    target: Target,
    drafter: Drafter,
    gguf_file: Gguf = None,
    prompts: PromptFiles = [],  # noqa: B006
    size: Annotated[list[int], typer.Option(min=1, help="Rows of a batch. Repeatable.")] = [1, 2, 4, 8],  # noqa: B006
    curve: Annotated[
        str | None,
        typer.Option(help="Step curve of this pair: a file of `dspark profile`. Default: measured beside each size."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="New tokens per row.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each batch size, after one that warms up.")] = 3,
    dtype: Dtype = "auto",
    device: Device = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Simulated against measured seconds of decoding the same prompts, every draft verified, by batch size.

    A ratio near 1 says that `bench frontier` on this curve tells of this machine. Prompts' passes are left out.

    Exit codes: 0 done, 2 bad input.
    """
    with bad_input_exits():
        known = None if curve is None else load_curve(curve)
        model, tokenizer, draft = chosen_pair(target, drafter, gguf_file, dtype, device, threads)
        texts = mixed_prompts(gather_prompts([], prompts, limit=max(size)), max(size))
        ids = [chat_ids(tokenizer, text) for text in texts]
        with ExitStack() as stack:
            pack(stack, model, draft)
            if known and known.key and (others := known.key.differences(curve_key(model, known.key.model))):
                found = "; ".join(others)
                err.print(f"The curve was measured on something else ({found}).", style="yellow", markup=False)
            status = stack.enter_context(err.status("check"))
            checks = check_step_model(
                model, draft, ids, known, size, max_new_tokens=max_new_tokens, repeats=repeats,
                progress=lambda cell: status.update(f"{cell.batch_size} rows, {cell.way}"),
            )  # fmt: skip
    if as_json:
        print_json([{**asdict(each), "ratio": each.ratio} for each in checks])
        return
    rows = [
        (str(c.batch_size), f"{c.predicted:.3f}", f"{c.measured:.3f}", f"{c.ratio:.2f}",
         f"{c.predicted_rounds}/{c.measured_rounds}")
        for c in checks
    ]  # fmt: skip
    show("Seconds of decoding", ("rows", "predicted", "measured", "ratio", "rounds, predicted/measured"), rows)


@app.command("frontier")
def frontier_command(
    traces: Annotated[Path, typer.Option(help="File of `dspark bench record`.")],
    curve: Annotated[
        str, typer.Option(help="Step curve: a file of `dspark profile`, or `gpu`: a made staircase.")
    ] = GPU,
    load: Annotated[list[int], typer.Option(min=1, help="Rows served together. Repeatable.")] = _LOADS,
    requests_per_row: Annotated[int, typer.Option(min=1, help="Requests per row of a load.")] = 20,
    max_cached_tokens: Annotated[int | None, typer.Option(min=1, help="K/V memory of all rows, in tokens.")] = None,
    policy: Annotated[list[str], typer.Option(help="Policies. Repeatable. Default: all, plain and mtp-1 too.")] = [],  # noqa: B006
    mixed: Annotated[bool, typer.Option("--mixed", help="Also all domains as one load.")] = False,
    seed: Annotated[int, typer.Option(help="Of arrivals.")] = 0,
    out_folder: Annotated[
        Path | None, typer.Option("--out", help="Folder for frontier.json, frontier.md, the plot.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Throughput of all users against the speed of each, by policy, simulated over recorded acceptance.

    Exit codes: 0 done, 2 bad input.
    """
    with bad_input_exits():
        recorded = load_traces(traces)
        if mixed:
            recorded.append(join_traces(recorded))
        known = load_curve(curve)
        makers = simulated_policies(known)
        unknown = [name for name in policy if name not in makers]
        if unknown:
            raise ValueError(f"--policy must be one of {', '.join(makers)}, got {', '.join(unknown)}.")
        chosen = {name: make for name, make in makers.items() if not policy or name in policy}
        work = Workload(requests_per_row, max_cached_tokens=max_cached_tokens, seed=seed)
        started = time.perf_counter()
        with err.status("frontier") as status:
            points = frontier(
                recorded, known, chosen, load, work,
                progress=lambda point: status.update(f"{point.domain}: {point.load} rows, {point.policy}"),
            )  # fmt: skip
        about = {
            "curve": curve if curve == GPU else Path(curve).name,
            "key": str(known.key) if known.key else "none",
            "requests": sum(requests_per_row * p.load for p in points),
            "seconds to simulate": round(time.perf_counter() - started, 1),
            "texts": {trace.domain: trace.num_texts for trace in recorded},
        }
        report = frontier_report(points, about)
        problem = write_frontier(report, out_folder) if out_folder is not None else None
    if problem is not None:
        err.print(problem, style="yellow", markup=False, highlight=False, soft_wrap=True)
    if as_json:
        print_json(report)
        return
    for each in frontier_tables(report):
        show(each.title, each.header, each.rows)
    for line in verdicts(report):
        out.print(line, markup=False, highlight=False)


def _cell_json(cell: BatchCell) -> dict[str, Any]:
    stats = cell.stats
    return {
        "way": cell.way, "batch_size": cell.batch_size, "tokens_per_second": cell.tokens_per_second,
        "seconds": cell.seconds, "new_tokens": cell.new_tokens, "ids_equal": cell.is_equal,
        "accepted_length": None if stats is None else stats.mean_acceptance_length,
        "verified_per_row": None if stats is None else sum(stats.verified) / max(stats.num_rounds, 1),
    }  # fmt: skip


def _show_batches(cells: list[BatchCell]) -> None:
    sizes, ways = (list(dict.fromkeys(values)) for values in zip(*((c.batch_size, c.way) for c in cells), strict=True))
    found = {(cell.way, cell.batch_size): cell for cell in cells}
    plain = {size: found[PLAIN, size].tokens_per_second for size in sizes}
    rows = []
    for way in ways:
        row = [found[way, size] for size in sizes]
        rates = [
            f"{cell.tokens_per_second:.1f} ({cell.tokens_per_second / plain[cell.batch_size]:.2f})" for cell in row
        ]
        rows.append([way, *rates, f"{sum(cell.is_equal for cell in row)}/{len(row)}"])
    show("Tokens per second by rows (over plain)", ("way", *map(str, sizes), "ids equal"), rows)


__all__ = ["app", "batches", "check", "frontier_command", "record"]
