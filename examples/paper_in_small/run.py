"""The paper in small: DSpark against its parts, at the scale of one machine, in one command that resumes.

    python examples/paper_in_small/run.py --target path/or/id --features features/ --out study/

Every variant starts from the target's last layers and is trained on the same data, in the same order, for the same
number of steps; its real accepted length on held-out prompts comes from replaying its rounds on texts the target wrote
once. Stop and start again at will: finished variants are kept, unfinished ones go on from their checkpoint.
`report.md` then says which of the paper's claims hold here, beside the figures they are judged by.
"""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from report import write_report
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.trainer_utils import get_last_checkpoint

from dspark import DSparkDrafter, optimize_for_cpu
from dspark.evaluation import chat_ids, gather_prompts
from dspark.evaluation.replay import WrittenText, replay, write_text
from dspark.stats import SpeculationStats
from dspark.training import (
    Bigrams,
    DrafterShape,
    DSparkTrainer,
    FeatureDataset,
    TrainingConfig,
    draft_vocab_from_counts,
    new_drafter,
)

THRESHOLDS = (0.0, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def variants(base: DrafterShape) -> dict[str, DrafterShape]:
    """Name to shape; `none` is rank 0, that is DFlash, `zero` the vanilla head without its start from counts."""
    heads = {"none": {"markov_rank": 0}, "vanilla": {}, "gated": {"markov_head_type": "gated"},
             "rnn": {"markov_head_type": "rnn"}}  # fmt: skip
    heads["zero"] = heads["vanilla"]
    cells = [(head, 3, 7) for head in heads]
    cells += [(head, depth, 7) for depth in (1, 2, 5) for head in ("vanilla", "none")]
    cells += [(head, 3, block) for block in (4, 16) for head in ("vanilla", "none")]
    return {
        f"{head}-{depth}layers-block{block}": replace(base, num_hidden_layers=depth, block_size=block, **heads[head])
        for head, depth, block in cells
    }


def train(
    target, shape: DrafterShape, data: FeatureDataset, folder: Path, args: argparse.Namespace, *, counts: bool
) -> DSparkDrafter:
    """A trained drafter of `shape`; goes on from the folder's last checkpoint."""
    last = get_last_checkpoint(str(folder)) if folder.is_dir() else None
    if last is not None and int(last.rpartition("-")[2]) >= args.steps:
        return DSparkDrafter.from_pretrained(last, dtype=torch.float32).to(args.device).eval()
    torch.manual_seed(args.seed)
    drafter = new_drafter(target, shape, bigrams=Bigrams.of(data) if counts else None)
    config = TrainingConfig(
        output_dir=str(folder), max_steps=args.steps, per_device_train_batch_size=args.batch_size, seed=args.seed,
        num_anchors=args.anchors, learning_rate=args.lr, save_steps=args.save_every, save_total_limit=1,
        report_to="none", use_cpu=args.device == "cpu",
    )  # fmt: skip
    trainer = DSparkTrainer(drafter, target=target, args=config, train_dataset=data)
    trainer.train(resume_from_checkpoint=last)
    return drafter.eval()


def written_texts(target, tokenizer, layers: list[int], args: argparse.Namespace) -> dict[str, list[WrittenText]]:
    """The target's greedy answers to held-out prompts, per set, written once and kept beside the results."""
    path = args.out / "texts.pt"
    settings = {"layers": layers, "prompts": args.prompts, "tokens": args.max_new_tokens}
    if path.exists():
        kept = torch.load(path, weights_only=True)
        if kept["settings"] == settings:
            return {name: [WrittenText(**text) for text in texts] for name, texts in kept["texts"].items()}
    found: dict[str, list[WrittenText]] = {}
    with optimize_for_cpu(target) if args.device == "cpu" else nullcontext():
        for name, prompts in gather_prompts([], args.prompt_file, limit=args.prompts).items():
            ids = [chat_ids(tokenizer, prompt).to(args.device) for prompt in prompts]
            found[name] = [write_text(target, i, layers, max_new_tokens=args.max_new_tokens) for i in ids]
    plain = {name: [vars(text) for text in texts] for name, texts in found.items()}
    torch.save({"settings": settings, "texts": plain}, path)
    return found


def measure(drafter, texts: dict[str, list[WrittenText]], target, thresholds: tuple[float, ...]) -> dict:
    """Accepted lengths, conditional acceptance, scored rounds: per set, and per threshold over all sets."""
    with optimize_for_cpu(drafter) if drafter.device.type == "cpu" else nullcontext():
        return replayed(drafter, texts, target, thresholds)


def replayed(drafter, texts: dict[str, list[WrittenText]], target, thresholds: tuple[float, ...]) -> dict:
    found: dict = {"sets": {}, "sweep": []}
    for name, some in texts.items():
        stats = SpeculationStats()
        for text in some:
            stats = stats.merge(replay(drafter, text, target))
        found["sets"][name] = {
            "accepted_length": stats.mean_acceptance_length,
            "rounds": [list(r) for r in stats.scored_rounds()], "verified": stats.verified, "accepted": stats.accepted,
        }  # fmt: skip
    for threshold in thresholds:
        stats = SpeculationStats()
        for some in texts.values():
            for text in some:
                stats = stats.merge(replay(drafter, text, target, threshold=threshold))
        found["sweep"].append(
            {
                "threshold": threshold,
                "accepted_length": stats.mean_acceptance_length,
                "acceptance_rate": stats.draft_acceptance_rate,
                "verified_per_round": sum(stats.verified) / stats.num_rounds,
            }
        )
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--gguf-file")
    parser.add_argument(
        "--features", type=Path, required=True, help="folder written by `dspark train --features-only`"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", help="names of variants; default: all")
    parser.add_argument("--prompt-file", nargs="*", default=[], help="held-out prompts; default: the shipped sets")
    parser.add_argument("--prompts", type=int, default=4, help="held-out prompts per set")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name, value in (("steps", 300), ("batch-size", 4), ("anchors", 48), ("rank", 64), ("draft-vocab-size", 8192),
                        ("max-new-tokens", 128), ("save-every", 100), ("seed", 0)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--lr", type=float, default=1e-3)
    return parser.parse_args()


def main() -> None:
    args = parse()
    args.out.mkdir(parents=True, exist_ok=True)
    extra = {"gguf_file": args.gguf_file} if args.gguf_file else {}
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32, **extra).eval().to(args.device)
    tokenizer = AutoTokenizer.from_pretrained(args.target, **extra)
    data = FeatureDataset(args.features, verify=False)
    rows = target.get_input_embeddings().weight.shape[0]
    size = min(args.draft_vocab_size, rows)
    always = {i for i in tokenizer.all_special_ids if i < rows}
    vocabulary = draft_vocab_from_counts(data.answer_token_counts(rows), size, always) if size < rows else None
    mask = new_drafter(target, tokenizer=tokenizer, num_hidden_layers=1).config.mask_token_id
    base = DrafterShape(
        markov_rank=args.rank, draft_vocab=vocabulary, mask_token_id=mask, target_layer_ids=data.target_layer_ids
    )
    texts = written_texts(target, tokenizer, data.target_layer_ids, args)
    (args.out / "settings.json").write_text(json.dumps({k: str(v) for k, v in vars(args).items()}, indent=1))
    for name, shape in variants(base).items():
        path = args.out / f"{name}.json"
        if path.exists() or (args.only and name not in args.only):
            continue
        print(f"== {name}", flush=True)
        counts = not name.startswith("zero")
        drafter = train(target, shape, data, args.out / "checkpoints" / name, args, counts=counts)
        thresholds = THRESHOLDS if name == "vanilla-3layers-block7" else ()
        found = measure(drafter, texts, target, thresholds)
        found["parameters"] = sum(p.numel() for p in drafter.parameters())
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(found))
        temporary.rename(path)
        write_report(args.out)
    write_report(args.out)


if __name__ == "__main__":
    main()
