"""One training run from start to finish, as `dspark train` does it: check, load, build, train, save.

Everything that can be wrong with the request is found before the first training step.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedModel

from ..modeling_dspark import DSparkDrafter
from ..target import text_config
from .builder import new_drafter
from .data import AnswerDataset, read_answers
from .features import vocabulary_rows
from .offline import FeatureDataset
from .packing import packed
from .request import TrainRequest
from .saving import environment, save_drafter
from .shards import write_features
from .trainer import DSparkTrainer
from .vocabulary import draft_vocab_from_counts, eos_ids


@dataclass
class PreparedRun:
    """A run that has passed all checks.

    Attributes:
        trainer: Ready to train.
        data: What it trains on.
        checkpoint: Where to go on, or None.
        request: What was asked for.
    """

    trainer: DSparkTrainer
    data: AnswerDataset | FeatureDataset
    checkpoint: str | None
    request: TrainRequest


def prepare(
    request: TrainRequest, target: PreTrainedModel, tokenizer: Any, checkpoint: str | None, console: Console
) -> PreparedRun | None:
    """Read the data, build the drafter, write features if asked, make the trainer.

    Args:
        request: What was asked for; its places have been checked.
        target, tokenizer: As loaded; the tokenizer may be None.
        checkpoint: Where to go on, or None.
        console: Says what was chosen and found.

    Returns:
        The run, or None when only features were wanted.

    Raises:
        ValueError: Anything wrong with the request, the data or the pair; nothing was trained or replaced.
        OSError: A drafter to start from cannot be loaded.
    """
    data = _read(request, target)
    drafter = _drafter(request, target, tokenizer, data, checkpoint)
    _say_mask(console, data, drafter)
    if request.features is not None and isinstance(data, AnswerDataset):
        with packed(target, wanted=request.pack_target):
            write_features(
                target,
                data,
                request.features,
                drafter.config.target_layer_ids or (),
                batch_size=request.config.per_device_train_batch_size,
                dtype=request.feature_dtype,
            )
        if request.features_only:
            return None
        data = _open(request)
    if isinstance(data, FeatureDataset):
        data.read_layers(drafter.config.target_layer_ids)
    trainer = DSparkTrainer(drafter, target=target, args=request.config, train_dataset=data)
    _say(console, data, drafter)
    return PreparedRun(trainer, data, checkpoint, request)


def execute(run: PreparedRun) -> dict[str, Any]:
    """Train, save, and tell what came out.

    Returns:
        Folder, steps, seconds and the last log entry's figures.
    """
    trainer, request = run.trainer, run.request
    assert request.out is not None
    if trainer.is_world_process_zero():
        request.write()
    started = time.monotonic()
    # Packed products know no autocast, and with stored features the target does not run.
    runs_packed = request.pack_target and isinstance(run.data, AnswerDataset) and not request.config.bf16
    with packed(trainer.target, wanted=runs_packed):
        trainer.train(resume_from_checkpoint=run.checkpoint)
    seconds = time.monotonic() - started
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    result = {
        "out": str(request.out),
        "steps": trainer.state.global_step,
        "seconds": round(seconds, 1),
        "final": logs[-1] if logs else {},
    }
    if trainer.is_world_process_zero():
        provenance = {
            **environment(),
            "request": request.described(),
            "data": asdict(run.data.counts),
            "target": trainer.drafter.config.target,
            "resumed_from": run.checkpoint,
            **{name: result[name] for name in ("steps", "seconds", "final")},
            "log_history": trainer.state.log_history,
        }
        save_drafter(trainer.drafter, request.out, provenance)
    return result


# --- parts --------------------------------------------------------------------------------------------------------


def _read(request: TrainRequest, target: PreTrainedModel) -> AnswerDataset | FeatureDataset:
    if request.data:
        longest = getattr(text_config(target), "max_position_embeddings", None) or request.config.max_length
        return read_answers(
            request.data,
            max_length=min(request.config.max_length, longest),
            vocab_size=vocabulary_rows(target),
            too_long=request.too_long,
        )
    return _open(request)


def _open(request: TrainRequest) -> FeatureDataset:
    assert request.features is not None
    return FeatureDataset(request.features, verify=request.verify)


def _drafter(
    request: TrainRequest,
    target: PreTrainedModel,
    tokenizer: Any,
    data: AnswerDataset | FeatureDataset,
    checkpoint: str | None,
) -> DSparkDrafter:
    source = checkpoint or request.start_from
    if source is not None:
        return DSparkDrafter.from_pretrained(source, dtype=torch.float32)
    shape = request.shape
    if request.draft_vocab_size is not None:
        rows = vocabulary_rows(target)
        always = eos_ids(target) | {i for i in getattr(tokenizer, "all_special_ids", ()) if i < rows}
        counts = data.answer_token_counts(rows)
        shape = replace(shape, draft_vocab=draft_vocab_from_counts(counts, request.draft_vocab_size, always))
    if isinstance(data, FeatureDataset) and shape.target_layer_ids is None:
        shape = replace(shape, target_layer_ids=data.target_layer_ids)
    torch.manual_seed(request.config.seed)
    return new_drafter(target, shape, tokenizer=tokenizer, target_name=request.target_name)


def _say_mask(console: Console, data: AnswerDataset | FeatureDataset, drafter: DSparkDrafter) -> None:
    config = drafter.config
    _print(console, f"mask token {config.mask_token_id}: {(config.target or {}).get('mask_token', 'of the drafter')}")
    if seen := int(data.answer_token_counts(config.vocab_size)[config.mask_token_id]):
        _print(console, f"warning: the answers hold the mask token {seen} times; drafts are better with one they lack")


def _say(console: Console, data: AnswerDataset | FeatureDataset, drafter: DSparkDrafter) -> None:
    counts, config = data.counts, drafter.config
    left_out = counts.dropped_long + counts.dropped_short
    _print(
        console,
        f"{counts.used:,} sequences, {counts.tokens:,} tokens, {counts.supervised_tokens:,} of them answers "
        f"({counts.truncated} cut for their length, {left_out} left out)",
    )
    size = sum(parameter.numel() for parameter in drafter.parameters())
    trained = sum(parameter.numel() for parameter in drafter.parameters() if parameter.requires_grad)
    _print(
        console,
        f"drafter: {config.num_hidden_layers} {config.family} layers, block {config.block_size}, head "
        f"{config.markov_head_type} rank {config.markov_rank}, taps {config.target_layer_ids}, {config.num_logits:,} "
        f"logits, {size / 1e6:.1f} M parameters ({trained / 1e6:.1f} M trained)",
    )


def _print(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


__all__ = ["PreparedRun", "execute", "prepare"]
