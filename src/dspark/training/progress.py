"""How long work shows itself: a rich bar on a terminal, plain lines elsewhere (logs, pipes, CI).

Everything goes to stderr, so that a command's result on stdout stays clean. The bar follows transformers' switch
(`transformers.utils.logging.disable_progress_bar()`).
"""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers.utils import logging


class WorkProgress:
    """Progress of one piece of work, as a context manager.

    Args:
        title: What is being done.
        total: Units of the whole.
        unit: Name of a unit, for rates (`"tokens"`).
        done: Units finished earlier; they do not count in the rate.
        seconds: On plain output, at most one line per this many seconds.
        console: Where to write; None: stderr.
        bar: Draw a bar where the console is a terminal.
    """

    def __init__(
        self,
        title: str,
        total: int,
        *,
        unit: str,
        done: int = 0,
        seconds: float = 10.0,
        console: Console | None = None,
        bar: bool = True,
    ) -> None:
        self.title, self.total, self.unit, self.done = title, total, unit, done
        self.console = console or Console(stderr=True)
        self._first = done
        self._seconds = seconds
        self._started = self._spoken = time.monotonic()
        self._bar: Progress | None = None
        if bar and self.console.is_terminal and logging.is_progress_bar_enabled():
            self._bar = Progress(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                TextColumn("{task.fields[text]}"), console=self.console,
            )  # fmt: skip

    def __enter__(self) -> WorkProgress:
        self._started = self._spoken = time.monotonic()
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task(self.title, total=self.total, completed=self.done, text="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if kind is None and self._bar is None and self.done > self._first:
            self._line("")

    def close(self) -> None:
        """Take the bar away; lines stay."""
        if self._bar is not None:
            self._bar.stop()

    @property
    def is_bar(self) -> bool:
        """Whether a bar is drawn (else plain lines are printed)."""
        return self._bar is not None

    @property
    def seconds(self) -> float:
        """Time since the start."""
        return time.monotonic() - self._started

    @property
    def rate(self) -> float:
        """Units per second since the start."""
        return (self.done - self._first) / max(self.seconds, 1e-9)

    @property
    def eta(self) -> str:
        """Time left at the present rate, as `h:mm:ss`; `-` while unknown."""
        if self.done <= self._first:
            return "-"
        seconds = round((self.total - self.done) / self.rate)
        return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"

    def advance(self, amount: int, text: str = "") -> None:
        """Count `amount` units; `text` is shown behind the rate."""
        self.done += amount
        if self._bar is not None:
            shown = f"{self._shown_rate}  ETA {self.eta}  {text}"
            self._bar.update(self._task, completed=self.done, text=shown)
        elif time.monotonic() - self._spoken >= self._seconds:
            self._line(text)

    def say(self, text: str) -> None:
        """Print a line (above the bar, where there is one)."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    @property
    def _shown_rate(self) -> str:
        return f"{self.rate:,.{0 if self.rate >= 10 else 2}f} {self.unit}/s"

    def _line(self, text: str) -> None:
        self._spoken = time.monotonic()
        share = f"{self.done}/{self.total}"
        self.say(f"{self.title}  {share}  {self._shown_rate}  ETA {self.eta}  {text}".rstrip())


def plural(count: int, noun: str) -> str:
    """`1 record`, `2 records`, `1,200 records`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


__all__ = ["WorkProgress", "plural"]
