"""`dspark train`: train a drafter for a target, with the target beside or from stored features."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from . import train_options as opt
from .common import Threads, bad_input_exits, chosen_device, err, print_json, use_threads
from .data import parse_layers, target_dtype
from .loading import load_target


def train(
    target: opt.Target,
    gguf_file: opt.GgufFile = None,
    dtype: opt.Dtype = "auto",
    device: opt.Device = None,
    threads: Threads = None,
    pack_target: opt.PackTarget = True,
    target_name: opt.TargetName = None,
    data: opt.Data = None,
    features: opt.Features = None,
    feature_dtype: opt.FeatureDtype = "bfloat16",
    features_only: opt.FeaturesOnly = False,
    verify: opt.Verify = True,
    max_length: opt.MaxLength = 4096,
    too_long: opt.TooLong = "truncate",
    init: opt.Init = "target",
    layers: opt.Layers = None,
    block_size: opt.BlockSize = None,
    rank: opt.Rank = None,
    head: opt.Head = None,
    draft_vocab_size: opt.DraftVocabSize = None,
    taps: opt.Taps = None,
    target_layers: opt.TargetLayers = None,
    mask_token_id: opt.MaskTokenId = None,
    family: opt.Family = None,
    peft: opt.Peft = None,
    peft_rank: opt.PeftRank = None,
    peft_alpha: opt.PeftAlpha = None,
    peft_targets: opt.PeftTargets = None,
    ce: opt.Ce = 0.1,
    l1: opt.L1 = 0.9,
    confidence: opt.Confidence = 1.0,
    decay: opt.Decay = 4.0,
    confidence_detach: opt.ConfidenceDetach = False,
    anchors: opt.Anchors = 512,
    block_widths: opt.BlockWidths = [],  # noqa: B006 - typer reads it, nothing changes it
    lr: opt.Lr = 6e-4,
    warmup: opt.Warmup = 0.04,
    schedule: opt.Schedule = "cosine",
    decay_share: opt.DecayShare = None,
    clip: opt.Clip = 1.0,
    steps: opt.Steps = None,
    epochs: opt.Epochs = 3.0,
    batch_size: opt.BatchSize = 8,
    accumulation: opt.Accumulation = 1,
    head_only: opt.HeadOnly = 0,
    gradient_checkpointing: opt.GradientCheckpointing = False,
    precision: opt.Precision = "auto",
    workers: opt.Workers = 0,
    seed: opt.Seed = 42,
    eval_prompts: opt.EvalPrompts = None,
    eval_limit: opt.EvalLimit = 8,
    eval_new_tokens: opt.EvalNewTokens = 64,
    held_out: opt.HeldOut = 0,
    eval_every: opt.EvalEvery = None,
    keep_best: opt.KeepBest = False,
    out: opt.Out = None,
    save_every: opt.SaveEvery = 500,
    keep: opt.Keep = 2,
    log_every: opt.LogEvery = 10,
    report_to: opt.ReportTo = "none",
    resume: opt.Resume = False,
    overwrite: opt.Overwrite = False,
    as_json: opt.AsJson = False,
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
        use_threads(threads)
        model, tokenizer = load_target(target, gguf_file, target_dtype(dtype, request.config.device.type))
        torch.nn.Module.to(model, request.config.device)
        run = prepare(request, model, tokenizer, checkpoint, err)
    result = {"features": str(request.features[0])} if run is None else execute(run)
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
        "target", "out", "gguf_file", "dtype", "feature_dtype", "features_only", "verify", "too_long", "pack_target",
        "target_name", "resume", "overwrite", "draft_vocab_size", "eval_prompts", "eval_limit", "held_out",
    )  # fmt: skip
    return TrainRequest(
        config=_config(options),
        shape=_shape(options, init if is_new else "target"),
        start_from=None if is_new else init,
        adapter=_adapter(options),
        data=tuple(options["data"] or ()),
        features=tuple(options["features"] or ()),
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
        given["target_layer_ids"] = parse_layers(given["target_layer_ids"])
    return DrafterShape(init=init, **given)


def _adapter(options: dict[str, Any]) -> Any:
    from ..training.adapter import AdapterShape

    given = [name for name in ("peft_rank", "peft_alpha", "peft_targets") if options[name] is not None]
    if options["peft"] is None:
        if given:
            raise ValueError(f"--{given[0].replace('_', '-')} belongs to --peft, which says what kind of adapter.")
        return None
    targets = tuple(part.strip() for part in (options["peft_targets"] or "").split(",") if part.strip())
    return AdapterShape(options["peft"], options["peft_rank"], options["peft_alpha"], targets)


# Option -> its least value.
_LEAST = {
    "batch_size": 1, "accumulation": 1, "log_every": 1, "save_every": 0, "keep": 1, "held_out": 0, "eval_limit": 1,
}  # fmt: skip


def _check(options: dict[str, Any]) -> None:
    from ..training.arguments import DECAYING

    precision, device = options["precision"], chosen_device(options["device"])
    if precision not in ("auto", "fp32", "bf16"):
        raise ValueError(f"--precision must be auto, fp32 or bf16, got {precision!r}.")
    if device not in ("cuda", "cpu"):
        raise ValueError(
            f"--device must be cuda or cpu, got {device!r}. For one of several GPUs set CUDA_VISIBLE_DEVICES."
        )
    for name, least in _LEAST.items():
        if options[name] < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {options[name]}.")
    if options["decay_share"] is not None and options["schedule"] != DECAYING:
        raise ValueError(f"--decay-share belongs to --schedule {DECAYING}, got --schedule {options['schedule']}.")


def _config(options: dict[str, Any]) -> Any:
    from ..training.arguments import CHECKPOINTING, TrainingConfig
    from ..training.request import checkpoint_folder

    _check(options)
    precision, device = options["precision"], chosen_device(options["device"])
    has_bfloat16 = device == "cuda" and torch.cuda.is_bf16_supported()
    same = ("ce", "l1", "confidence", "decay", "max_length", "seed", "report_to", "eval_new_tokens", "keep_best")
    return TrainingConfig(
        output_dir=str(checkpoint_folder(options["out"] or Path("features"))),
        num_anchors=options["anchors"],
        block_widths=list(options["block_widths"]),
        learning_rate=options["lr"],
        warmup_steps=options["warmup"],
        lr_scheduler_type=options["schedule"],
        decay_share=0.2 if options["decay_share"] is None else options["decay_share"],
        head_only_steps=options["head_only"],
        detach_confidence=options["confidence_detach"],
        eval_every=options["eval_every"] or 0,
        max_grad_norm=options["clip"],
        max_steps=options["steps"] or -1,
        num_train_epochs=options["epochs"],
        per_device_train_batch_size=options["batch_size"],
        per_device_eval_batch_size=options["batch_size"],
        gradient_accumulation_steps=options["accumulation"],
        use_cpu=device == "cpu",
        bf16=precision == "bf16" or (precision == "auto" and has_bfloat16),
        dataloader_num_workers=options["workers"],
        save_strategy="steps" if options["save_every"] else "no",
        save_steps=options["save_every"] or 500,
        save_total_limit=options["keep"],
        logging_steps=options["log_every"],
        **{CHECKPOINTING: options["gradient_checkpointing"]},
        **{name: options[name] for name in same},
    )


__all__ = ["train"]
