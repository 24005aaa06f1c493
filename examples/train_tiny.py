"""Train a small drafter from nothing: answers of the target, a new drafter, a few steps, what it accepts.

    python examples/train_tiny.py --out tiny-drafter

Minutes on a CPU; the acceptance of so few steps is low. `dspark data` and `dspark train` are the same as commands,
with checkpoints, stored features and evaluation on the way.
"""

from pathlib import Path

from models import load, parser

from dspark import DSparkDrafter
from dspark.evaluation import chat_ids
from dspark.training import DSparkTrainer, TrainingConfig, new_drafter, read_answers, save_drafter
from dspark.training.answers import write_answers
from dspark.training.prompts import AnswerSettings, Prompt

if __name__ == "__main__":
    options = parser(__doc__)
    for name, value in {"layers": 1, "block-size": 4, "rank": 16, "steps": 30, "prompts": 16}.items():
        options.add_argument(f"--{name}", type=int, default=value)
    options.add_argument("--out", type=Path, default=Path("tiny-drafter"))
    args = options.parse_args()
    model, tokenizer, _ = load(args)

    # 1. The target answers: a drafter learns its target's law, so its text is the target's own.
    asked = [Prompt("counting", i, f"Count from {i} to {i + 9}.") for i in range(args.prompts)]
    answers = args.out.with_name(f"{args.out.name}-answers.jsonl")
    write_answers(model, tokenizer, asked, answers, AnswerSettings(max_new_tokens=args.max_new_tokens))
    data = read_answers([answers], max_length=512, vocab_size=len(tokenizer))

    # 2. A new drafter starts from the target's last layers and borrows its embedding and head.
    drafter = new_drafter(
        model, num_hidden_layers=args.layers, block_size=args.block_size, markov_rank=args.rank, tokenizer=tokenizer
    )

    # 3. transformers' Trainer does the rest; the target runs beside and is not changed.
    config = TrainingConfig(
        output_dir=f"{args.out}-run", max_steps=args.steps, num_anchors=16, per_device_train_batch_size=2,
        use_cpu=True, save_strategy="no", report_to="none",
    )  # fmt: skip
    DSparkTrainer(drafter, target=model, args=config, train_dataset=data).train()
    save_drafter(drafter, args.out, {"how": "examples/train_tiny.py"})

    trained = DSparkDrafter.from_pretrained(args.out).eval()
    ids = chat_ids(tokenizer, "Count from 40 to 49.")
    model.generate(ids, assistant_model=trained, do_sample=False, max_new_tokens=args.max_new_tokens)
    print(f"accepted length after {args.steps} steps: {trained.last_stats.mean_acceptance_length:.2f}")
