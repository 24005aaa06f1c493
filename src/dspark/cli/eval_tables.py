"""The report of `dspark eval` in the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..evaluation.rows import facts, tables


def print_report(report: dict[str, Any], console: Console) -> None:
    """All tables of a report, as its Markdown has them, what it was taken with first."""
    width = max(map(len, facts(report)))
    for name, value in facts(report).items():
        console.print(f"[bold]{escape(f'{name:<{width}}')}[/]  {escape(value)}", highlight=False, soft_wrap=True)
    for note in report["notes"]:
        console.print(note, style="dim", markup=False, highlight=False)
    for section, group in tables(report).items():
        for each in group:
            table = Table(title=escape(f"{section}: {each.title}"))
            for column, name in enumerate(each.header):
                table.add_column(name, justify="left" if column == 0 else "right")
            for row in each.rows:
                table.add_row(*map(escape, row))
            console.print(table)


__all__ = ["print_report"]
