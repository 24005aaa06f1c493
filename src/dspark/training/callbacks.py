"""Progress of training: a bar with the loss terms, or a line at every log where there is no terminal."""

# ruff: noqa: ARG002 - transformers passes every callback method the same arguments

from __future__ import annotations

import re
from typing import Any

from rich.console import Console
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .progress import WorkProgress

_SHOWN = ("loss", "ce_loss", "l1_loss", "confidence_loss")


class TrainingProgress(TrainerCallback):
    """Shows steps, loss terms, tau, acceptance per position, tokens per second and time left.

    Args:
        console: Where to write; None: stderr.
        bar: Draw a bar where the console is a terminal.
    """

    def __init__(self, console: Console | None = None, *, bar: bool = True) -> None:
        self._console = console
        self._bar = bar
        self._work: WorkProgress | None = None
        self._text = ""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start counting (at the checkpoint's step when resumed)."""
        if state.is_world_process_zero:
            self._work = WorkProgress(
                "Training", state.max_steps, unit="steps", done=state.global_step, console=self._console, bar=self._bar
            )
            self._work.__enter__()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Count an optimizer step; the last one is logged, so that runs shorter than `logging_steps` show figures."""
        if state.global_step >= state.max_steps:
            control.should_log = True
        if self._work is not None and self._work.is_bar:
            self._work.advance(1, self._text)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Show the figures of the last steps."""
        if self._work is None or logs is None or not {"loss", "eval_loss", "eval_tau"} & set(logs):
            return
        self._text = describe_logs(logs)
        if not self._work.is_bar:
            self._work.done = state.global_step
            self._work.say(f"step {state.global_step}/{state.max_steps}  ETA {self._work.eta}  {self._text}")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Close the bar."""
        if self._work is not None:
            self._work.close()
            self._work = None


def describe_logs(logs: dict[str, float]) -> str:
    """One line of a log entry's figures."""
    prefix = "eval_" if {"eval_loss", "eval_tau"} & set(logs) else ""
    parts = [f"{prefix}{name} {logs[prefix + name]:.4f}" for name in _SHOWN if prefix + name in logs]
    for tail, label in (("", ""), ("_estimate", "estimated ")):
        if f"{prefix}tau{tail}" in logs:
            parts.append(f"{label}tau {logs[f'{prefix}tau{tail}']:.3f}")
        names = re.compile(rf"{prefix}acceptance_\d+{tail}")
        acceptance = [f"{value:.2f}" for name, value in logs.items() if names.fullmatch(name)]
        if acceptance:
            parts.append(f"{label}accepted {' '.join(acceptance)}")
    if "learning_rate" in logs:
        parts.append(f"lr {logs['learning_rate']:.2e}")
    if prefix + "tokens_per_second" in logs:
        parts.append(f"{logs[prefix + 'tokens_per_second']:,.0f} tokens/s")
    return "  ".join(parts)


__all__ = ["TrainingProgress", "describe_logs"]
