"""One training run from start to finish, as `dspark train` does it: check, load, build, train, save.

Everything that can be wrong with the request is found before the first training step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedModel

from ..cpu import packed
from ..modeling_dspark import DSparkDrafter
from ..pairing import require_pair
from ..peft_layers import carries_adapters
from ..plain_decoding import eos_ids
from ..target import decoder_layers, text_config
from .adapter import adapt
from .bigram_start import Bigrams
from .builder import new_drafter
from .collator import EpochSampler, padding_share, sequence_lengths
from .data import AnswerDataset, read_answers
from .features import vocabulary_rows
from .offline import FeatureDataset
from .prompts import AnswerSettings, prompt_ids, read_prompts
from .request import TrainRequest
from .saving import environment, save_drafter
from .shards import write_features
from .splits import JoinedFeatures, Split, hold_out
from .trainer import DSparkTrainer
from .vocabulary import draft_vocab_from_counts

Data = AnswerDataset | FeatureDataset | JoinedFeatures


@dataclass
class PreparedRun:
    """A run that has passed all checks.

    Attributes:
        trainer: Ready to train.
        data: All of it, held-out sequences included.
        split: What is trained on and what is held out; None: all is trained on.
        checkpoint: Where to go on, or None.
        request: What was asked for.
    """

    trainer: DSparkTrainer
    data: Data
    split: Split | None
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
    if not request.config.should_log:
        console = Console(quiet=True)  # one process speaks
    data = _read(request, target)
    drafter = _drafter(request, target, tokenizer, data, checkpoint)
    _say_mask(console, data, drafter, vocabulary_rows(target))
    if request.features and isinstance(data, AnswerDataset):
        _write_features(request, target, data, drafter.config.target_layer_ids or ())
        if request.features_only:
            return None
        data = _open(request)
    if not isinstance(data, AnswerDataset):
        data.read_layers(drafter.config.target_layer_ids)
    split = hold_out(data, request.held_out, request.config.seed) if request.held_out else None
    trainer = DSparkTrainer(
        _model(request, drafter),
        target=target,
        args=request.config,
        train_dataset=data if split is None else split.train,
        eval_dataset=None if split is None else split.held_out,
        eval_prompts=_eval_prompts(request, tokenizer),
    )
    if trainer.decoding:
        trainer.decoding.check()
    elif not isinstance(data, AnswerDataset):
        _free_layers(target)
    _say(console, data, drafter)
    _say_padding(console, trainer)
    return PreparedRun(trainer, data, split, checkpoint, request)


def execute(run: PreparedRun) -> dict[str, Any]:
    """Train, save, and tell what came out.

    Returns:
        Folder, steps, seconds and the last log entry's figures.
    """
    trainer, request = run.trainer, run.request
    assert request.out is not None
    if trainer.is_world_process_zero():
        request.write()
        if run.checkpoint is None:
            trainer.best.forget()
    started = time.monotonic()
    # Packed products know no autocast, and with stored features the target does not run.
    runs_packed = request.pack_target and isinstance(run.data, AnswerDataset) and not request.config.bf16
    with packed(trainer.target, wanted=runs_packed):
        trainer.train(resume_from_checkpoint=run.checkpoint)
    seconds = time.monotonic() - started
    best = trainer.best.note() if request.config.keep_best else None
    if best is not None:
        trainer.best.restore(trainer.model)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    result = {
        "out": str(request.out),
        "steps": trainer.state.global_step,
        "seconds": round(seconds, 1),
        "final": logs[-1] if logs else {},
        "best": best,
    }
    # Sharded weights are put together by all processes.
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped) if trainer.is_fsdp_enabled else None
    if trainer.is_world_process_zero():
        save_drafter(trainer.drafter, request.out, _provenance(run, result), weights)
    return result


# --- parts --------------------------------------------------------------------------------------------------------


def _read(request: TrainRequest, target: PreTrainedModel) -> Data:
    if request.data:
        longest = getattr(text_config(target), "max_position_embeddings", None) or request.config.max_length
        return read_answers(
            request.data,
            max_length=min(request.config.max_length, longest),
            vocab_size=vocabulary_rows(target),
            too_long=request.too_long,
        )
    features = _open(request)
    features.check_target(target)  # before anything is counted or made of them
    return features


def _open(request: TrainRequest) -> FeatureDataset | JoinedFeatures:
    folders = [FeatureDataset(folder, verify=request.verify) for folder in request.features]
    return folders[0] if len(folders) == 1 else JoinedFeatures(folders)


def _write_features(
    request: TrainRequest, target: PreTrainedModel, data: AnswerDataset, layer_ids: Sequence[int]
) -> None:
    # Several processes would write the same files: the others wait, then find them finished.
    with request.config.main_process_first(local=False, desc="writing features"):
        write_features(
            target,
            data,
            request.features[0],
            layer_ids,
            batch_size=request.config.per_device_train_batch_size,
            dtype=request.feature_dtype,
            pack_target=request.pack_target,
        )


def _eval_prompts(request: TrainRequest, tokenizer: Any) -> list[list[int]]:
    """Ids of the prompts to decode, in the chat template where the tokenizer has one."""
    if request.eval_prompts is None:
        return []
    if tokenizer is None:
        raise ValueError("Prompts to decode need the target's tokenizer, and none was found with it.")
    settings = AnswerSettings(raw=not tokenizer.chat_template)
    prompts = read_prompts([request.eval_prompts], request.eval_limit)
    return [prompt_ids(prompt.text, tokenizer, settings) for prompt in prompts]


def _free_layers(target: PreTrainedModel) -> None:
    """Give the memory of decoder layers back that stored features make needless; embedding and head stay."""
    for layer in decoder_layers(target):
        torch.nn.Module.to(layer, "meta")


def _provenance(run: PreparedRun, result: dict[str, Any]) -> dict[str, Any]:
    """What `training.json` says."""
    held_out = None
    if run.split is not None:
        part = run.split.held_out
        held_out = {"sequences": len(part), "tokens": sum(part.lengths), "indices": sorted(part.indices)}
    return {
        **environment(),
        "request": run.request.described(),
        "data": asdict(run.data.counts),
        "held_out": held_out,
        "target": run.trainer.drafter.config.target,
        "resumed_from": run.checkpoint,
        **{name: result[name] for name in ("steps", "seconds", "final", "best")},
        "log_history": run.trainer.state.log_history,
    }


def _drafter(
    request: TrainRequest,
    target: PreTrainedModel,
    tokenizer: Any,
    data: Data,
    checkpoint: str | None,
) -> DSparkDrafter:
    # Of an adapter the trainer reads the checkpoint by itself, into the drafter it started from.
    source = request.start_from if request.adapter is not None else checkpoint or request.start_from
    if source is not None:
        drafter = DSparkDrafter.from_pretrained(source, dtype=torch.float32)
        require_pair(target, drafter)  # before features are written for it
        return drafter
    shape = request.shape
    if request.draft_vocab_size is not None:
        rows = vocabulary_rows(target)
        always = eos_ids(target) | {i for i in getattr(tokenizer, "all_special_ids", ()) if i < rows}
        counts = data.answer_token_counts(rows)
        shape = replace(shape, draft_vocab=draft_vocab_from_counts(counts, request.draft_vocab_size, always))
    if not isinstance(data, AnswerDataset) and shape.target_layer_ids is None:
        shape = replace(shape, target_layer_ids=data.target_layer_ids)
    # Of what is trained on alone: held-out answers judge the head too.
    bigrams = Bigrams.of(hold_out(data, request.held_out, request.config.seed).train if request.held_out else data)
    torch.manual_seed(request.config.seed)
    return new_drafter(target, shape, tokenizer=tokenizer, bigrams=bigrams, target_name=request.target_name)


def _model(request: TrainRequest, drafter: DSparkDrafter) -> Any:
    """What is trained: the drafter, or the PEFT model around it."""
    if request.adapter is not None:
        torch.manual_seed(request.config.seed)
        return adapt(drafter, request.adapter)
    if carries_adapters(drafter):
        raise ValueError(
            f"{request.start_from} is an adapter, and its drafter would be trained under it. Merge it into one first "
            "(`DSparkDrafter.from_pretrained(...).merge_and_unload().save_pretrained(...)`)."
        )
    return drafter


def _say_mask(console: Console, data: Data, drafter: DSparkDrafter, vocab_size: int) -> None:
    config = drafter.config
    _print(console, f"mask token {config.mask_token_id}: {(config.target or {}).get('mask_token', 'of the drafter')}")
    if seen := int(data.answer_token_counts(vocab_size)[config.mask_token_id]):
        _print(console, f"warning: the answers hold the mask token {seen} times; drafts are better with one they lack")


def _say_padding(console: Console, trainer: DSparkTrainer) -> None:
    args, lengths = trainer.args, sequence_lengths(trainer.train_dataset)
    step_size = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    shares = []
    for is_grouped in (args.group_by_length, False):
        order = EpochSampler(lengths, step_size=step_size, seed=args.seed, epoch=lambda: 0, group_by_length=is_grouped)
        shares.append(padding_share(lengths, list(order), args.train_batch_size))
    _print(console, f"padding: {shares[0]:.1%} of an epoch's positions ({shares[1]:.1%} without grouping by length)")


def _say(console: Console, data: Data, drafter: DSparkDrafter) -> None:
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
