"""The report of `dspark eval` in the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..evaluation.rows import (
    RELIABILITY_COLUMNS,
    SET_COLUMNS,
    SPLIT_COLUMNS,
    SWEEP_COLUMNS,
    at_temperature,
    facts,
    of_run,
    position_columns,
    position_rows,
    reliability_rows,
    runs_per_set,
    set_rows,
    split_rows,
    sweep_cells,
    sweeps,
    whole_runs,
)


def print_report(report: dict[str, Any], console: Console) -> None:
    """All tables of a report, as its Markdown has them, what it was taken with first."""
    width = max(map(len, facts(report)))
    for name, value in facts(report).items():
        console.print(f"[bold]{escape(f'{name:<{width}}')}[/]  {escape(value)}", highlight=False, soft_wrap=True)
    for note in report["notes"]:
        console.print(note, style="dim", markup=False, highlight=False)
    for run in runs_per_set(report):
        _print(console, of_run(run), SET_COLUMNS, set_rows(run))
    for group in sweeps(report):
        title = f"thresholds, {group[0]['drafter']}, {at_temperature(group[0]['temperature'])}"
        _print(console, title, SWEEP_COLUMNS, map(sweep_cells, group))
    for run in whole_runs(report):
        _print(console, f"acceptance per draft position, {of_run(run)}", position_columns(run), position_rows(run))
    for entry in report["reliability"]:
        _print(console, f"survival, {of_run(entry)}", RELIABILITY_COLUMNS, reliability_rows(entry))
    for run in whole_runs(report):
        _print(console, f"where a round's time goes, {of_run(run)}", SPLIT_COLUMNS, split_rows(run))


def _print(console: Console, title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = Table(title=escape(title))
    for column, name in enumerate(header):
        table.add_column(name, justify="left" if column == 0 else "right")
    for row in rows:
        table.add_row(*map(escape, row))
    if table.row_count:
        console.print(table)


__all__ = ["print_report"]
