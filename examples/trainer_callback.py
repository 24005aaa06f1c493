"""Stop a training when the accepted length on real prompts no longer rises: a callback of transformers' own kind.

    python examples/trainer_callback.py --out watched

`eval_tau` is measured by decoding the prompts with the drafter as it is; an evaluation leaves no trace in the run.
"""

from pathlib import Path

from models import load, parser
from transformers import TrainerCallback

from dspark.evaluation import chat_ids, sample_prompts
from dspark.training import DSparkTrainer, TrainingConfig, read_answers
from dspark.training.answers import write_answers
from dspark.training.prompts import AnswerSettings, Prompt


class StopWhenNoLonger(TrainerCallback):
    """End the run after `patience` evaluations without a better accepted length."""

    def __init__(self, patience: int, least: float) -> None:
        self.patience, self.least = patience, least
        self.best, self.without = 0.0, 0

    def on_evaluate(self, _args, state, control, metrics=None, **_kwargs):
        tau = (metrics or {}).get("eval_tau")
        if tau is None:
            return
        self.without = 0 if tau > self.best + self.least else self.without + 1
        self.best = max(self.best, tau)
        print(f"step {state.global_step}: accepted length {tau:.3f}, best {self.best:.3f}")
        control.should_training_stop = self.without >= self.patience


if __name__ == "__main__":
    options = parser(__doc__)
    for name, value in {"steps": 40, "every": 10, "prompts": 8, "patience": 2}.items():
        options.add_argument(f"--{name}", type=int, default=value)
    options.add_argument("--out", type=Path, default=Path("watched"))
    args = options.parse_args()
    model, tokenizer, drafter = load(args)
    asked = [Prompt("counting", i, f"Count from {i} to {i + 9}.") for i in range(args.prompts)]
    answers = args.out.with_name(f"{args.out.name}-answers.jsonl")
    write_answers(model, tokenizer, asked, answers, AnswerSettings(max_new_tokens=args.max_new_tokens))
    config = TrainingConfig(
        output_dir=str(args.out), max_steps=args.steps, eval_every=args.every, eval_new_tokens=args.max_new_tokens,
        num_anchors=16, per_device_train_batch_size=2, learning_rate=1e-4, use_cpu=True, save_strategy="no",
        report_to="none",
    )  # fmt: skip
    trainer = DSparkTrainer(
        drafter,
        target=model,
        args=config,
        train_dataset=read_answers([answers], max_length=512, vocab_size=len(tokenizer)),
        eval_prompts=[chat_ids(tokenizer, text)[0].tolist() for text in sample_prompts("gsm8k", 2)],
        callbacks=[StopWhenNoLonger(args.patience, least=0.01)],
    )
    trainer.train()
    print(f"stopped at step {trainer.state.global_step} of {args.steps}")
