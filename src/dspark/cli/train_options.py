"""The options of `dspark train`, one type each, by the panels of its help text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

_TARGET, _DATA, _DRAFTER, _LOSS, _STEPS, _EVALUATION, _OUTPUT = (
    "Target", "Data", "Drafter (as the target in all else)", "Loss", "Optimisation", "Evaluation", "Output",
)  # fmt: skip
_ADAPTER = "Adapter (PEFT)"


def _in(panel: str, text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel)


Target = Annotated[str, _in(_TARGET, "The target: a folder or a Hub id.")]
GgufFile = Annotated[str | None, _in(_TARGET, "Name of a GGUF file in the target's folder.")]
Dtype = Annotated[str, _in(_TARGET, "The target's: fp32, bf16, fp16, or auto: fp32 on a CPU, else bf16.")]
Device = Annotated[str | None, _in(_TARGET, "cuda or cpu. Default: cuda where there is one.")]
PackTarget = Annotated[
    bool,
    _in(_TARGET, "On a CPU: pack the target's linear layers while it runs."),
]
TargetName = Annotated[
    str | None,
    _in(_TARGET, "Public name of the target to note in the drafter, where it is loaded from a folder."),
]
Data = Annotated[
    list[Path] | None,
    _in(_DATA, "Answers written by `dspark data`. Repeat for more files."),
]
Features = Annotated[
    list[Path] | None,
    _in(
        _DATA,
        "Folder of stored target features. Alone: train from it (repeat to join several), the target's layers never "
        "run. With --data: write it first (what is there is kept), then train from it. Without it, the target runs "
        "beside.",
    ),
]
FeatureDtype = Annotated[str, _in(_DATA, "How features are written: bfloat16, float16, float32.")]
FeaturesOnly = Annotated[bool, _in(_DATA, "Stop when the features are written.", "--features-only")]
Verify = Annotated[bool, _in(_DATA, "Compare every shard's SHA-256 with the index first.")]
MaxLength = Annotated[int, _in(_DATA, "Most tokens of a sequence (never more than the target takes).")]
TooLong = Annotated[str, _in(_DATA, "Longer records: truncate (cut the end), drop, or error.")]
Init = Annotated[
    str,
    _in(
        _DRAFTER,
        "target: start from the target's last layers, the sequential head from the answers' bigrams (ours). random: "
        "as the reference. Else a folder or "
        "Hub id of a drafter to train on; the options below are then not given.",
    ),
]
Layers = Annotated[int | None, _in(_DRAFTER, "Draft layers (5, the reference).")]
BlockSize = Annotated[int | None, _in(_DRAFTER, "Drafts per round (7, the reference).")]
Rank = Annotated[
    int | None,
    _in(_DRAFTER, "Rank of the sequential head (256, the reference); 0: none."),
]
Head = Annotated[str | None, _in(_DRAFTER, "Sequential head: vanilla (default), gated, rnn.")]
DraftVocabSize = Annotated[
    int | None,
    _in(
        _DRAFTER,
        "Let the drafter write only this many tokens, the most frequent in the data and all special "
        "ones; its LM head shrinks accordingly. Default: all.",
    ),
]
Taps = Annotated[
    int | None,
    _in(
        _DRAFTER,
        "Target layers to read, evenly spaced in 1..N-3 (5, the reference; with --features alone: those stored).",
    ),
]
TargetLayers = Annotated[
    str | None,
    _in(_DRAFTER, "Name them instead, e.g. 1,9,17: decoder layers, 0-based."),
]
MaskTokenId = Annotated[
    int | None,
    _in(_DRAFTER, "Filler of the block; must never occur in text. Default: found in the tokenizer and said."),
]
Family = Annotated[
    str | None,
    _in(_DRAFTER, "Layer family: llama, qwen3, gemma4. Default: as the target."),
]
Peft = Annotated[
    str | None,
    _in(
        _ADAPTER,
        "lora, dora or ia3: leave the drafter of --init as it is and train an adapter for it, its sequential and "
        "confidence heads whole. OUT is then an adapter's folder, which loads like a drafter.",
    ),
]
PeftRank = Annotated[
    int | None,
    _in(_ADAPTER, "Rank of LoRA and DoRA (64, reported within 2% of a drafter trained whole for its domain)."),
]
PeftAlpha = Annotated[float | None, _in(_ADAPTER, "Their scale is alpha / rank (as the rank: 1, PEFT's own).")]
PeftTargets = Annotated[
    str | None,
    _in(_ADAPTER, "Linear layers to adapt, e.g. q_proj,fc. Default: all of the draft layers, and fc."),
]
Ce = Annotated[float, _in(_LOSS, "Weight of the cross-entropy (paper).")]
L1 = Annotated[float, _in(_LOSS, "Weight of the L1 distance to the target's law (paper).")]
Confidence = Annotated[float, _in(_LOSS, "Weight of the confidence loss (paper).")]
Decay = Annotated[
    float,
    _in(
        _LOSS,
        "Draft position k = 0, 1, ... weighs exp(-k/decay); 0: all weigh 1. 4 is the reference's for block "
        "7, the paper says the block size.",
    ),
]
ConfidenceDetach = Annotated[
    bool,
    _in(_LOSS, "Keep the confidence loss out of the backbone (the reference does not).", "--confidence-detach"),
]
Anchors = Annotated[int, _in(_LOSS, "Most blocks per sequence and step (reference).")]
Lr = Annotated[float, _in(_STEPS, "Peak learning rate, AdamW (reference).")]
Warmup = Annotated[float, _in(_STEPS, "Warm-up, as a share of all steps (reference).")]
Schedule = Annotated[
    str,
    _in(_STEPS, "After it: cosine, linear, constant_with_warmup, warmup_stable_decay (see --decay-share), ..."),
]
DecayShare = Annotated[
    float | None,
    _in(_STEPS, "Of warmup_stable_decay: the last share of all steps, in which the rate falls to 0 (default 0.2)."),
]
Clip = Annotated[float, _in(_STEPS, "Largest gradient norm (reference); 0: no limit.")]
Steps = Annotated[int | None, _in(_STEPS, "Optimizer steps. Default: as --epochs gives.")]
Epochs = Annotated[float, _in(_STEPS, "Passes over the data.")]
BatchSize = Annotated[int, _in(_STEPS, "Sequences per forward pass and device.")]
Accumulation = Annotated[
    int,
    _in(_STEPS, "Forward passes per optimizer step; the result is that of one big batch."),
]
HeadOnly = Annotated[
    int,
    _in(_STEPS, "In the first so many steps only the sequential and confidence heads learn, the backbone is frozen."),
]
GradientCheckpointing = Annotated[
    bool,
    _in(
        _STEPS,
        "Compute the layers' activations again in the backward pass: less memory, about a third more work.",
        "--gradient-checkpointing",
    ),
]
Precision = Annotated[
    str,
    _in(_STEPS, "fp32, bf16 (autocast over float32 weights), or auto: bf16 on a GPU that has it."),
]
Workers = Annotated[int, _in(_STEPS, "Processes that read data.")]
BlockWidths = Annotated[
    list[int],
    _in(
        _LOSS,
        "Drafts of a step's blocks, one width per step in turn (repeat); narrower blocks are drawn more often, so "
        "that steps cost alike. Default: whole blocks.",
        "--block-width",
    ),
]
Seed = Annotated[int, _in(_STEPS, "Of weights, order and anchors.")]
EvalPrompts = Annotated[
    Path | None,
    _in(
        _EVALUATION,
        "Prompt file as for `dspark data`: the drafter decodes them with the target (greedy) and the real accepted "
        "length is logged as eval_tau. Training is the same with and without.",
    ),
]
EvalLimit = Annotated[int, _in(_EVALUATION, "Prompts of that file to decode.")]
EvalNewTokens = Annotated[int, _in(_EVALUATION, "Tokens to decode per prompt.")]
HeldOut = Annotated[
    int,
    _in(
        _EVALUATION, "Keep so many sequences, drawn by the seed, out of training and log their loss (eval_loss, ...)."
    ),
]
EvalEvery = Annotated[int | None, _in(_EVALUATION, "Steps between evaluations. Default: a tenth of the run.")]
KeepBest = Annotated[
    bool,
    _in(
        _EVALUATION,
        "The finished drafter is that of the best evaluation: by eval_tau, else the held-out estimate of it.",
        "--keep-best",
    ),
]
Out = Annotated[
    Path | None,
    _in(
        _OUTPUT,
        "Folder of the finished drafter: it appears whole, at the end, with training.json in it. "
        "Checkpoints go to OUT-checkpoints. Needed unless --features-only.",
    ),
]
SaveEvery = Annotated[int, _in(_OUTPUT, "Steps between checkpoints; 0: none.")]
Keep = Annotated[int, _in(_OUTPUT, "Checkpoints to keep.")]
LogEvery = Annotated[int, _in(_OUTPUT, "Steps between log entries.")]
ReportTo = Annotated[str, _in(_OUTPUT, "Trackers, as in transformers: none, tensorboard, wandb, ...")]
Resume = Annotated[
    bool,
    _in(_OUTPUT, "Go on from the last checkpoint of the same command; exact.", "--resume"),
]
Overwrite = Annotated[bool, _in(_OUTPUT, "Replace OUT and earlier checkpoints.", "--overwrite")]
AsJson = Annotated[bool, _in(_OUTPUT, "Print the result as JSON on stdout.", "--json")]
