"""What long work shows: a bar on a terminal, lines elsewhere, nothing on stdout.

Catches: bars in log files, a bar although transformers' switch is off, rates that count what an earlier run did.
"""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging

from dspark.training.callbacks import TrainingProgress, describe_logs
from dspark.training.progress import WorkProgress

from . import tiny


def console(*, terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=200)


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("dspark.training.progress.time.monotonic", lambda: now[0])
    return now


def test_lines_come_at_most_every_so_often_with_rate_and_time_left(clock) -> None:
    screen = console()
    with WorkProgress("Working", 50, unit="tokens", done=10, seconds=5, console=screen) as work:
        assert work.eta == "-"
        for _ in range(4):
            clock[0] += 2.0
            work.advance(5, "note")
        assert (work.rate, work.eta) == (2.5, "0:00:08")
    lines = screen.file.getvalue().splitlines()
    assert lines[0] == "Working  25/50  2.50 tokens/s  ETA 0:00:10  note"
    assert len(lines) == 2
    assert lines[-1].startswith("Working  30/50")


def test_bar_only_on_a_terminal_with_the_switch_on() -> None:
    def is_bar(**how) -> bool:
        return WorkProgress("Working", 5, unit="x", console=console(**how)).is_bar

    assert is_bar(terminal=True)
    assert not is_bar(terminal=False)
    logging.disable_progress_bar()
    try:
        assert not is_bar(terminal=True)
    finally:
        logging.enable_progress_bar()


def test_bar_shows_rate_and_text() -> None:
    screen = console(terminal=True)
    with WorkProgress("Working", 5, unit="tokens", console=screen) as work:
        work.advance(2, "note")
        work.say("a line above")
    shown = screen.file.getvalue()
    assert "a line above" in shown
    assert "note" in shown
    assert "2/5" in shown


def test_training_prints_a_line_per_log_to_stderr(tmp_path, capsys) -> None:
    target, data = tiny.llama(), tiny.answers(tmp_path)
    tiny.trainer(tmp_path, tiny.drafter_for(target), target, data, max_steps=4).train()
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = [line for line in captured.err.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines] == ["2/4", "4/4"]
    for figure in ("ETA", "loss", "ce_loss", "l1_loss", "confidence_loss", "tau", "accepted", "lr", "tokens/s"):
        assert figure in lines[0]


def test_training_bar_counts_steps(tmp_path) -> None:
    screen = console(terminal=True)
    progress, state = TrainingProgress(screen), TrainerState(max_steps=4, global_step=2, is_world_process_zero=True)
    how = (TrainingArguments(output_dir=str(tmp_path), use_cpu=True), state, TrainerControl())
    progress.on_train_begin(*how)
    progress.on_log(*how, logs={"loss": 1.5, "tau": 2.0})
    progress.on_step_end(*how)
    progress.on_log(*how, logs={"train_runtime": 3.0})
    progress.on_train_end(*how)
    assert "3/4" in screen.file.getvalue()
    assert "tau 2.000" in screen.file.getvalue()


def test_evaluation_logs_are_told_apart() -> None:
    estimates = {"eval_loss": 1.0, "eval_tau_estimate": 2.5, "eval_acceptance_1_estimate": 0.5}
    line = describe_logs({**estimates, "eval_tokens_per_second": 9.0})
    assert line == "eval_loss 1.0000  estimated tau 2.500  estimated accepted 0.50  9 tokens/s"
    decoded = {"eval_tau": 2.25, "eval_acceptance_1": 0.75, "eval_acceptance_2": 0.5}
    assert describe_logs(decoded) == "tau 2.250  accepted 0.75 0.50"
    assert "tau 2.250  accepted 0.75 0.50  estimated tau 2.500" in describe_logs({**estimates, **decoded})
