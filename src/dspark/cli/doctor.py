"""`dspark doctor`: why is the accepted length low?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from ..cpu import packed
from ..evaluation import SETS, chat_ids, read_prompts, sample_prompts
from ..evaluation.doctor import Diagnosis, diagnose
from ..evaluation.prompt_sets import Prompting
from .common import (
    Pack,
    Threads,
    bad_input_exits,
    chosen_device,
    err,
    out,
    parse_dtype,
    print_json,
    use_threads,
)
from .loading import load_pair


def doctor(
    target: Annotated[str, typer.Option(help="Target: folder or Hub id.")],
    drafter: Annotated[str, typer.Option(help="Drafter: folder or Hub id.")],
    prompts: Annotated[
        Path | None,
        typer.Option(help='Prompts, one {"turns": [...]} or {"prompt": ...} a line. Default: shipped samples.'),
    ] = None,
    gguf_file: Annotated[str | None, typer.Option(help="GGUF file inside the target's folder.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Prompts to take.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(min=8, help="New tokens per prompt.")] = 96,
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "fp32",
    device: Annotated[str | None, typer.Option(help="Of both models. Default: cuda where there is one.")] = None,
    threads: Threads = None,
    pack: Pack = True,
    expect: Annotated[
        float | None, typer.Option(help="Accepted length to compare with. Default: the drafter's own report.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the diagnosis as JSON.")] = False,
) -> None:
    """Measure a drafter's accepted length and, where it is low, say why.

    Goes down the pairing list, then changes one thing at a time (tapped layers, anchor convention, rope, mask token,
    chat template, thinking switch, dtype, ...) and sees what raises it. The likely cause is printed first.

    Example: dspark doctor --target Qwen/Qwen3-4B --drafter my-drafter --prompts mine.jsonl

    Exit codes: 0 nothing wrong, 1 a likely cause was found, 2 bad input.
    """
    with bad_input_exits():
        device = chosen_device(device)
        texts = _texts(prompts, limit)
        use_threads(threads)
        model, tokenizer, draft = load_pair(target, drafter, gguf_file, parse_dtype(dtype), device)
        forms = {name: [ids.to(device) for ids in form] for name, form in _forms(tokenizer, texts).items()}
        with err.status("doctor") as status, packed(model, wanted=pack):
            result = diagnose(
                model,
                draft,
                [chat_ids(tokenizer, text).to(device) for text in texts],
                other_forms=forms,
                tokenizer=tokenizer,
                max_new_tokens=max_new_tokens,
                on_progress=lambda what: status.update(f"doctor: {what}"),
            )
    result.expected_length = reported_length(Path(drafter)) if expect is None else expect
    if as_json:
        print_json(result.to_dict())
    else:
        _show(result)
    if not result.is_healthy:
        raise typer.Exit(1)


def _texts(prompts: Path | None, limit: int) -> list[str]:
    if prompts is not None:
        return read_prompts(prompts, limit)
    per_set = -(-limit // len(SETS))
    return [text for name in SETS for text in sample_prompts(name, per_set)][:limit]


def _forms(tokenizer: Any, texts: list[str]) -> dict[str, list[torch.Tensor]]:
    """The prompts in the other forms the tokenizer knows."""
    if tokenizer.chat_template is None:
        return {}
    forms = {"no chat template": [chat_ids(tokenizer, text, Prompting(raw=True)) for text in texts]}
    if "enable_thinking" in str(tokenizer.chat_template):
        forms["thinking off"] = [
            chat_ids(tokenizer, text, Prompting(template_args={"enable_thinking": False})) for text in texts
        ]
    return forms


def reported_length(folder: Path) -> float | None:
    """Mean greedy accepted length, every draft verified, by the report of `dspark eval` or `demo` beside a drafter."""
    path = folder / "report.json"
    if not path.is_file():
        return None
    report = json.loads(path.read_text(encoding="utf-8"))
    if report.get("what") == "dspark eval":
        whole = [run for run in report["runs"] if run["temperature"] == run["threshold"] == 0]
        return whole[0]["mean"]["accepted_length"] if whole else None
    if report.get("what") == "dspark demo" and report["settings"]["threshold"] == 0:
        return sum(one["mean_acceptance_length"] for one in report["sets"]) / len(report["sets"])
    return None


def _show(result: Diagnosis) -> None:
    colour = "green" if result.is_healthy else "bold yellow"
    out.print(result.verdict + "\n", style=colour, markup=False, highlight=False)
    for finding in result.findings:
        out.print(f"pairing: {finding.field}: {finding.message}", style="yellow", markup=False, highlight=False)
    table = Table(title=f"Accepted length {result.accepted_length:.2f} over {result.rounds} rounds")
    table.add_column("changed")
    table.add_column("accepted length", justify="right")
    table.add_column("gain", justify="right")
    for suspect in result.suspects:
        table.add_row(suspect.name, f"{suspect.accepted_length:.2f}", f"{suspect.gain:+.2f}")
    out.print(table)
    rates = " ".join(f"{rate:.2f}" for rate in result.conditional_acceptance)
    known = "" if result.expected_length is None else f"; its report says {result.expected_length:.2f}"
    out.print(f"conditional acceptance per position: {rates}{known}", highlight=False)


__all__ = ["doctor", "reported_length"]
