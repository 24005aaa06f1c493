"""`dspark calibrate`: temperatures that make a drafter's confidence mean what it says."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer

from ..calibration import ConfidenceFit
from ..calibration.confidence_fit import MIN_GROUPS
from ..config_file import check_can_update, check_is_new, copy_with, update_config_file
from ..configuration_dspark import DSparkConfig
from ..cpu import packed
from ..evaluation.calibrate import (
    Calibration,
    calibrate_rounds,
    check_enough_prompts,
    held_out_places,
    note_prompts,
)
from ..evaluation.prompt_sets import Prompting, chat_ids, gather_prompts
from ..evaluation.refit import collect_head_rounds, refit, set_head
from ..evaluation.rounds import check_confidence_head, collect_rounds
from ..evaluation.settings import EvaluationSettings
from ..hub import read_config
from ..version import __version__
from .calibrate_tables import fitted_positions, print_survival
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
from .data import target_dtype
from .loading import load_pair


def calibrate(
    target: Annotated[str, typer.Option(help="The target: a folder or a Hub id.")],
    drafter: Annotated[
        str,
        typer.Option(help="The drafter: a folder, whose config.json is changed unless --out is given, or a Hub id."),
    ],
    gguf_file: Annotated[str | None, typer.Option(help="Name of a GGUF file in the target's folder.")] = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            help="Prompt file as for `dspark data`. Repeat for more. Default: the 50 prompts that ship with it, which "
            "are those of `dspark eval`: calibrate on others than you evaluate on."
        ),
    ] = None,
    sets: Annotated[list[str] | None, typer.Option("--set", help="Shipped prompt set. Repeat for more.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Prompts from the start of each file and set.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Give prompts as they are, without the chat template.")] = False,
    temperature: Annotated[
        list[float],
        typer.Option(help="Decoding temperature, 0 is greedy. Repeat for more: each gets temperatures of its own."),
    ] = [0.0, 1.0],  # noqa: B006 - typer reads it, nothing changes it
    max_new_tokens: Annotated[int, typer.Option(min=2, help="New tokens per prompt.")] = 256,
    held_out: Annotated[float, typer.Option(help="Share of the prompts that judge the fit, in (0, 1).")] = 0.3,
    seed: Annotated[int, typer.Option(help="Of the held-out choice and of sampled text.")] = 0,
    refit_head: Annotated[
        bool,
        typer.Option(
            "--refit-head",
            help="First fit the confidence head's layer to what these rounds accepted, of all --temperature "
            "together; its weights change, so --out is needed.",
        ),
    ] = False,
    copy: Annotated[
        Path | None, typer.Option("--out", help="Write a calibrated copy here; the drafter itself stays as it is.")
    ] = None,
    sglang: Annotated[
        Path | None,
        typer.Option(help="Also write SGLang's file of temperatures; of several, -t0, -t1, ... goes into its name."),
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Also write all figures, reliability bins too, as JSON.")] = None,
    dtype: Annotated[str, typer.Option(help="fp32, bf16, fp16, or auto: fp32 on a CPU, else bf16.")] = "auto",
    device: Annotated[str | None, typer.Option(help="Default: cuda where there is one, else cpu.")] = None,
    threads: Threads = None,
    pack: Pack = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON on stdout.")] = False,
) -> None:
    """Fit the confidence temperatures of DRAFTER on TARGET's own text and write them into its config.

    Decodes the prompts, verifies every draft, fits one temperature per draft position on part of the prompts
    (sequential temperature scaling), and says what calibration does on the others: ECE and AUC of survival. Survival
    thresholds and schedulers look at these temperatures; the text does not depend on them. What the config has for
    other decoding temperatures is kept, unless the head changes. Where confidence stays far off, --refit-head fits
    the head itself first: temperatures cannot bring a mean confidence above one half below it.

    Use prompts the drafter was not trained on, and other ones than you evaluate on. By default 50 prompts are answered
    with up to 256 tokens, greedily and at temperature 1: some twenty minutes on two CPU cores for a target of 135 M
    parameters. Thousands of rounds are wanted; positions that too few reached keep the temperature before them.

    Example: dspark calibrate --target Qwen/Qwen3-4B --drafter my-drafter --temperature 0 --temperature 1

    Exit codes: 0 done, 2 bad input (no confidence head, a Hub id without --out, nothing to fit on, ...).
    """

    with bad_input_exits():
        where = chosen_device(device)
        settings = EvaluationSettings(temperatures=tuple(temperature), max_new_tokens=max_new_tokens, seed=seed)
        if refit_head and copy is None:
            raise ValueError("`--refit-head` changes weights, so it writes a copy: name it with --out.")
        config = _check_drafter(drafter, copy)
        _check_files(sglang, report)
        chosen = gather_prompts(sets or (), prompts or (), limit=limit)
        is_held_out = held_out_places([len(texts) for texts in chosen.values()], held_out, seed)
        check_enough_prompts(is_held_out, max_new_tokens, MIN_GROUPS if refit_head else 1)
        use_threads(threads)
        model, tokenizer, draft = load_pair(target, drafter, gguf_file, target_dtype(dtype, where), where)
        ids = [chat_ids(tokenizer, text, Prompting(raw)).to(where) for texts in chosen.values() for text in texts]
        with packed(model, wanted=pack), packed(draft, wanted=pack):
            found, head = _calibrations(model, draft, ids, is_held_out, settings, refit_head=refit_head)
        # What the config has for other temperatures was fitted to the old head.
        rows = _merged(None if head is not None else config.confidence_temperatures, found)
        if copy is None:
            update_config_file(drafter, confidence_temperatures=rows)
        else:
            change = None if head is None else partial(set_head, head=head.head)
            copy_with(drafter, copy, change, confidence_temperatures=rows)
        note_prompts(copy or drafter, chosen, [calibration.key for calibration in found], list(rows))
        figures = {
            "dataset": "+".join(chosen),
            "prompts": {name: len(texts) for name, texts in chosen.items()},
            "num_held_out_prompts": sum(is_held_out),
            "settings": {"max_new_tokens": max_new_tokens, "seed": seed, "held_out": held_out, "raw": raw},
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "dspark": __version__},
            "confidence_temperatures": rows,
            "confidence_head": None if head is None else head.to_dict(),
            "calibrations": [calibration.to_dict() for calibration in found],
        }
        _write_files(figures, found, sglang, report)
    if as_json:
        print_json(figures)
        return
    if head is not None:
        out.print(
            f"Confidence head fitted to {head.num_events} verified drafts: log loss {head.loss_before:.3f} before, "
            f"{head.loss_after:.3f} after, on prompts it was not fitted to.",
            highlight=False,
        )
    for calibration in found:
        print_survival(out, calibration)
        for fit in calibration.fits:
            if fit.note:
                out.print(f"[dim]position {fit.position + 1}: {fit.note}[/]", highlight=False)
    for calibration in found:
        err.print(f"{copy or drafter}: {fitted_positions(calibration)}", highlight=False, soft_wrap=True)


def _check_drafter(source: str, copy: Path | None) -> DSparkConfig:
    """Config of the drafter.

    Raises:
        ValueError: It has no confidence head, or is no folder that can be changed in place and there is no copy.
        OSError: It cannot be read, or the place to write to cannot be written to.
    """
    if copy is not None:
        check_is_new(copy)
    elif not Path(source).is_dir():
        raise ValueError(f"{source} is not a local folder, so nothing can be written into it: name a copy with --out.")
    else:
        check_can_update(source)
    config = read_config(source)
    check_confidence_head(config, source)
    return config


def _check_files(*files: Path | None) -> None:
    for file in files:
        if file is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
            raise ValueError(f"{file} cannot be written: it must be a file in a folder that exists.")


def _calibrations(
    model: Any,
    drafter: Any,
    ids: list[torch.Tensor],
    is_held_out: list[bool],
    settings: EvaluationSettings,
    *,
    refit_head: bool,
) -> tuple[list[Calibration], ConfidenceFit | None]:
    """One calibration per decoding temperature, and the head's fit if it was asked for."""
    rounds: list[Any] = []
    with err.status("decoding") as status:
        for temperature in settings.temperatures:
            num_rounds = 0

            def show(place: int, stats: Any, temperature: float = temperature) -> None:
                nonlocal num_rounds
                num_rounds += stats.num_rounds
                status.update(f"temperature {temperature:g}: {place + 1} of {len(ids)} prompts, {num_rounds} rounds")

            collect = collect_head_rounds if refit_head else collect_rounds
            rounds.append(
                collect(
                    model, drafter, ids, temperature=temperature, max_new_tokens=settings.max_new_tokens,
                    seed=settings.seed, on_progress=show,
                )
            )  # fmt: skip
        stats: list[Any] = rounds
        head: ConfidenceFit | None = None
        logits: list[Any] = [None] * len(rounds)
        if refit_head:
            status.update("fitting the confidence head")
            stats = [[each.stats for each in part] for part in rounds]
            head, logits = refit(drafter, rounds, is_held_out)
    calibrations = [
        calibrate_rounds(
            part, is_held_out, temperature=temperature, num_draft_tokens=drafter.config.num_draft_tokens, refitted=row
        )
        for part, row, temperature in zip(stats, logits, settings.temperatures, strict=True)
    ]
    return calibrations, head


