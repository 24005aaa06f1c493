"""`DSparkTrainer`: transformers' `Trainer` for drafters, with the target beside (online) or its features stored.

What it adds: anchors that depend on the seed, the step and a sequence's place in it, and on nothing else; a loss whose
mean runs over the whole optimizer step, so that accumulation and devices change nothing; a data order that survives
interruption; acceptance in the logs; evaluation by decoding, which leaves no trace in the run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence, Sized
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler, SequentialSampler
from transformers import PreTrainedModel, PrinterCallback, Trainer
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK

from ..adapter_files import note_base
from ..borrowing import teacher_head
from ..files import quiet_bars
from ..modeling_dspark import DSparkDrafter, DSparkTrainingOutput
from ..objective import position_weights
from ..pairing import require_pair
from ..peft_layers import carries_adapters
from ..target import unwrap
from .adapter import choose_trained
from .arguments import DECAYING, TrainingConfig, check_settings
from .best import BestWeights
from .callbacks import TrainingProgress
from .collator import BlockCollator, EpochSampler, sequence_lengths
from .evaluation import DecodingEvaluation, EvaluateEvery, as_estimates, undisturbed
from .features import capture_features, check_target, target_logsumexp
from .meter import TrainingMeter
from .step_batches import add_anchors, last_supervised, leave_out_copies, loss_weight

_EVALUATION = 1 << 40  # stands for the step number in evaluation, so that its anchors are always the same


class DSparkTrainer(Trainer):
    """Trains a drafter on its target's text.

    Args:
        model: The drafter (PEFT-wrapped or not). It borrows the target's embedding and head by reference.
        target: The frozen target. With stored features only its embedding and LM head are used.
        args: Settings.
        train_dataset: `AnswerDataset` (online) or `FeatureDataset` (offline), or anything with such items.
        eval_prompts: Ids of prompts to decode in every evaluation, for `eval_tau`, `eval_acceptance_1`, ...; an
            `eval_dataset` gives `eval_loss`, ... and estimates, `eval_tau_estimate`, as `tau` is one in training.
        **kwargs: As `Trainer` (`eval_dataset`, `callbacks`, ...).

    Raises:
        ValueError: Target and drafter, or features and drafter, do not fit, the target's law cannot be computed from
            its last hidden state, or the settings ask for what cannot be done with this drafter.
    """

    args: TrainingConfig

    def __init__(
        self,
        model: Any,
        *,
        target: PreTrainedModel,
        args: TrainingConfig,
        train_dataset: Dataset | None = None,
        eval_prompts: Sequence[Sequence[int]] = (),
        **kwargs: Any,
    ) -> None:
        if args.n_gpu > 1:
            args._n_gpu = 1  # replicas of nn.DataParallel lose the borrowed modules; use accelerate for many devices
        self.target = target
        self.drafter: DSparkDrafter = unwrap(model)
        kwargs.setdefault("data_collator", BlockCollator(args.max_length))
        check_settings(args, self.drafter, has_evaluation=bool(eval_prompts) or kwargs.get("eval_dataset") is not None)
        super().__init__(model=model, args=args, train_dataset=train_dataset, **kwargs)
        self._prepare_pair()
        datasets: tuple[Any, ...] = (train_dataset, kwargs.get("eval_dataset"))
        for dataset in datasets:
            if hasattr(dataset, "check_fits"):
                dataset.check_fits(target, self.drafter.config.context_width)
        # The loss is normalised over the whole step by `compute_loss`; this is how Trainer is told (all versions).
        self.model_accepts_loss_kwargs = True
        self.label_names = ["loss_mask"]  # makes `evaluate` compute a loss
        self._meters = {mode: self._new_meter() for mode in ("train", "eval")}
        self.decoding = DecodingEvaluation(target, self.drafter, eval_prompts, args.eval_new_tokens)
        self._decoded: dict[str, float] = {}
        self._eval_rows = 0
        self.best = BestWeights(str(args.output_dir))
        if self.is_fsdp_enabled and (self.decoding or args.keep_best):
            raise ValueError(
                "With FSDP each process holds a part of every weight, so nothing can be decoded or kept on the way. "
                "Leave out --eval-prompts and --keep-best, or train with DDP."
            )
        for callback in (PrinterCallback, DEFAULT_PROGRESS_CALLBACK):
            self.remove_callback(callback)
        self.add_callback(TrainingProgress(bar=not args.disable_tqdm))
        if (self.decoding or self.eval_dataset is not None) and args.eval_strategy == "no":
            self.add_callback(EvaluateEvery(args.eval_every))

    def _prepare_pair(self) -> None:
        target = self.target
        require_pair(target, self.drafter)
        target.eval().requires_grad_(False)
        if not hasattr(target, "hf_device_map") and self.place_model_on_device:
            torch.nn.Module.to(target, self.args.device)
        self.drafter.share_with(target)
        self.drafter.objective = self.args.objective
        if self.drafter.objective.needs_target_law:
            check_target(target)
        choose_trained(self.drafter, train_lm_head=self.args.train_lm_head)
        # With the rows of a reduced vocabulary at hand, one V-wide pass per position replaces one per block slot.
        teacher = teacher_head(target, self.drafter.draft_token_ids)
        has_rows = teacher is not None and teacher.rows is not None
        self._needs_logsumexp = has_rows and self.drafter.objective.needs_target_law

    def _new_meter(self) -> TrainingMeter:
        return TrainingMeter(self.drafter.config.num_draft_tokens)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """As `Trainer`; the warm-up-stable-decay schedule is given its number of falling steps."""
        given = self.args.lr_scheduler_kwargs
        if self.args.lr_scheduler_type == DECAYING:
            falling = round(self.args.decay_share * num_training_steps)
            self.args.lr_scheduler_kwargs = {"num_decay_steps": falling, **(given or {})}  # type: ignore[dict-item]
        try:
            return super().create_scheduler(num_training_steps, optimizer)
        finally:
            self.args.lr_scheduler_kwargs = given

    # --- data -----------------------------------------------------------------------------------------------------

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler | None:
        dataset = self.train_dataset if train_dataset is None else train_dataset
        if dataset is None or not hasattr(dataset, "__len__"):
            return super()._get_train_sampler(train_dataset)
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return EpochSampler(
            sequence_lengths(dataset),
            step_size=self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size,
            seed=seed,
            # Trainer's own bookkeeping is what a checkpoint restores.
            epoch=lambda: int(self.state.epoch or 0),
            group_by_length=self.args.group_by_length,
        )

    def _get_eval_sampler(self, eval_dataset: Dataset) -> Sampler:
        return SequentialSampler(eval_dataset)  # type: ignore[arg-type]

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list, torch.Tensor | int | None]:
        """The batches of one optimizer step, with their anchors, and the step's total loss weight over all devices."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        step, total = self.state.global_step, torch.zeros((), device=device)
        widths, most = self.args.block_widths, self.drafter.config.num_draft_tokens
        width = widths[step % len(widths)] if widths else most
        self.drafter.objective = replace(
            self.drafter.objective, heads_only=step < self.args.head_only_steps, num_drafts=width if widths else None
        )
        for number, batch in enumerate(batches):
            first = (number * self.args.world_size + self.args.process_index) * self.args.train_batch_size
            if self.args.world_size > 1 and isinstance(self.train_dataset, Sized):
                leave_out_copies(batch, self._rows_before(step) + first, len(self.train_dataset))
            self._add_anchors(batch, step, first, self.args.num_anchors * most // width)
            total += loss_weight(batch, width, self.args.objective).to(device)
        # A step without a single anchor has loss 0, not 0 / 0.
        return batches, self._add_up(total).clamp(min=1e-6)

    def _rows_before(self, step: int) -> int:
        """Sequences of the epoch that come before this step, copies included."""
        args = self.args
        rows = args.train_batch_size * args.world_size
        passes = len(self.train_dataset) // rows if args.dataloader_drop_last else -(-len(self.train_dataset) // rows)
        steps = -(-passes // args.gradient_accumulation_steps)
        return step % steps * args.gradient_accumulation_steps * rows

    def _add_anchors(self, batch: dict[str, torch.Tensor], step: int, first: int, count: int | None = None) -> None:
        add_anchors(batch, count or self.args.num_anchors, self.args.seed, step, first)

    def _add_evaluation_anchors(self, batch: dict[str, torch.Tensor]) -> None:
        """Always the same anchors for a sequence of the evaluation data."""
        rows, world = self.args.eval_batch_size, self.args.world_size
        first = self._eval_rows + self.args.process_index * rows
        self._eval_rows += rows * world
        if world > 1 and isinstance(self.eval_dataset, Sized):
            leave_out_copies(batch, first, len(self.eval_dataset))
        self._add_anchors(batch, _EVALUATION, first)

    # --- loss -----------------------------------------------------------------------------------------------------

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Loss of one batch; in training its share of the step's mean (`num_items_in_batch`: total loss weight)."""
        if "anchor_positions" not in inputs:
            self._add_evaluation_anchors(inputs)
        inputs = self._with_features(inputs)
        output: DSparkTrainingOutput = model(**inputs)
        assert output.loss is not None
        assert output.supervised is not None
        weight = position_weights(output.supervised, self.drafter.objective.decay).sum()
        tokens = sum(last_supervised(mask) for mask in inputs["loss_mask"].bool().cpu())
        self._meters["eval" if num_items_in_batch is None else "train"].add(output, weight, tokens)
        loss = output.loss
        if num_items_in_batch is not None:
            # Gradients are averaged over processes, so each adds its share `num_processes` times.
            loss = loss * weight / num_items_in_batch * self.accelerator.num_processes
        return (loss, output) if return_outputs else loss

    def _with_features(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """`inputs` with the target's hidden states, computed here unless they came from shards."""
        if "target_hidden_states" in inputs:
            return inputs
        states = capture_features(self.target, inputs["input_ids"], self.drafter.config.target_layer_ids or ())
        added = {"target_hidden_states": states.hidden, "target_last_hidden_states": states.last}
        if self._needs_logsumexp:
            # The law of a supervised token is computed at the position before it.
            needed = torch.nn.functional.pad(inputs["loss_mask"].bool()[:, 1:], (0, 1))
            added["target_logsumexp"] = target_logsumexp(self.target, states.last, needed.to(states.last.device))
        return {**inputs, **{name: tensor.to(inputs["input_ids"].device) for name, tensor in added.items()}}

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        with quiet_bars():
            super()._save(output_dir, state_dict)
        if carries_adapters(self.drafter):
            note_base(output_dir or str(self.args.output_dir), self.drafter)

    # --- evaluation -----------------------------------------------------------------------------------------------

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Loss on the evaluation data, as `Trainer`, and what decoding the evaluation prompts gives.

        Random states, modes and gradients are as before, so a run trains the same with and without it.
        """
        started = time.monotonic()
        self._meters["eval"], self._eval_rows = self._new_meter(), 0
        trained = self.drafter.objective
        self.drafter.objective = replace(trained, num_drafts=None)  # evaluation is on whole blocks
        with undisturbed(self.model):
            if eval_dataset is None and self.decoding:
                self._decoded = self._decode()
            if eval_dataset is None and self.eval_dataset is None and self.decoding:
                metrics = dict(self._decoded)
                self.log(metrics)
                call = (self.args, self.state, self.control, metrics)  # type: ignore[has-type]
                self.control = self.callback_handler.on_evaluate(*call)
            else:
                metrics = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        self.drafter.objective = trained
        if self.is_in_train and self.args.keep_best and self.args.should_save:
            self.best.consider(self.model, metrics, self.state.global_step)
        self._meters["train"].skip(time.monotonic() - started)
        return metrics

    def _decode(self) -> dict[str, float]:
        """Each process decodes its share of the prompts."""
        sums = self.decoding.count(slice(self.args.process_index, None, self.args.world_size))
        figures = self.decoding.figures(self._add_up(sums.to(self.args.device, torch.float32)))
        return {f"eval_{name}": value for name, value in figures.items()}

    # --- logs -----------------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add loss terms, tau and acceptance to what Trainer logs."""
        if "loss" in logs:
            logs.update(self._meters["train"].read(self._add_up))
        elif "eval_loss" in logs:
            # In place: `evaluate` returns this dict. Trainer's loss is a mean of batches' means.
            figures = self._meters["eval"].read(self._add_up)
            loss = sum(getattr(self.args, term) * figures[f"{term}_loss"] for term in ("ce", "l1", "confidence"))
            logs.update({**as_estimates(figures), "eval_loss": loss})
        if any(name.startswith("eval_") for name in logs):
            logs.update(self._decoded)
            self._decoded = {}
        super().log(logs, start_time)

    def _add_up(self, sums: torch.Tensor) -> torch.Tensor:
        return self.accelerator.reduce(sums, "sum")  # type: ignore[return-value]


__all__ = ["DSparkTrainer"]
