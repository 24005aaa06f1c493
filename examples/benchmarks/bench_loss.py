"""Chunked against plain training loss: equal values and gradients first, then peak memory and speed, side by side.

    python examples/benchmarks/bench_loss.py --vocab 49152 --width 576 --rows 4 --length 256 --anchors 64 --steps 5

Each form runs in a process of its own, so that its peak is its own; their steps (forward and backward) alternate. The
table's columns: MiB at the peak of a step above what was there before the first one; text tokens per second, from the
fastest step; both as multiples of the plain form. `--json FILE` writes the same figures with all step times.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dspark.objective import Objective
from dspark.training import new_drafter

FORMS = ("plain", "chunked")


def memory(device: str, kind: str) -> float:
    """MiB in use (`kind="VmRSS"`) or at the peak (`"VmHWM"`) of this process, or of the accelerator."""
    if device != "cpu":
        return (torch.cuda.max_memory_allocated() if kind == "VmHWM" else torch.cuda.memory_allocated()) / 2**20
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(kind)) / 1024


def step_of(args: argparse.Namespace, form: str):
    """A function that runs one step and gives the loss and the norm of each gradient."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=args.vocab, hidden_size=args.width, intermediate_size=args.width, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=True,
    )  # fmt: skip
    target = LlamaForCausalLM(config).eval().requires_grad_(False).to(args.device)
    shape = {"num_hidden_layers": 1, "markov_rank": args.rank, "init": "random", "mask_token_id": args.vocab - 1}
    drafter = new_drafter(target, **shape).to(args.device)
    drafter.share_with(target)
    drafter.objective = Objective(chunk_size=args.chunk if form == "chunked" else None)
    size, width = (args.rows, args.length), args.width
    anchors = torch.stack([torch.randperm(args.length - 1)[: args.anchors].sort().values for _ in range(args.rows)])
    batch = {
        "input_ids": torch.randint(args.vocab - 1, size), "loss_mask": torch.ones(size, dtype=torch.bool),
        "target_hidden_states": torch.randn(*size, drafter.config.context_width),
        "target_last_hidden_states": torch.randn(*size, width), "anchor_positions": anchors,
    }  # fmt: skip
    batch = {name: tensor.to(args.device) for name, tensor in batch.items()}

    def step() -> dict[str, float]:
        drafter.zero_grad()
        loss = drafter(**batch).loss
        loss.backward()
        norms = {name: float(p.grad.norm()) for name, p in drafter.named_parameters() if p.grad is not None}
        return {"loss": loss.item(), **norms}

    return step


def worker(pipe, args: argparse.Namespace, form: str) -> None:
    """Answer each "step" with what it gave and took, until the pipe says to stop."""
    torch.set_num_threads(args.threads)
    step, before = step_of(args, form), memory(args.device, "VmRSS")
    while pipe.recv():
        start = time.perf_counter()
        values = step()
        pipe.send((values, time.perf_counter() - start, memory(args.device, "VmHWM") - before))


def measure(args: argparse.Namespace) -> dict[str, dict]:
    """Figures of both forms; refuses to give any where values or gradients differ."""
    context = multiprocessing.get_context("spawn")
    pipes, workers = {}, []
    for form in FORMS:
        pipes[form], other = context.Pipe()
        workers.append(context.Process(target=worker, args=(other, args, form), daemon=True))
        workers[-1].start()
    found = {form: {"seconds": [], "peak_mib": 0.0} for form in FORMS}
    for _ in range(args.steps + 1):  # the first is a warm-up
        for form in FORMS:
            pipes[form].send(True)
            found[form]["values"], seconds, found[form]["peak_mib"] = pipes[form].recv()
            found[form]["seconds"].append(seconds)
        for name, value in found["plain"]["values"].items():
            ours = found["chunked"]["values"][name]
            if abs(ours - value) > 1e-3 * value + 1e-6:
                raise SystemExit(f"not equal, so not measured: {name} is {ours}, of the plain form {value}")
    for form in FORMS:
        pipes[form].send(False)
        found[form]["tokens_per_second"] = args.rows * args.length / min(found[form]["seconds"][1:])
    for process in workers:
        process.join()
    return found


def table(found: dict[str, dict]) -> str:
    lines = ["| loss | peak MiB | x plain | tokens/s | x plain |", "|---|---|---|---|---|"]
    plain = found["plain"]
    for form, row in found.items():
        peak, rate = row["peak_mib"], row["tokens_per_second"]
        ratios = peak / plain["peak_mib"], rate / plain["tokens_per_second"]
        lines.append(f"| {form} | {peak:.0f} | {ratios[0]:.2f} | {rate:.0f} | {ratios[1]:.2f} |")
    return "\n".join(lines)


def main(words: list[str] | None = None) -> dict[str, dict]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = {"vocab": 49152, "width": 576, "rank": 64, "rows": 4, "length": 256, "anchors": 64, "chunk": 256}
    for name, default in {**sizes, "steps": 5, "threads": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(words)
    found = measure(args)
    print(table(found))
    if args.json:
        args.json.write_text(json.dumps({"settings": vars(args), **found}, default=str, indent=1))
    return found


if __name__ == "__main__":
    main()
