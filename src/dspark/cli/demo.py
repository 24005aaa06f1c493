"""`dspark demo`: the main job on a real model, end to end, with the honest figures."""

from __future__ import annotations

import datetime
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.table import Table
from transformers import PreTrainedModel, TextStreamer

from ..cpu import optimize_for_cpu
from ..evaluation import SETS, Summary, chat_ids, compare, plain_seconds, sample_prompts, summarise
from ..evaluation.provenance import weights_hash
from ..modeling_dspark import DSparkDrafter
from ..pairing import require_pair
from ..stats import STEPS, SpeculationStats
from ..version import __version__
from .common import (
    Threshold,
    bad_input_exits,
    demo_drafter,
    demo_target,
    err,
    out,
    print_json,
)
from .loading import load_pair
from .tables import print_table

_PROMPT = "A train leaves at 9:40 and arrives at 12:05. It stops for 15 minutes on the way. How long was it moving?"


def demo(
    target: Annotated[
        str | None, typer.Option(help="Target: folder or Hub id. Default: SmolLM2-135M-Instruct.")
    ] = None,
    drafter: Annotated[
        str | None, typer.Option(help="Drafter: folder or Hub id. Default: the one shipped here.")
    ] = None,
    gguf_file: Annotated[str | None, typer.Option(help="GGUF file inside the target's folder.")] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts per evaluation set in the table.")] = 2,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="New tokens per prompt.")] = 128,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of torch.")] = 2,
    threshold: Threshold = 0.0,
    quick: Annotated[bool, typer.Option("--quick", help="Only the streamed prompt, without the table.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON instead.")] = False,
) -> None:
    """Generate with and without a drafter on a real model, and say what it gained.

    Streams one answer, checks that its ids equal plain `generate`, then runs the first prompts of each evaluation set
    three ways in this same process: stock plain `generate`, plain with packed CPU linears, and the drafter on the
    packed model. Speed-ups are ratios of times taken side by side; times of different runs do not compare.

    Exit codes: 0 all ids equal, 1 some differ, 2 bad input.
    """
    torch.set_num_threads(threads)
    with bad_input_exits():
        if gguf_file and not target:
            raise ValueError("--gguf-file names a file in the target's folder: give --target too.")
        if quick and as_json:
            raise ValueError("--quick makes no table and --json prints nothing else. Leave one of them out.")
        folder, file = (target, gguf_file) if target else demo_target()
        model, tokenizer, draft = load_pair(folder, drafter or demo_drafter(), file, torch.float32)
        require_pair(model, draft, tokenizer)
    if not as_json:
        out.print(f"[bold]target[/]  {type(model).__name__}, {model.num_parameters() / 1e6:.0f} M parameters, fp32")
        out.print(f"[bold]drafter[/] {draft.num_parameters() / 1e6:.1f} M parameters, block {draft.config.block_size}")
        out.print(f"torch {torch.__version__}, transformers {transformers.__version__}, {threads} threads\n")
    sets = {name: [chat_ids(tokenizer, p) for p in sample_prompts(name, prompts)] for name in SETS}
    plain = {"do_sample": False, "max_new_tokens": max_new_tokens}
    equal, stock, rows = True, {}, []
    if not as_json:
        with optimize_for_cpu(model), optimize_for_cpu(draft):
            equal = _streamed(model, draft, tokenizer, plain, threshold)
    chosen = {} if quick else sets
    with err.status("evaluation sets") as status:
        for name, ids in chosen.items():  # set by set, so that all three ways meet the machine in the same mood
            status.update(f"{name}: stock plain generate")
            stock[name] = sum(plain_seconds(model, ids, **plain))
            status.update(f"{name}: packed plain generate and the drafter, in turns")
            with optimize_for_cpu(model), optimize_for_cpu(draft):
                rows += [compare(model, draft, name, i, threshold=threshold, **plain) for i in ids]
    summaries = summarise(rows)
    if as_json:
        print_json(
            _report(model, draft, summaries, stock, settings={**plain, "threshold": threshold, "threads": threads})
        )
    elif summaries:
        _show(summaries, stock)
        out.print(_time_split(summaries))
    if not equal or any(s.num_equal < len(s.rows) for s in summaries):
        raise typer.Exit(1)