def _merged(old: Any, found: list[Calibration]) -> dict[str, list[float]]:
    """What the config had for other decoding temperatures, and the new lists; one list for all of them is replaced."""
    new = [calibration.decoding_temperature for calibration in found]
    kept = {key: row for key, row in old.items() if float(key) not in new} if isinstance(old, dict) else {}
    merged = kept | {calibration.key: calibration.temperatures for calibration in found}
    return dict(sorted(merged.items(), key=lambda item: float(item[0])))


def _write_files(figures: dict[str, Any], found: list[Calibration], sglang: Path | None, report: Path | None) -> None:
    from dspark.conversion.sglang_sts import SglangSts, to_json

    if report is not None:
        report.write_text(json.dumps(figures, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if sglang is None:
        return
    for calibration in found:
        name = sglang if len(found) == 1 else sglang.with_stem(f"{sglang.stem}-t{calibration.key}")
        errors = [[figures.ece for figures in part] for part in (calibration.before, calibration.after)]
        sts = SglangSts(
            temperatures=tuple(calibration.temperatures),
            dataset=figures["dataset"],
            num_samples=calibration.num_fit_rounds,
            # The format has no place for a position that no held-out round verified.
            **{
                field: () if any(map(math.isnan, values)) else tuple(values)
                for field, values in zip(("ece_before", "ece_after"), errors, strict=True)
            },
        )
        name.write_text(to_json(sts), encoding="utf-8")


__all__ = ["calibrate"]
