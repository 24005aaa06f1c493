"""A round behind long contexts, with and without `context_window`: its time, and the accepted length a window costs.

    python examples/benchmarks/bench_context.py --target path/or/id --drafter path/or/id --window 512 --window 2048

Every prompt is put behind so much text (the other prompts, over and over) that it ends at each context length. The
windows run in turns on the same prompt and their texts are compared. A line has milliseconds per round (median over
runs, of the context step, of the draft and of all), the slots of a context buffer, tau, and the tau lost to the
window. Without `--target` a small random pair runs on random ids, whose tau means nothing.
"""

from __future__ import annotations

import argparse
import json
from functools import reduce
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dspark import SpeculationConfig, SpeculationStats, optimize_for_cpu
from dspark.cli.loading import load_drafter, load_target
from dspark.evaluation import chat_ids, read_prompts, sample_prompts
from dspark.plain_decoding import plain_law
from dspark.training import new_drafter

STEPS = ("context", "draft")


def random_pair() -> tuple[Any, Any]:
    sizes = {"hidden_size": 192, "num_attention_heads": 3, "num_key_value_heads": 1, "num_hidden_layers": 4}
    target = LlamaForCausalLM(LlamaConfig(vocab_size=1000, intermediate_size=384, **sizes)).eval()
    return target, new_drafter(target, num_hidden_layers=2, markov_rank=16, init="random", mask_token_id=999).eval()


def token_prompts(args: argparse.Namespace, tokenizer: Any) -> list[list[int]]:
    """The prompts as token ids, random ones where there is no tokenizer."""
    if tokenizer is None:
        return torch.randint(999, (args.limit, 50)).tolist()
    texts = read_prompts(args.prompts, args.limit) if args.prompts else sample_prompts("gsm8k", args.limit)
    return [chat_ids(tokenizer, text)[0].tolist() for text in texts]


def behind_text(prompts: list[list[int]], index: int, length: int) -> torch.Tensor:
    """A prompt at the end of `length` tokens, int64 `[1, length]`."""
    own = prompts[index][-length:]
    others = [token for i, ids in enumerate(prompts) if i != index for token in ids] or own
    return torch.tensor([[*islice(cycle(others), length - len(own)), *own]])


class Watch:
    """Notes how many slots the drafter's context buffers have."""

    def __init__(self, drafter: Any) -> None:
        self.slots, draft = 0, drafter.draft_block

        def watched(anchor_ids: torch.Tensor, cache: Any, *more: Any) -> Any:
            block = draft(anchor_ids, cache, *more)
            self.slots = max(self.slots, cache.keys[0].shape[2])
            return block

        drafter.draft_block = watched


def figures(stats: list[SpeculationStats], slots: int) -> dict[str, float]:
    """Milliseconds per round and tau over runs."""
    total = reduce(SpeculationStats.merge, stats)
    times = {step: median(1e3 * s.step_seconds[step] / s.num_rounds for s in stats) for step in STEPS}
    times["round"] = median(1e3 * sum(s.step_seconds.values()) / s.num_rounds for s in stats)
    return {**times, "slots": slots, "tau": total.mean_acceptance_length}


def measure(
    args: argparse.Namespace, target: Any, drafter: Any, prompts: list[list[int]], length: int
) -> list[dict[str, Any]]:
    """A row per window at one context length."""
    windows, watch = [None, *args.window], Watch(drafter)
    stats: dict[Any, list[SpeculationStats]] = {window: [] for window in windows}
    slots, equal = dict.fromkeys(windows, 0), dict.fromkeys(windows, 0)
    for index in range(len(prompts)):
        ids = behind_text(prompts, index, length)
        for _ in range(args.repeats):
            texts = {}
            for window in windows:
                watch.slots = 0
                texts[window] = target.generate(
                    ids, attention_mask=torch.ones_like(ids), assistant_model=drafter, eos_token_id=None,
                    max_new_tokens=args.max_new_tokens, prefill_chunk_size=args.chunk,
                    speculation=SpeculationConfig(context_window=window), **plain_law(0.0),
                ).tolist()  # fmt: skip
                stats[window].append(drafter.last_stats)
                slots[window] = max(slots[window], watch.slots)
                equal[window] += texts[window] == texts[None]
    del drafter.draft_block
    found = [{"tokens": length, "window": w, "equal": equal[w], **figures(stats[w], slots[w])} for w in windows]
    return [{**row, "runs": len(stats[None]), "tau_lost": found[0]["tau"] - row["tau"]} for row in found]


def line(row: dict[str, Any]) -> str:
    window = "all" if row["window"] is None else row["window"]
    times = " | ".join(f"{row[name]:.2f}" for name in (*STEPS, "round"))
    taus = f"{row['tau']:.2f} | {row['tau_lost']:.2f}"
    return f"| {row['tokens']} | {window} | {times} | {row['slots']} | {taus} | {row['equal']} of {row['runs']} |"


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="folder or Hub id")
    parser.add_argument("--drafter", help="folder or Hub id")
    parser.add_argument("--gguf-file")
    parser.add_argument("--prompts", type=Path, help="JSON lines of prompts (default: a few of gsm8k)")
    parser.add_argument("--limit", type=int, default=4, help="prompts")
    parser.add_argument("--context", type=int, action="append", help="tokens, repeatable")
    parser.add_argument("--window", type=int, action="append", help="rows, repeatable")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--chunk", type=int, default=1024, help="tokens per pass over the prompt")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(words)
    if (args.target is None) != (args.drafter is None):
        parser.error("give --target and --drafter, or neither")
    args.context, args.window = args.context or [512, 2048, 8192, 32768], args.window or [512]
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    if args.target:
        target, tokenizer = load_target(args.target, args.gguf_file, torch.float32)
        drafter = load_drafter(args.drafter, torch.float32)
    else:
        (target, drafter), tokenizer = random_pair(), None
    rows: list[dict[str, Any]] = []
    print("| context | window | context ms | draft ms | round ms | slots | tau | tau lost | same text |")
    print("|---|---|---|---|---|---|---|---|---|")
    with optimize_for_cpu(target), optimize_for_cpu(drafter):
        prompts = token_prompts(args, tokenizer)
        for length in args.context:
            found = measure(args, target, drafter, prompts, length)
            print("\n".join(map(line, found)), flush=True)
            rows += found
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
