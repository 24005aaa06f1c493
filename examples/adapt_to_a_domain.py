"""Adapt a drafter to one domain, and measure whether that was worth it.

    python examples/adapt_to_a_domain.py                # a made-up domain, target and drafter of `dspark demo`
    python examples/adapt_to_a_domain.py --data answers.jsonl --held-out mine.jsonl --other gsm8k chat.jsonl

A LoRA adapter and, as a control, all weights are trained from the same drafter for the same steps on answers of the
target in the domain (`dspark data` writes them). Then the untouched drafter and both results decode held-out prompts
of the domain and of others. Adapting may gain nothing, or cost elsewhere: the table says what it did.
"""

import argparse
import json
import random
from pathlib import Path
from statistics import mean, variance

import torch

from dspark import DSparkDrafter, optimize_for_cpu
from dspark.cli.common import demo_drafter, demo_target
from dspark.cli.loading import load_target
from dspark.evaluation import SETS, chat_ids, read_prompts, sample_prompts
from dspark.training import AdapterShape, DSparkTrainer, FeatureDataset, TrainingConfig, adapt, read_answers
from dspark.training.answers import write_answers
from dspark.training.prompts import AnswerSettings, Prompt

OPTIONS = {
    "target": "", "gguf-file": "", "drafter": "", "data": "", "features": "", "out": "adapted", "prompts": 8,
    "max-new-tokens": 96, "steps": 60, "anchors": 48, "rank": 64, "lr": 1e-3, "full-lr": 2e-4, "threads": 2,
}  # fmt: skip


def made_up(count: int) -> list[str]:
    draw, units = random.Random(0), ("kilometres to miles", "pounds to kilograms", "Celsius to Fahrenheit")
    return [f"Convert {number} {draw.choice(units)}. Show your steps." for number in draw.sample(range(999), count)]


def answers(args, target, tokenizer, texts: list[str]) -> str:
    asked, path = [Prompt("made-up", i, text) for i, text in enumerate(texts)], f"{args.out}/answers.jsonl"
    write_answers(target, tokenizer, asked, Path(path), AnswerSettings(max_new_tokens=args.max_new_tokens))
    return path


def train(args, name: str, target, data) -> DSparkDrafter:
    if any(Path(args.out, name).glob("*.safetensors")):  # of a run that was interrupted later
        print(f"{name}: found in {args.out}, not trained again")
        return DSparkDrafter.from_pretrained(f"{args.out}/{name}", dtype=torch.float32)
    torch.manual_seed(0)
    drafter = DSparkDrafter.from_pretrained(args.drafter, dtype=torch.float32)
    model = adapt(drafter, AdapterShape("lora", args.rank)) if name == "lora" else drafter
    config = TrainingConfig(
        output_dir=f"{args.out}/{name}", max_steps=args.steps, num_anchors=args.anchors, per_device_train_batch_size=4,
        learning_rate=args.lr if name == "lora" else args.full_lr, use_cpu=True, save_strategy="no", report_to="none",
    )  # fmt: skip
    DSparkTrainer(model, target=target, args=config, train_dataset=data).train()
    drafter.save_pretrained(config.output_dir)
    return DSparkDrafter.from_pretrained(config.output_dir, dtype=torch.float32)  # as anyone would load it


def decode(target, tokenizer, drafters: dict, prompts: list[str], **how) -> dict[str, list[int]]:
    """Tokens of every round of real decoding, per drafter; the text must be the plain one."""
    rounds: dict[str, list[int]] = {name: [] for name in drafters}
    for ids in (chat_ids(tokenizer, prompt) for prompt in prompts):
        plain = target.generate(ids, **how)
        for name, drafter in drafters.items():
            if not torch.equal(target.generate(ids, assistant_model=drafter, **how), plain):
                raise SystemExit("The text is not that of plain decoding: no figure of this run means anything.")
            rounds[name] += [accepted + 1 for accepted in drafter.last_stats.accepted]
    return rounds


def verdict(before: list[int], after: list[int]) -> str:
    if after is before:
        return "as it was"
    change, error = mean(after) - mean(before), sum(variance(r) / len(r) for r in (before, after)) ** 0.5
    word = "no change beyond chance" if abs(change) <= 2 * error else "a gain" if change > 0 else "A LOSS"
    return f"{word}: {change:+.3f} (standard error {error:.3f})"


if __name__ == "__main__":
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in OPTIONS.items():
        parse.add_argument(f"--{name}", type=type(value), default=value)
    for name in ("held-out", "other"):
        parse.add_argument(f"--{name}", nargs="+", default=[], help=f"prompt files, or of {', '.join(SETS)}")
    args = parse.parse_args()
    torch.set_num_threads(args.threads)
    source = (args.target, args.gguf_file or None) if args.target else demo_target()
    target, tokenizer = load_target(*source, torch.float32)
    args.drafter, texts = args.drafter or demo_drafter(), made_up(96 + args.prompts)
    with optimize_for_cpu(target):
        file = args.data or args.features or answers(args, target, tokenizer, texts[args.prompts :])
    data = FeatureDataset(file) if args.features else read_answers([file], max_length=1024, vocab_size=len(tokenizer))
    drafters = {"untouched": DSparkDrafter.from_pretrained(args.drafter, dtype=torch.float32)}
    drafters |= {name: train(args, name, target, data) for name in ("lora", "full")}
    report, greedy = {}, {"do_sample": False, "max_new_tokens": args.max_new_tokens}
    for place, names in (("domain", args.held_out), ("elsewhere", args.other or SETS)):
        prompts = [text for n in names for text in (sample_prompts if n in SETS else read_prompts)(n, args.prompts)]
        with optimize_for_cpu(target):
            found = decode(target, tokenizer, drafters, prompts or texts[: args.prompts], **greedy)
        for name, rounds in found.items():
            report[f"{name} {place}"] = [mean(rounds), verdict(found["untouched"], rounds)]
            print(f"{place:10} {name:10} %.3f tokens a round, %s" % tuple(report[f"{name} {place}"]))
    Path(args.out, "report.json").write_text(json.dumps(report, indent=1))
