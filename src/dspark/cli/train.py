"""`dspark train`: train a drafter for a target, with the target beside or from stored features."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from .common import bad_input_exits, err, load_target, print_json
from .data import default_device, target_dtype

_TARGET, _DATA, _DRAFTER, _LOSS, _STEPS, _OUTPUT = (
    "Target", "Data", "Drafter (as the target in all else)", "Loss", "Optimisation", "Output",
)  # fmt: skip


def _in(panel: str, text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel)


def train(
    target: Annotated[str, _in(_TARGET, "The target: a folder or a Hub id.")],
    gguf_file: Annotated[str | None, _in(_TARGET, "Name of a GGUF file in the target's folder.")] = None,
    dtype: Annotated[str, _in(_TARGET, "The target's: fp32, bf16, fp16, or auto: fp32 on a CPU, else bf16.")] = "auto",
    device: Annotated[str | None, _in(_TARGET, "cuda or cpu. Default: cuda where there is one.")] = None,
    pack_target: Annotated[
        bool,
        _in(_TARGET, "On a CPU: pack the target's linear layers while it runs."),
    ] = True,
    target_name: Annotated[
        str | None,
        _in(_TARGET, "Public name of the target to note in the drafter, where it is loaded from a folder."),
    ] = None,
    data: Annotated[
        list[Path] | None,
        _in(_DATA, "Answers written by `dspark data`. Repeat for more files."),
    ] = None,
    features: Annotated[
        Path | None,
        _in(
            _DATA,
            "Folder of stored target features. Alone: train from it, the target's layers never run. With "
            "--data: write it first (what is there is kept), then train from it. Without it, the target runs beside.",
        ),
    ] = None,
    feature_dtype: Annotated[str, _in(_DATA, "How features are written: bfloat16, float16, float32.")] = "bfloat16",
    features_only: Annotated[bool, _in(_DATA, "Stop when the features are written.", "--features-only")] = False,
    verify: Annotated[bool, _in(_DATA, "Compare every shard's SHA-256 with the index first.")] = True,
    max_length: Annotated[int, _in(_DATA, "Most tokens of a sequence (never more than the target takes).")] = 4096,
    too_long: Annotated[str, _in(_DATA, "Longer records: truncate (cut the end), drop, or error.")] = "truncate",
    init: Annotated[
        str,
        _in(
            _DRAFTER,
            "target: start from the target's last layers (ours). random: as the reference. Else a folder or "
            "Hub id of a drafter to train on; the options below are then not given.",
        ),
    ] = "target",
    layers: Annotated[int | None, _in(_DRAFTER, "Draft layers (5, the reference).")] = None,
    block_size: Annotated[int | None, _in(_DRAFTER, "Drafts per round (7, the reference).")] = None,
    rank: Annotated[
        int | None,
        _in(_DRAFTER, "Rank of the sequential head (256, the reference); 0: none."),
    ] = None,
    head: Annotated[str | None, _in(_DRAFTER, "Sequential head: vanilla (default), gated, rnn.")] = None,
    draft_vocab_size: Annotated[
        int | None,
        _in(
            _DRAFTER,
            "Let the drafter write only this many tokens, the most frequent in the data and all special "
            "ones; its LM head shrinks accordingly. Default: all.",
        ),
    ] = None,
    taps: Annotated[
        int | None,
        _in(
            _DRAFTER,
            "Target layers to read, evenly spaced in 1..N-3 (5, the reference; with --features alone: those stored).",
        ),
    ] = None,
    target_layers: Annotated[
        str | None,
        _in(_DRAFTER, "Name them instead, e.g. 1,9,17: decoder layers, 0-based."),
    ] = None,
    mask_token_id: Annotated[
        int | None,
        _in(_DRAFTER, "Filler of the block; must never occur in text. Default: found in the tokenizer and said."),
    ] = None,
    family: Annotated[
        str | None,
        _in(_DRAFTER, "Layer family: llama, qwen3, gemma4. Default: as the target."),
    ] = None,
    ce: Annotated[float, _in(_LOSS, "Weight of the cross-entropy (paper).")] = 0.1,
    l1: Annotated[float, _in(_LOSS, "Weight of the L1 distance to the target's law (paper).")] = 0.9,
    confidence: Annotated[float, _in(_LOSS, "Weight of the confidence loss (paper).")] = 1.0,
    decay: Annotated[
        float,
        _in(
            _LOSS,
            "Draft position k = 0, 1, ... weighs exp(-k/decay); 0: all weigh 1. 4 is the reference's for block "
            "7, the paper says the block size.",
        ),
    ] = 4.0,
    anchors: Annotated[int, _in(_LOSS, "Most blocks per sequence and step (reference).")] = 512,
    lr: Annotated[float, _in(_STEPS, "Peak learning rate, AdamW (reference).")] = 6e-4,
    warmup: Annotated[float, _in(_STEPS, "Warm-up, as a share of all steps (reference).")] = 0.04,
    schedule: Annotated[str, _in(_STEPS, "After it: cosine, linear, constant_with_warmup, ...")] = "cosine",
    clip: Annotated[float, _in(_STEPS, "Largest gradient norm (reference); 0: no limit.")] = 1.0,
    steps: Annotated[int | None, _in(_STEPS, "Optimizer steps. Default: as --epochs gives.")] = None,
    epochs: Annotated[float, _in(_STEPS, "Passes over the data.")] = 3.0,
    batch_size: Annotated[int, _in(_STEPS, "Sequences per forward pass and device.")] = 8,
    accumulation: Annotated[
        int,
        _in(_STEPS, "Forward passes per optimizer step; the result is that of one big batch."),
    ] = 1,
    precision: Annotated[
        str,
        _in(_STEPS, "fp32, bf16 (autocast over float32 weights), or auto: bf16 on a GPU that has it."),
    ] = "auto",
    workers: Annotated[int, _in(_STEPS, "Processes that read data.")] = 0,
    seed: Annotated[int, _in(_STEPS, "Of weights, order and anchors.")] = 42,
    out: Annotated[
        Path | None,
        _in(
            _OUTPUT,
            "Folder of the finished drafter: it appears whole, at the end, with training.json in it. "
            "Checkpoints go to OUT-checkpoints. Needed unless --features-only.",
        ),
    ] = None,
    save_every: Annotated[int, _in(_OUTPUT, "Steps between checkpoints; 0: none.")] = 500,
    keep: Annotated[int, _in(_OUTPUT, "Checkpoints to keep.")] = 2,
    log_every: Annotated[int, _in(_OUTPUT, "Steps between log entries.")] = 10,
    report_to: Annotated[str, _in(_OUTPUT, "Trackers, as in transformers: none, tensorboard, wandb, ...")] = "none",
    resume: Annotated[
        bool,
        _in(_OUTPUT, "Go on from the last checkpoint of the same command; exact.", "--resume"),
    ] = False,
    overwrite: Annotated[bool, _in(_OUTPUT, "Replace OUT and earlier checkpoints.", "--overwrite")] = False,
    as_json: Annotated[bool, _in(_OUTPUT, "Print the result as JSON on stdout.", "--json")] = False,
) -> None:
    """Train a drafter for a target.

    The shown `tau` is the expected number of tokens per round on the training text (1 to block size + 1), estimated
    from the overlap of draft and target law; the decoding figure is a little lower.

    Example: dspark train --target Qwen/Qwen3-4B --data answers.jsonl --out my-drafter

    Exit codes: 0 done, 2 bad input (found before anything is trained or replaced).
    """
    options = dict(locals())
    from ..training.request import check_places
    from ..training.run import execute, prepare

    with bad_input_exits():
        request = _request(options)
        checkpoint = check_places(request)
        model, tokenizer = load_target(target, gguf_file, target_dtype(dtype, request.config.device.type))
        torch.nn.Module.to(model, request.config.device)
        run = prepare(request, model, tokenizer, checkpoint, err)
    result = {"features": str(features)} if run is None else execute(run)
    if run is not None:
        err.print(f"{out}: {result['steps']} steps in {result['seconds']:.0f} s", highlight=False, soft_wrap=True)
    if as_json:
        print_json(result)


def _request(options: dict[str, Any]) -> Any:
    from ..training.request import TrainRequest

    init = options["init"]
    is_new = init in ("target", "random")
    if not is_new and (given := [name for name in _SHAPE if options[name] is not None]):
        raise ValueError(
            f"--init {init} trains on an existing drafter, whose shape is fixed: leave out "
            f"{', '.join('--' + name.replace('_', '-') for name in given)}."
        )
    same = (
        "target", "out", "gguf_file", "dtype", "features", "feature_dtype", "features_only", "verify", "too_long",
        "pack_target", "target_name", "resume", "overwrite", "draft_vocab_size",
    )  # fmt: skip
    return TrainRequest(
        config=_config(options),
        shape=_shape(options, init if is_new else "target"),
        start_from=None if is_new else init,
        data=tuple(options["data"] or ()),
        **{name: options[name] for name in same},
    )


# Option -> field of DrafterShape.
_SHAPE = {
    "layers": "num_hidden_layers", "block_size": "block_size", "rank": "markov_rank", "head": "markov_head_type",
    "taps": "num_taps", "target_layers": "target_layer_ids", "mask_token_id": "mask_token_id", "family": "family",
    "draft_vocab_size": None,
}  # fmt: skip


def _shape(options: dict[str, Any], init: Any) -> Any:
    from ..training.builder import DrafterShape

    given = {field: options[name] for name, field in _SHAPE.items() if field and options[name] is not None}
    if "target_layer_ids" in given:
        try:
            given["target_layer_ids"] = [int(part) for part in given["target_layer_ids"].split(",")]
        except ValueError as error:
            raise ValueError(f"--target-layers must look like 1,9,17, got {options['target_layers']!r}.") from error
    return DrafterShape(init=init, **given)


def _config(options: dict[str, Any]) -> Any:
    from ..training.arguments import TrainingConfig
    from ..training.request import checkpoint_folder

    precision, device = options["precision"], options["device"] or default_device()
    if precision not in ("auto", "fp32", "bf16"):
        raise ValueError(f"--precision must be auto, fp32 or bf16, got {precision!r}.")
    if device not in ("cuda", "cpu"):
        raise ValueError(
            f"--device must be cuda or cpu, got {device!r}. For one of several GPUs set CUDA_VISIBLE_DEVICES."
        )
    has_bfloat16 = device == "cuda" and torch.cuda.is_bf16_supported()
    for name, least in (("batch_size", 1), ("accumulation", 1), ("log_every", 1), ("save_every", 0), ("keep", 1)):
        if options[name] < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {options[name]}.")
    same = ("ce", "l1", "confidence", "decay", "max_length", "seed", "report_to")
    return TrainingConfig(
        output_dir=str(checkpoint_folder(options["out"] or Path("features"))),
        num_anchors=options["anchors"],
        learning_rate=options["lr"],
        warmup_steps=options["warmup"],
        lr_scheduler_type=options["schedule"],
        max_grad_norm=options["clip"],
        max_steps=options["steps"] or -1,
        num_train_epochs=options["epochs"],
        per_device_train_batch_size=options["batch_size"],
        gradient_accumulation_steps=options["accumulation"],
        use_cpu=device == "cpu",
        bf16=precision == "bf16" or (precision == "auto" and has_bfloat16),
        dataloader_num_workers=options["workers"],
        save_strategy="steps" if options["save_every"] else "no",
        save_steps=options["save_every"] or 500,
        save_total_limit=options["keep"],
        logging_steps=options["log_every"],
        **{name: options[name] for name in same},
    )


__all__ = ["train"]
