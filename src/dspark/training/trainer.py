"""`DSparkTrainer`: transformers' `Trainer` for drafters, with the target beside (online) or its features stored.

What it adds: anchors that depend on the seed, the step and a sequence's place in it, and on nothing else; a loss whose
mean runs over the whole optimizer step, so that accumulation and devices change nothing; a data order that survives
interruption; acceptance in the logs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler
from transformers import PreTrainedModel, PrinterCallback, Trainer
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK

from ..borrowing import teacher_head
from ..modeling_dspark import DSparkDrafter, DSparkTrainingOutput
from ..objective import build_blocks, position_weights, sample_anchors
from ..pairing import require_pair
from ..target import unwrap
from .arguments import TrainingConfig
from .callbacks import TrainingProgress
from .collator import BlockCollator, EpochSampler, mix, sequence_lengths
from .features import capture_features, check_target, target_logsumexp
from .meter import TrainingMeter
from .offline import FeatureDataset
from .saving import quiet_bars

_EVALUATION = 1 << 40  # stands for the step number in evaluation, so that its anchors are always the same


class DSparkTrainer(Trainer):
    """Trains a drafter on its target's text.

    Args:
        model: The drafter (PEFT-wrapped or not). It borrows the target's embedding and head by reference.
        target: The frozen target. With stored features only its embedding and LM head are used.
        args: Settings.
        train_dataset: `AnswerDataset` (online) or `FeatureDataset` (offline), or anything with such items.
        **kwargs: As `Trainer` (`eval_dataset`, `callbacks`, ...).

    Raises:
        ValueError: Target and drafter, or features and drafter, do not fit, or the target's law cannot be computed
            from its last hidden state.
    """

    args: TrainingConfig

    def __init__(
        self,
        model: Any,
        *,
        target: PreTrainedModel,
        args: TrainingConfig,
        train_dataset: Dataset | None = None,
        **kwargs: Any,
    ) -> None:
        if args.n_gpu > 1:
            args._n_gpu = 1  # replicas of nn.DataParallel lose the borrowed modules; use accelerate for many devices
        self.target = target
        self.drafter: DSparkDrafter = unwrap(model)
        kwargs.setdefault("data_collator", BlockCollator(args.max_length))
        super().__init__(model=model, args=args, train_dataset=train_dataset, **kwargs)
        self._prepare_pair()
        for dataset in (train_dataset, kwargs.get("eval_dataset")):
            if isinstance(dataset, FeatureDataset):
                dataset.check_fits(target, self.drafter.config.context_width)
        # The loss is normalised over the whole step by `compute_loss`; this is how Trainer is told (all versions).
        self.model_accepts_loss_kwargs = True
        self.label_names = ["loss_mask"]  # makes `evaluate` compute a loss
        self._meters = {mode: TrainingMeter(self.drafter.config.num_draft_tokens) for mode in ("train", "eval")}
        for callback in (PrinterCallback, DEFAULT_PROGRESS_CALLBACK):
            self.remove_callback(callback)
        self.add_callback(TrainingProgress(bar=not args.disable_tqdm))

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
        for part, is_trained in ((self.drafter.embed_tokens, False), (self.drafter.lm_head, self.args.train_lm_head)):
            if part is not None:
                part.requires_grad_(is_trained)
        # With the rows of a reduced vocabulary at hand, one V-wide pass per position replaces one per block slot.
        teacher = teacher_head(target, self.drafter.draft_token_ids)
        has_rows = teacher is not None and teacher.rows is not None
        self._needs_logsumexp = has_rows and self.drafter.objective.needs_target_law

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

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list, torch.Tensor | int | None]:
        """The batches of one optimizer step, with their anchors, and the step's total loss weight over all devices."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        total = torch.zeros((), device=device)
        for number, batch in enumerate(batches):
            first = (number * self.args.world_size + self.args.process_index) * self.args.train_batch_size
            self._add_anchors(batch, self.state.global_step, first)
            total += self._loss_weight(batch).to(device)
        # A step without a single anchor has loss 0, not 0 / 0.
        return batches, self._add_up(total).clamp(min=1e-6)

    def _add_anchors(self, batch: dict[str, torch.Tensor], step: int, first: int) -> None:
        """Anchors of each row, drawn from (seed, step, place in the step): padding and splitting do not matter."""
        rows = []
        for row, mask in enumerate(batch["loss_mask"].bool().cpu()):
            generator = torch.Generator().manual_seed(mix(self.args.seed, step, first + row))
            mask = mask[: _last_supervised(mask)]
            rows.append(sample_anchors(mask[None], self.args.num_anchors, generator=generator))
        padded = [torch.nn.utils.rnn.pad_sequence([row[part][0] for row in rows], batch_first=True) for part in (0, 1)]
        batch["anchor_positions"], batch["anchor_keep_mask"] = (part.to(batch["loss_mask"].device) for part in padded)

    def _loss_weight(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        blocks = build_blocks(
            batch["input_ids"],
            batch["loss_mask"],
            batch["anchor_positions"],
            batch["anchor_keep_mask"],
            self.drafter.config.num_draft_tokens,
        )
        return position_weights(blocks.supervised, self.drafter.objective.decay).sum()

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
            self._add_anchors(inputs, _EVALUATION, 0)
        inputs = self._with_features(inputs)
        output: DSparkTrainingOutput = model(**inputs)
        assert output.loss is not None
        assert output.supervised is not None
        weight = position_weights(output.supervised, self.drafter.objective.decay).sum()
        tokens = sum(_last_supervised(mask) for mask in inputs["loss_mask"].bool().cpu())
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

    # --- logs -----------------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add loss terms, tau and acceptance to what Trainer logs."""
        if "loss" in logs:
            logs.update(self._meters["train"].read(self._add_up))
        elif "eval_loss" in logs:
            # In place: `evaluate` returns this dict.
            logs.update({f"eval_{name}": value for name, value in self._meters["eval"].read(self._add_up).items()})
        super().log(logs, start_time)

    def _add_up(self, sums: torch.Tensor) -> torch.Tensor:
        return self.accelerator.reduce(sums, "sum")  # type: ignore[return-value]


def _last_supervised(mask: torch.Tensor) -> int:
    """Tokens up to the last supervised one, at least 1: what is behind it plays no part."""
    places = mask.nonzero()
    return int(places[-1]) + 1 if len(places) else 1


__all__ = ["DSparkTrainer"]
