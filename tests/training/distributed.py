"""Training in as many processes as this is started with; `test_distributed.py` compares what they end with.

Started as `python -m torch.distributed.run ... -m tests.training.distributed FOLDER`, or called in one process. Eleven
sequences in steps of eight: the last batches of an epoch are uneven, and one process has none of its own.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from dspark.objective import position_weights
from dspark.training.features import capture_features
from dspark.training.splits import hold_out

from . import tiny

PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [12, 13, 14]]


def text(folder: Path, world: int, rank: int):
    place = folder / f"text-{world}-{rank}"  # each process its own file
    place.mkdir(exist_ok=True)
    return tiny.answers(place, 14, shortest=2, longest=30)


def replicated(folder: Path, world: int, rank: int) -> None:
    """A `DSparkTrainer` run, with accumulation, heads first and evaluation."""
    split = hold_out(text(folder, world, rank), 3, seed=1)
    target = tiny.llama()
    run = tiny.trainer(
        folder / f"run-{world}", tiny.drafter_for(target), target, split.train,
        extra={"eval_dataset": split.held_out, "eval_prompts": PROMPTS}, max_steps=5, head_only_steps=1,
        per_device_train_batch_size=4 // world, per_device_eval_batch_size=2 // world, gradient_accumulation_steps=2,
        logging_steps=1, eval_every=2, eval_new_tokens=8, learning_rate=3e-3,
    )  # fmt: skip
    run.train()
    if run.is_world_process_zero():
        torch.save(run.drafter.state_dict(), folder / f"replicated-{world}.pt")
        (folder / f"logs-{world}.json").write_text(json.dumps(run.state.log_history))


def sharded(folder: Path, world: int, rank: int, chunk_size: int | None, *, checkpointed: bool) -> None:
    """A few steps with the drafter's weights sharded over the processes, each with its rows of the batch."""
    target, data = tiny.llama(), text(folder, world, rank)
    drafter = tiny.drafter_for(target)
    drafter.share_with(target)
    run = tiny.trainer(folder, drafter, target, data, use_cpu=True)
    drafter.objective = tiny.objective(run, chunk_size)
    if checkpointed:
        drafter.gradient_checkpointing_enable()
    if world > 1:
        for layer in drafter.layers:
            fully_shard(layer)
        fully_shard(drafter)
    optimizer = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], lr=3e-3)
    batch = run.data_collator([data[i] for i in range(4)])
    run._add_anchors(batch, 0, 0)
    states = capture_features(target, batch["input_ids"], drafter.config.target_layer_ids)
    batch.update(target_hidden_states=states.hidden, target_last_hidden_states=states.last)
    rows = {name: tensor[rank::world] for name, tensor in batch.items()}
    for _ in range(3):
        output = drafter.train()(**rows)
        weight = position_weights(output.supervised, drafter.objective.decay).sum()
        total = weight.clone()
        if world > 1:
            torch.distributed.all_reduce(total)
        (output.loss * weight / total * world).backward()  # gradients are averaged over processes
        optimizer.step()
        optimizer.zero_grad()
    state = {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in drafter.state_dict().items()
    }
    if rank == 0:
        torch.save(state, folder / f"sharded-{chunk_size}-{world}.pt")


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    replicated(folder, world, rank)
    sharded(folder, world, rank, None, checkpointed=False)
    sharded(folder, world, rank, 4, checkpointed=world > 1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    torch.distributed.destroy_process_group()
