"""The report of `dspark eval` in the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape

from ..evaluation.rows import facts, tables
from .tables import print_table


def print_report(report: dict[str, Any], console: Console) -> None:
    """All tables of a report, as its Markdown has them, what it was taken with first."""
    width = max(map(len, facts(report)))
    for name, value in facts(report).items():
        console.print(f"[bold]{escape(f'{name:<{width}}')}[/]  {escape(value)}", highlight=False, soft_wrap=True)
    for note in report["notes"]:
        console.print(note, style="dim", markup=False, highlight=False)
    for section, group in tables(report).items():
        for each in group:
            print_table(console, f"{section}: {each.title}", each.header, each.rows)


__all__ = ["print_report"]
