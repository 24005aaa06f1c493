"""Tiny targets, text for them, and trainers, shared by the tests of training."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from dspark import DSparkDrafter
from dspark.objective import Objective
from dspark.training import AnswerDataset, DSparkTrainer, TrainingConfig, new_drafter, read_answers

VOCAB = 96
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SHAPE: dict[str, Any] = {
    "num_hidden_layers": 2, "block_size": 4, "markov_rank": 8, "num_taps": 3, "mask_token_id": VOCAB - 1,
}  # fmt: skip


def llama(**changes: Any) -> PreTrainedModel:
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes})).eval()


def qwen3(**changes: Any) -> PreTrainedModel:
    torch.manual_seed(1)
    model = Qwen3ForCausalLM(Qwen3Config(**{**SIZES, **changes})).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            # Norm weights of one would hide a missing fold.
            parameter.data.uniform_(0.5, 1.5)
    return model


def drafter_for(target: PreTrainedModel, **changes: Any) -> DSparkDrafter:
    torch.manual_seed(2)
    return new_drafter(target, **{**SHAPE, **changes})


def write_answers(path: Path, count: int, *, seed: int = 0, shortest: int = 6, longest: int = 20) -> Path:
    draw = random.Random(seed)
    with path.open("w") as file:
        for _ in range(count):
            record = {
                "source": "tiny",
                "prompt_ids": [draw.randrange(3, VOCAB - 1) for _ in range(draw.randint(2, 6))],
                "answer_ids": [draw.randrange(3, VOCAB - 1) for _ in range(draw.randint(shortest, longest))],
                "temperature": 0.0,
            }
            file.write(json.dumps(record) + "\n")
    return path


def answers(folder: Path, count: int = 16, **how: Any) -> AnswerDataset:
    return read_answers([write_answers(folder / "answers.jsonl", count, **how)], max_length=64, vocab_size=VOCAB)


def trainer(
    folder: Path,
    drafter: DSparkDrafter,
    target: PreTrainedModel,
    data: Any,
    extra: dict[str, Any] | None = None,
    **changes: Any,
) -> DSparkTrainer:
    settings: dict[str, Any] = {
        "output_dir": str(folder), "use_cpu": True, "max_steps": 6, "per_device_train_batch_size": 4, "num_anchors": 6,
        "logging_steps": 2, "save_strategy": "no", "seed": 3, "disable_tqdm": True,
    }  # fmt: skip
    args = TrainingConfig(**{**settings, **changes})
    return DSparkTrainer(drafter, target=target, args=args, train_dataset=data, **(extra or {}))


def objective(trainer: DSparkTrainer, chunk_size: int | None) -> Objective:
    return replace(trainer.args.objective, chunk_size=chunk_size)
