"""`dspark data`: have a target write the answers its drafter will be trained on."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from ..cpu import packed
from .common import Threads, bad_input_exits, chosen_device, err, parse_dtype, print_json, use_threads
from .loading import load_target


def data(
    target: Annotated[str, typer.Option(help="The target: a folder or a Hub id.")],
    out: Annotated[Path, typer.Option(help="File of answers, one JSON object a line. An existing one is added to.")],
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            help='Prompt file, one JSON object a line: {"turns": \\[text, ...]} (the first turn is used) or '
            '{"prompt": text}. Repeat for more files; their names become the records\' `source`.'
        ),
    ] = None,
    self_prompts: Annotated[
        int | None,
        typer.Option(
            help="Have the target write this many user turns itself, by sampling behind its chat template; they are "
            "kept in OUT's name with -prompts."
        ),
    ] = None,
    features: Annotated[
        Path | None,
        typer.Option(
            help="Also store the hidden states that generation computes, for `dspark train --features` of this folder."
        ),
    ] = None,
    feature_dtype: Annotated[str, typer.Option(help="How they are stored: bfloat16, float16, float32.")] = "bfloat16",
    target_layers: Annotated[
        str | None,
        typer.Option(help="Layers to store, e.g. 1,9,17 (0-based). Default: 5, evenly spaced in 1..N-3."),
    ] = None,
    gguf_file: Annotated[
        str | None, typer.Option(help="Name of a GGUF file in the target's folder; it is dequantised.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="fp32, bf16, fp16, or auto: fp32 on a CPU, else bf16.")] = "auto",
    device: Annotated[str | None, typer.Option(help="Default: cuda where there is one, else cpu.")] = None,
    threads: Threads = None,
    temperature: Annotated[
        list[float],
        typer.Option(
            help="0 is greedy; above, plain sampling (no top-k, no top-p). Repeat to mix: each prompt then gets one, "
            "chosen by the seed."
        ),
    ] = [0.0],  # noqa: B006 - typer reads it, nothing changes it
    each: Annotated[bool, typer.Option("--each", help="Answer every prompt at every temperature.")] = False,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens; longer ones are cut.")] = 512,
    max_prompt_tokens: Annotated[
        int, typer.Option(help="Longer prompts are left out, in tokens with the chat template.")
    ] = 1024,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Take this many prompts from the start of each file.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Answers written at once.")] = 8,
    seed: Annotated[int, typer.Option(help="Of temperatures, order and sampling.")] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="Give prompts as they are, without the chat template.")] = False,
    template_args: Annotated[
        str | None, typer.Option(help="Variables for the chat template, as JSON: '{\"enable_thinking\": false}'.")
    ] = None,
    pack_target: Annotated[
        bool, typer.Option(help="On a CPU: pack the target's linear layers (about 1.5 times faster).")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")] = False,
) -> None:
    """Have TARGET answer prompts; its drafter learns from the answers.

    Only the target's own text teaches a drafter what it will have to predict. Greedy and sampled answers both help:
    mix them in the proportion you will decode with. Run the same command again to go on after an interruption: answers
    already in the file are kept, a half-written last line is dropped, prompts with the same ids are answered once.

    Examples:
    dspark data --target Qwen/Qwen3-4B --prompts gsm8k.jsonl --out answers.jsonl --temperature 0 --temperature 0.8
    dspark data --target Qwen/Qwen3-4B --self-prompts 2000 --out answers.jsonl --features features

    Exit codes: 0 done, 2 bad input (no such file, no chat template, a file of other answers, ...).
    """
    from ..training.answers import write_answers
    from ..training.prompts import AnswerSettings, read_prompts
    from ..training.self_prompts import write_self_prompts

    started = writing = time.monotonic()
    with bad_input_exits():
        settings = AnswerSettings(
            temperatures=tuple(temperature),
            each=each,
            max_new_tokens=max_new_tokens,
            max_prompt_tokens=max_prompt_tokens,
            batch_size=batch_size,
            seed=seed,
            raw=raw,
            template_args=json_object(template_args),
        )
        if self_prompts is not None and raw:
            raise ValueError("--self-prompts goes by the chat template, so it cannot be --raw.")
        if not prompts and self_prompts is None:
            raise ValueError("Nothing to answer: give --prompts FILE, or --self-prompts N.")
        questions = read_prompts(prompts or [], limit) if prompts or self_prompts is None else []
        layers = parse_layers(target_layers)
        device = chosen_device(device)
        use_threads(threads)
        model, tokenizer = load_target(target, gguf_file, target_dtype(dtype, device))
        torch.nn.Module.to(model, device)
        writer = None if features is None else _writer(model, features, layers, feature_dtype)
        writing = time.monotonic()
        with packed(model, wanted=pack_target):
            if self_prompts is not None:
                own = out.with_name(f"{out.stem}-prompts.jsonl")
                write_self_prompts(model, tokenizer, own, self_prompts, settings)
                questions += read_prompts([own], self_prompts)
            counts = write_answers(model, tokenizer, questions, out, settings, writer)
    ended = time.monotonic()
    seconds = ended - started
    err.print(
        f"{out}: {counts.written} answers written ({counts.tokens} tokens; {ended - writing:.0f} s of writing, "
        f"{seconds:.0f} s with loading), {counts.present} there before, {counts.duplicates} duplicate prompts, "
        f"{counts.too_long} too long"
        + (f"; the file also has {counts.others} answers to other prompts" if counts.others else ""),
        highlight=False,
        soft_wrap=True,
    )
    if as_json:
        times = {"seconds": round(seconds, 1), "writing_seconds": round(ended - writing, 1)}
        print_json({"out": str(out), **times, **counts.as_dict()})


def _writer(model: Any, folder: Path, layers: list[int] | None, dtype: str) -> Any:
    from ..target import text_config
    from ..training.builder import default_target_layer_ids
    from ..training.feature_writer import FeatureWriter

    if layers is None:
        layers = default_target_layer_ids(text_config(model).num_hidden_layers, 5)
    return FeatureWriter(model, folder, layers, dtype=dtype)


def parse_layers(text: str | None) -> list[int] | None:
    """Layer ids given to `--target-layers`; None without any.

    Raises:
        ValueError: They are no integers.
    """
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"--target-layers must look like 1,9,17, got {text!r}.") from error


def target_dtype(name: str, device: str) -> torch.dtype:
    """Dtype of a target that runs on `device`; `auto` is fp32 on a CPU, bf16 elsewhere.

    Raises:
        ValueError: Unknown name.
    """
    if name == "auto":
        return torch.float32 if device == "cpu" else torch.bfloat16
    return parse_dtype(name)


def json_object(text: str | None) -> dict[str, Any] | None:
    """A JSON object given to `--template-args`; None without one.

    Raises:
        ValueError: It is none.
    """
    if text is None:
        return None
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"--template-args must be a JSON object, got {text!r}.")
    return value


__all__ = ["data", "json_object", "parse_layers", "target_dtype"]
