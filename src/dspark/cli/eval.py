"""`dspark eval`: figures of drafters on a target, and the report a model card shows."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..cpu import optimize_for_cpu
from ..evaluation.calibrate import calibration_prompts
from ..evaluation.evaluator import check_drafters, evaluate, part_of
from ..evaluation.prompt_sets import SETS, Prompting, chat_ids, gather_prompts, prompt_hashes
from ..evaluation.provenance import provenance, public_name
from ..evaluation.report import build_report, calibration_note, has_unequal_ids
from ..evaluation.report_files import write_report
from ..evaluation.results import Results, ResultsLog, merge_results, write_results
from ..evaluation.settings import SWEEP, EvaluationSettings
from .common import (
    Pack,
    Threads,
    bad_input_exits,
    chosen_device,
    err,
    out,
    print_json,
    use_threads,
)
from .data import json_object, target_dtype
from .eval_tables import print_report
from .loading import load_drafter, load_target


def evaluate_command(
    target: Annotated[str | None, typer.Option(help="Target: folder or Hub id.")] = None,
    drafter: Annotated[
        list[str], typer.Option(help="Drafter: folder or Hub id. Repeat to compare several on the same plain runs.")
    ] = [],  # noqa: B006 - typer reads it, nothing changes it
    gguf_file: Annotated[str | None, typer.Option(help="GGUF file inside the target's folder.")] = None,
    set_name: Annotated[
        list[str],
        typer.Option("--set", help=f"Shipped prompt set: {', '.join(SETS)}. Repeatable. Default: all (50 prompts)."),
    ] = [],  # noqa: B006
    prompts: Annotated[
        list[Path],
        typer.Option(
            help='Prompt file, one JSON object a line: {"turns": \\[text, ...]} (the first turn is used) or '
            '{"prompt": text}. Repeatable; the set has the name of the file.'
        ),
    ] = [],  # noqa: B006
    limit: Annotated[int | None, typer.Option(min=1, help="Prompts from the start of each set.")] = None,
    part: Annotated[
        str, typer.Option(help="i/n: every n-th prompt from the i-th on, for n processes whose files --merge joins.")
    ] = "1/1",
    temperature: Annotated[
        list[float], typer.Option(help="0 is greedy; above, plain sampling (no top-k, no top-p). Repeatable.")
    ] = [0.0, 1.0],  # noqa: B006
    threshold: Annotated[
        list[float], typer.Option(help="Confidence below which a block ends; 0 verifies every draft. Repeatable.")
    ] = [0.0],  # noqa: B006
    sweep: Annotated[bool, typer.Option("--sweep", help="Thresholds 0, 0.1, ... 0.9 besides --threshold.")] = False,
    max_new_tokens: Annotated[int, typer.Option(help="New tokens per prompt at most.")] = 256,
    seed: Annotated[int, typer.Option(help="Of sampled runs.")] = 0,
    speed: Annotated[
        bool, typer.Option("--speed/--no-speed", help="Plain runs beside the drafter's; without them counts only.")
    ] = True,
    reliability: Annotated[
        bool, typer.Option("--reliability/--no-reliability", help="Keep every round's confidence, for its diagram.")
    ] = True,
    raw: Annotated[bool, typer.Option("--raw", help="Give prompts as they are, without the chat template.")] = False,
    template_args: Annotated[
        str | None, typer.Option(help="Variables for the chat template, as JSON: '{\"enable_thinking\": false}'.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="fp32, bf16, fp16, or auto: fp32 on a CPU, else bf16.")] = "auto",
    device: Annotated[str | None, typer.Option(help="Default: cuda where there is one, else cpu.")] = None,
    threads: Threads = None,
    pack: Pack = True,
    out_folder: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Folder for rounds.jsonl, report.json, report.md and plots; one that is there is gone on with.",
        ),
    ] = None,
    merge: Annotated[
        list[Path], typer.Option(help="Report on the results of these folders together; nothing is run. Repeatable.")
    ] = [],  # noqa: B006
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON on stdout.")] = False,
) -> None:
    """Measure drafters on a target: accepted lengths, acceptance per position, speed against plain generate.

    Every prompt is answered plainly and with each drafter in turns, in this process, with the same cache and dtype;
    ids are compared before any speed-up is given. Run the same command again to go on after an interruption.

    By default 50 prompts are answered with up to 256 tokens, greedily and at temperature 1, plainly and with the
    drafter: the better part of an hour on two CPU cores for a target of 135 M parameters. Figures of the confidence
    hold only on prompts the drafter was not calibrated on; `dspark calibrate` has the same default.

    Example: dspark eval --target path/or/id --drafter my-drafter --out evaluation

    Exit codes: 0 done, 1 greedy ids differ from plain generate in fp32, 2 bad input (a drafter that does not fit, a
    malformed prompt file, a folder with results of another configuration, ...).
    """
    with bad_input_exits():
        if merge:
            results = merge_results(merge)
            if out_folder is not None:
                write_results(results, out_folder)
        else:
            thresholds = tuple(sorted({*threshold, *(SWEEP if sweep else ())}))
            where = chosen_device(device)
            settings = EvaluationSettings(tuple(temperature), thresholds, max_new_tokens, seed, speed, reliability)
            plan = _Plan(
                settings=settings,
                prompting=Prompting(raw, json_object(template_args)),
                texts=gather_prompts(set_name, prompts, limit=limit),
                part=_part(part),
                sources=_labels(drafter),
                dtype=target_dtype(dtype, where),
                device=where,
            )
            use_threads(threads)
            results = _run(plan, target, gguf_file, out_folder, wants_packing=pack)
    report = build_report(results)
    problem = write_report(report, out_folder) if out_folder is not None else None
    if problem is not None:
        err.print(problem, style="yellow", markup=False, highlight=False, soft_wrap=True)
    if as_json:
        print_json(report)
    else:
        print_report(report, out)
        if out_folder is not None:
            err.print(f"{out_folder}: report.md, report.json and plots", markup=False, highlight=False, soft_wrap=True)
    if has_unequal_ids(report) and report["configuration"]["machine"]["dtype"] == "float32":
        raise typer.Exit(1)


@dataclass(frozen=True)
class _Plan:
    """What is known before a model is loaded."""

    settings: EvaluationSettings
    prompting: Prompting
    texts: dict[str, list[str]]
    part: tuple[int, int]
    sources: dict[str, str]
    dtype: torch.dtype
    device: str


def _calibrated_on(plan: _Plan) -> dict[str, str]:
    """The drafters that were calibrated on prompts of this evaluation, and on how many; says so."""
    hashes = {each for part in prompt_hashes(plan.texts).values() for each in part}
    shared = {label: len(hashes & calibration_prompts(source)) for label, source in plan.sources.items()}
    found = {label: f"{count} of these {len(hashes)} prompts" for label, count in shared.items() if count}
    for label, share in found.items():
        advice = "Calibrate on others (`dspark calibrate --prompts FILE`), or evaluate on others."
        err.print(
            f"{calibration_note(label, share)} {advice}", style="yellow", markup=False, highlight=False, soft_wrap=True
        )
    return found


def _run(
    plan: _Plan, target: str | None, gguf_file: str | None, folder: Path | None, *, wants_packing: bool
) -> Results:
    if target is None:
        raise ValueError("Name the target with --target (a folder or a Hub id), or folders of results with --merge.")
    calibrated_on = _calibrated_on(plan)
    drafters = {label: load_drafter(source, plan.dtype) for label, source in plan.sources.items()}
    model, tokenizer = load_target(target, gguf_file, plan.dtype)
    for each in (model, *drafters.values()):
        torch.nn.Module.to(each, plan.device)
    if plan.prompting.template_args and (plan.prompting.raw or tokenizer.chat_template is None):
        raise ValueError("--template-args needs a chat template: the target has none, or --raw leaves it out.")
    check_drafters(model, drafters, plan.settings, tokenizer)
    packed = wants_packing and plan.device == "cpu"
    configuration = provenance(
        model, tokenizer, drafters, plan.settings, target_name=gguf_file or public_name(target),
        prompting=plan.prompting, packed=packed,
    )  # fmt: skip
    for label, share in calibrated_on.items():
        configuration["drafters"][label]["calibrated_on"] = share
    ids = {name: [chat_ids(tokenizer, text, plan.prompting) for text in texts] for name, texts in plan.texts.items()}
    log = ResultsLog(folder, configuration, datetime.date.today().isoformat())
    with ExitStack() as stack:
        for each in (model, *drafters.values()) if packed else ():
            stack.enter_context(optimize_for_cpu(each))
        advance = stack.enter_context(_progress())
        return evaluate(model, drafters, part_of(ids, *plan.part), plan.settings, log, progress=advance)


@contextmanager
def _progress() -> Iterator[Any]:
    """A bar on stderr; gives the callback of `evaluate`."""
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task("prompts", total=None)
        yield lambda done, total, result: bar.update(task, completed=done, total=total, description=result.set_name)


def _labels(sources: list[str]) -> dict[str, str]:
    """Label to source: the public name, or the source itself where two drafters have one name.

    Raises:
        ValueError: There is none, or one is given twice.
    """
    if not sources:
        raise ValueError("Name at least one drafter with --drafter (a folder or a Hub id).")
    if len(set(sources)) < len(sources):
        raise ValueError(f"Each drafter is named once, got {', '.join(sources)}.")
    names = [public_name(source) for source in sources]
    return {source if names.count(name) > 1 else name: source for name, source in zip(names, sources, strict=True)}


def _part(text: str) -> tuple[int, int]:
    first, _, last = text.partition("/")
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise ValueError(f"`--part` is i/n with 1 <= i <= n, as 1/2 and 2/2 for two processes, got {text!r}.")
    return int(first), int(last)


__all__ = ["evaluate_command"]