def _report(
    model: PreTrainedModel,
    drafter: DSparkDrafter,
    summaries: list[Summary],
    stock: dict[str, float],
    *,
    settings: dict[str, Any],
) -> dict[str, Any]:
    """Figures and what they were taken with."""
    sets = []
    for summary in summaries:
        figures = summary.to_dict()
        figures["stock_plain_seconds"] = stock[summary.name]
        figures["speedup_over_stock"] = stock[summary.name] / figures["speculative_seconds"]
        sets.append(figures)
    return {
        "what": "dspark demo",
        "date": datetime.date.today().isoformat(),
        "settings": {**settings, "dtype": "float32", "block_size": drafter.config.block_size},
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "dspark": __version__},
        "target": {"class": type(model).__name__, "parameters": model.num_parameters()},
        "drafter": {
            "parameters": drafter.num_parameters(),
            "weights_hash": weights_hash(drafter.named_parameters()),
        },
        "mean_speedup": sum(s["speedup"] for s in sets) / max(len(sets), 1),
        "sets": sets,
    }


def _streamed(
    model: PreTrainedModel, drafter: DSparkDrafter, tokenizer: Any, plain: dict[str, Any], threshold: float
) -> bool:
    ids = chat_ids(tokenizer, _PROMPT)
    out.print(f"[bold cyan]prompt[/] {_PROMPT}\n[bold cyan]answer[/]")
    row = compare(
        model, drafter, "demo", ids, threshold=threshold, streamer=TextStreamer(tokenizer, skip_prompt=True), **plain
    )
    stats = row.stats
    verdict = "[green]equal[/]" if row.is_equal else f"[red]differ from token {row.divergence}[/]"
    out.print(
        f"\nids {verdict} to plain generate; {row.num_new_tokens} tokens in {stats.num_target_passes} target passes "
        f"([bold]{stats.tokens_per_pass:.2f}[/] tokens per pass, accepted length {stats.mean_acceptance_length:.2f}); "
        f"[bold]{row.speedup:.2f}x[/] plain\n"
    )
    return row.is_equal


def _show(summaries: list[Summary], stock: dict[str, float]) -> None:
    rows = [
        [
            s.name, str(len(s.rows)), f"{s.num_equal}/{len(s.rows)}", f"{s.stats.mean_acceptance_length:.2f}",
            f"{s.stats.tokens_per_pass:.2f}", f"{s.speedup:.2f}",
            f"{stock[s.name] / sum(r.speculative_seconds for r in s.rows):.2f}",
        ]
        for s in summaries
    ]  # fmt: skip
    mean = sum(s.speedup for s in summaries) / len(summaries)
    header = ("set", "prompts", "ids equal", "tau", "tokens/pass", "x packed plain", "x stock plain")
    title = "Plain generate against the drafter, side by side"
    print_table(out, title, header, [*rows, ["mean", "", "", "", "", f"{mean:.2f}", ""]])


def _time_split(summaries: list[Summary]) -> Table:
    merged = SpeculationStats()
    for s in summaries:
        merged = merged.merge(s.stats)
    table = Table(title=f"Where a round's time goes ({merged.num_rounds} rounds)")
    table.add_column("step")
    table.add_column("ms per round", justify="right")
    table.add_column("share", justify="right")
    total = sum(merged.step_seconds.values()) or 1.0
    rounds = max(merged.num_rounds, 1)
    for step in STEPS:
        seconds = merged.step_seconds[step]
        table.add_row(step, f"{1000 * seconds / rounds:.2f}", f"{seconds / total:.1%}")
    table.add_section()
    for name, seconds in (*merged.model_seconds.items(), ("host", merged.host_share * total)):
        table.add_row(f"[dim]{name}[/]", f"{1000 * seconds / rounds:.2f}", f"{seconds / total:.1%}")
    return table


__all__ = ["demo"]
