"""The `dspark` command. One file per sub-command."""

from __future__ import annotations

import typer

from .bench import app as bench
from .calibrate import calibrate
from .card import card
from .convert import convert
from .data import data
from .demo import demo
from .doctor import doctor
from .eval import evaluate_command
from .generate import generate
from .inspect import inspect
from .profile import profile
from .push import push
from .trace import trace
from .train import train

app = typer.Typer(
    name="dspark",
    help="Lossless speculative decoding with DSpark drafters on Hugging Face models.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
)
for command in (demo, generate, inspect, convert, doctor, data, train, calibrate, profile, card, push, trace):
    app.command()(command)

app.command("eval")(evaluate_command)
app.add_typer(bench, name="bench")


def main() -> None:
    """Entry point of the `dspark` script."""
    app()


__all__ = ["app", "main"]
