"""`dspark bench round`: what one decoding round spends, part by part, and what of its promise is kept."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from ..evaluation.paths import PickedPath, picked_paths
from ..evaluation.prompt_sets import chat_ids, gather_prompts
from ..evaluation.provenance import machine_note, public_name, versions
from ..evaluation.round_cost import OutputsDifferError, RoundCost, measure_round
from ..evaluation.rows import at_temperature, number, percent
from ..files import write_json
from .bench_shared import (
    AsJson,
    Device,
    Drafter,
    Dtype,
    Gguf,
    PromptFiles,
    Target,
    Threads,
    chosen_pair,
    mixed_prompts,
    pack,
    show,
)  # fmt: skip
from .common import Temperature, bad_input_exits, check_out_file, err, out, print_json


def round_command(
    target: Target,
    drafter: Drafter,
    gguf_file: Gguf = None,
    prompts: PromptFiles = [],  # noqa: B006 - typer reads it, nothing changes it
    limit: Annotated[int, typer.Option(min=1, help="Prompts, taken from the sets in turns.")] = 6,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="New tokens per prompt.")] = 64,
    temperature: Temperature = 0.0,
    score: Annotated[bool, typer.Option("--score/--no-score", help="Score drafts, as `threshold` needs it.")] = True,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of every prompt, of each way.")] = 3,
    dtype: Dtype = "auto",
    device: Device = None,
    threads: Threads = None,
    out_file: Annotated[Path | None, typer.Option("--out", help="JSON file to write, e.g. round.json.")] = None,
    as_json: AsJson = False,
) -> None:
    """What a round of one row spends, step by step, and the speed-up against what its accepted length allows.

    Every draft is verified. Plain and drafted runs take turns on the same prompts, with and without clocks inside.
    First all of them decode greedily: in fp32 nothing is timed unless all ids are equal, in other dtypes prompts whose
    ids differ are left out.

    Exit codes: 0 done, 1 ids differ from plain generate, 2 bad input.
    """
    with bad_input_exits():
        if out_file is not None:
            check_out_file(out_file)
        model, tokenizer, draft = chosen_pair(target, drafter, gguf_file, dtype, device, threads)
        texts = mixed_prompts(gather_prompts([], prompts, limit=limit), limit)
        ids = [chat_ids(tokenizer, text) for text in dict.fromkeys(texts)]
        with ExitStack() as stack:
            pack(stack, model, draft)
            paths = [*picked_paths(model, draft), *_given(model, draft, dtype, threads)]
            status = stack.enter_context(err.status("bench"))
            try:
                cost = measure_round(
                    model, draft, ids, max_new_tokens=max_new_tokens, temperature=temperature, repeats=repeats,
                    is_scored=score, progress=status.update,
                )  # fmt: skip
            except OutputsDifferError as error:
                err.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
                raise typer.Exit(1) from error
            report = {
                "what": "dspark bench round",
                "about": {
                    "target": public_name(target), "drafter": public_name(drafter), "temperature": temperature,
                    "max_new_tokens": max_new_tokens, "repeats": repeats,
                    "machine": machine_note(model, packed=paths[0].path != "stock"), "versions": versions(),
                },
                "paths": [asdict(path) for path in paths],
                **cost.to_dict(),
            }  # fmt: skip
        if out_file is not None:
            write_json(out_file, report)
    if as_json:
        print_json(report)
    else:
        _show(cost, paths, at_temperature(temperature))


def _given(model: Any, drafter: Any, dtype: str, threads: int | None) -> list[PickedPath]:
    """What the options chose."""
    kinds = {str(each.dtype).removeprefix("torch.") for each in (model, drafter)}
    reason = "fp32 on a CPU, else bf16" if dtype == "auto" else "--dtype"
    return [
        PickedPath("dtype", " and ".join(sorted(kinds)), reason),
        PickedPath("threads", str(torch.get_num_threads()), "torch's own" if threads is None else "--threads"),
    ]


def _show(cost: RoundCost, paths: list[PickedPath], how: str) -> None:
    found = cost.to_dict()
    rows = []
    for line in found["lines"]:
        rows.append([line["name"], number(1000 * line["seconds"], 3), percent(line["share"])])
        rows += [
            [f"  {inside['name']}'s forward", number(1000 * inside["seconds"], 3), percent(inside["share"])]
            for inside in line["forwards"]
        ]
    rows.append(["round", number(1000 * found["round"], 3), percent(1.0)])
    title = f"One round: {found['whole_rounds']} of {found['rounds']} that verified a whole block, {how}"
    show(title, ("part", "ms (median)", "share of all time"), rows)
    block = cost.block
    figures = [
        ["plain step, T(1)", number(1000 * cost.plain_step, 3, " ms")],
        [f"verification, T({block + 1})", number(1000 * cost.verification, 3, " ms")],
        ["drafting, T_draft", number(1000 * cost.drafting, 3, " ms")],
        ["accepted length, tau, of all rounds", number(cost.accepted_length)],
        ["outside both models' forwards", percent(cost.host_share)],
        ["speed-up over plain generate", number(cost.speedup)],
        [f"limit, tau T(1) / (T({block + 1}) + T_draft)", number(cost.limit)],
        ["efficiency, speed-up / limit", percent(cost.efficiency)],
    ]
    show(f"{cost.num_prompts} prompts, ids equal to plain generate", ("figure", "value"), figures)
    for path in paths:
        out.print(f"{path.what}: {path.path} ({path.reason})", markup=False, highlight=False, soft_wrap=True)
    if cost.differing:
        places = ", ".join(f"{index + 1} at new token {place + 1}" for index, place in cost.differing)
        out.print(f"Left out, ids differ: prompt {places}.", markup=False, highlight=False, soft_wrap=True)


__all__ = ["round_command"]
