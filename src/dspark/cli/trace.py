"""`dspark trace`: see what the drafter did, token by token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

import torch
import typer
from transformers import PreTrainedModel

from ..cpu import packed
from ..evaluation import chat_ids
from ..evaluation.provenance import public_name
from ..plain_decoding import plain_law
from ..scheduling import ThroughputCurve
from ..speculation import Policy, SpeculationConfig
from ..trace import Trace, build_trace, load, save, terminal_view, write_page
from ..trace.figures import figures
from .common import (
    Curve,
    MaxNewTokens,
    Pack,
    PolicyName,
    Seed,
    Temperature,
    Threads,
    Threshold,
    Window,
    bad_input_exits,
    check_out_file,
    chosen_curve,
    chosen_device,
    err,
    out,
    parse_dtype,
    print_json,
    speculation,
    use_threads,
)
from .loading import load_drafter, load_target


def trace(
    prompt: Annotated[
        str | None, typer.Option(help="The user's turn; the target's chat template is applied where it has one.")
    ] = None,
    target: Annotated[str | None, typer.Option(help="Target: folder or Hub id.")] = None,
    drafter: Annotated[str | None, typer.Option(help="Drafter: folder or Hub id.")] = None,
    against: Annotated[
        str | None,
        typer.Option(help="Beside it, on the same prompt: a policy's name, or another drafter (folder or Hub id)."),
    ] = None,
    source: Annotated[
        list[Path] | None, typer.Option("--from", help="Show this file of --save instead of generating. Repeatable.")
    ] = None,
    page: Annotated[Path | None, typer.Option("--out", help="HTML page to write; it asks for nothing else.")] = None,
    file: Annotated[
        Path | None, typer.Option("--save", help="File of the traces to write, JSON; packed if it ends in .gz.")
    ] = None,
    terminal: Annotated[bool, typer.Option("--terminal", help="Show it in the terminal.")] = False,
    gguf_file: Annotated[str | None, typer.Option(help="GGUF file inside the target's folder.")] = None,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.0,
    threshold: Threshold = 0.0,
    against_threshold: Annotated[
        float | None, typer.Option(min=0, max=1, help="The same for --against. Default: as --threshold.")
    ] = None,
    policy: PolicyName = "threshold",
    curve: Curve = None,
    window: Window = None,
    seed: Seed = 0,
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "fp32",
    device: Annotated[str | None, typer.Option(help="Of all models. Default: cuda where there is one.")] = None,
    threads: Threads = None,
    pack: Pack = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures of each trace as JSON.")] = False,
) -> None:
    """Show an answer of TARGET by how it came about: which drafts stood, which were refused and what came instead.

    The page shows the text by rounds, every refused draft with what target and drafter thought likely there,
    confidence against what happened, verify lengths and the time of each step.

    Example: dspark trace --target Qwen/Qwen3-4B --drafter my-drafter --prompt "What is 17 times 23?" --out trace.html

    Example: dspark trace --from monday.json.gz --from tuesday.json.gz --out both.html

    Exit codes: 0 done, 2 bad input.
    """
    with bad_input_exits():
        _check_outputs(page, file, is_shown=terminal or as_json)
        if source:
            _refuse_beside_files({"target": target, "drafter": drafter, "prompt": prompt, "against": against})
            traces = [entry for path in source for entry in load(path)]
        else:
            if target is None or drafter is None or prompt is None:
                raise ValueError("Give --target, --drafter and --prompt, or --from FILE.")
            runs = _runs(drafter, policy, threshold, against, against_threshold, curve, window)
            how = _How(prompt, max_new_tokens, temperature, seed, dtype, chosen_device(device), pack)
            use_threads(threads)
            with err.status("trace") as status:
                traces = _record(target, gguf_file, runs, how, status.update)
        _write(traces, page, file)
    if terminal:
        out.print(*map(terminal_view, traces), sep="\n\n")
    if as_json:
        print_json([{"target": t.target, "drafter": t.drafter, **asdict(figures(t))} for t in traces])


def _check_outputs(page: Path | None, file: Path | None, *, is_shown: bool) -> None:
    if page is None and file is None and not is_shown:
        raise ValueError("Say where to show it: --out PAGE, --save FILE, --terminal or --json.")
    for path in (page, file):
        if path is not None:
            check_out_file(path)


def _refuse_beside_files(options: dict[str, str | None]) -> None:
    given = [f"--{name}" for name, value in options.items() if value is not None]
    if given:
        raise ValueError(f"--from shows what a file holds; leave out {', '.join(given)}.")


def _write(traces: list[Trace], page: Path | None, file: Path | None) -> None:
    if page is not None:
        write_page(page, traces)
        told = "; ".join(
            f"{found.num_tokens} tokens in {found.num_rounds} rounds, {found.num_accepted} of {found.num_verified} "
            "verified drafts accepted"
            for found in map(figures, traces)
        )
        err.print(f"{page}: written, open it in a browser ({told})", highlight=False, markup=False, soft_wrap=True)
    if file is not None:
        save(file, traces)
        err.print(f"{file}: written", highlight=False, markup=False)


@dataclass(frozen=True)
class _Run:
    """One drafter with its settings."""

    drafter: str
    settings: SpeculationConfig


@dataclass(frozen=True)
class _How:
    """What all runs have in common."""

    prompt: str
    max_new_tokens: int
    temperature: float
    seed: int
    dtype: str
    device: str
    pack: bool


def _runs(
    drafter: str,
    policy: str,
    threshold: float,
    against: str | None,
    against_threshold: float | None,
    curve: str | None,
    window: int | None,
) -> list[_Run]:
    """What is to be traced; a name among the policies means the policy, write `./auto` for a folder of that name."""
    if against is None and against_threshold is not None:
        raise ValueError("--against-threshold needs --against.")
    others_policy = against if against in get_args(Policy) else None
    known = chosen_curve(curve, policy, *filter(None, [others_policy]))
    runs = [_Run(drafter, _settings(policy, threshold, known, window))]
    if against is not None:
        other = threshold if against_threshold is None else against_threshold
        settings = _settings(others_policy or policy, other, known, window)
        runs.append(_Run(drafter if others_policy else against, settings))
    return runs


def _settings(policy: str, threshold: float, curve: ThroughputCurve | None, window: int | None) -> SpeculationConfig:
    return speculation(policy, threshold, curve, record_trace=True, context_window=window)


def _record(
    target: str, gguf_file: str | None, runs: list[_Run], how: _How, progress: Callable[[str], Any]
) -> list[Trace]:
    progress("trace: loading")
    drafters = {
        name: load_drafter(name, parse_dtype(how.dtype)) for name in dict.fromkeys(run.drafter for run in runs)
    }
    model, tokenizer = load_target(target, gguf_file, parse_dtype(how.dtype))
    for loaded in (model, *drafters.values()):
        torch.nn.Module.to(loaded, how.device)
    ids = chat_ids(tokenizer, how.prompt).to(how.device)
    if not ids.numel():
        raise ValueError("The prompt has no tokens. Give some text, or a target with a chat template.")
    traces = []
    with packed(model, wanted=how.pack):
        for number, run in enumerate(runs, 1):
            progress(f"trace: {number} of {len(runs)}, {public_name(run.drafter)}")
            draft = drafters[run.drafter]
            with packed(draft, wanted=how.pack):
                _generate(model, draft, tokenizer, ids, run, how)
            traces.append(
                build_trace(
                    draft.last_stats, tokenizer, ids[0].tolist(),
                    target=gguf_file or public_name(target), drafter=public_name(run.drafter),
                    settings=_shown_settings(run, how),
                )
            )  # fmt: skip
    return traces


def _generate(model: PreTrainedModel, draft: Any, tokenizer: Any, ids: torch.Tensor, run: _Run, how: _How) -> None:
    torch.manual_seed(how.seed)
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        assistant_model=draft,
        max_new_tokens=how.max_new_tokens,
        speculation=run.settings,
        tokenizer=tokenizer,
        **plain_law(how.temperature),
    )


def _shown_settings(run: _Run, how: _How) -> dict[str, Any]:
    settings = run.settings
    return {
        "policy": settings.policy,
        "confidence threshold": settings.assistant_confidence_threshold,
        "temperature": how.temperature,
        "seed": how.seed if how.temperature else None,
        "most new tokens": how.max_new_tokens,
        "dtype": how.dtype,
        "device": how.device,
        "packed": how.pack and how.device == "cpu",
    }


__all__ = ["trace"]
