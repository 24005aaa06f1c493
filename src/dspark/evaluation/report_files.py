"""Files of reports: an evaluation's beside its `rounds.jsonl`; a benchmark's figures, page and plot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ..files import write_atomically, write_json
from .markdown import report_markdown, table
from .plots import PlotLibraryError, write_plots
from .rows import Table

REPORT_FILE, MARKDOWN_FILE = "report.json", "report.md"


def write_report(report: dict[str, Any], folder: str | Path) -> str | None:
    """Write a report into `folder`; puts the names of its plots into `report["plots"]`.

    Returns:
        Why there are no plots (matplotlib is not installed), or None.
    """
    folder, problem = Path(folder), None
    folder.mkdir(parents=True, exist_ok=True)
    try:
        report["plots"] = write_plots(report, folder)
    except PlotLibraryError as error:
        problem, report["plots"] = str(error), []
    write_json(folder / REPORT_FILE, report)
    (folder / MARKDOWN_FILE).write_text(report_markdown(report), encoding="utf-8")
    return problem


def write_benchmark(  # noqa: PLR0913 - what a page is made of
    folder: Path,
    name: str,
    report: dict[str, Any],
    *,
    title: str,
    lines: Sequence[str],
    tables: Iterable[Table],
    draw: Callable[[Path], None],
    plot_of: str,
) -> str | None:
    """Write `name.json`, `name.md` and `name.png` into `folder`.

    Args:
        folder: Made if it is not there.
        name: Stem of the files.
        report: Figures; what is under `about` also goes on the page.
        title: Of the page.
        lines: What is to be said before the tables.
        tables: Of the page.
        draw: Draws the plot into a file.
        plot_of: What it shows.

    Returns:
        Why there is no plot (matplotlib is not installed), or None.
    """
    folder.mkdir(parents=True, exist_ok=True)
    problem = None
    try:
        draw(folder / f"{name}.png")
    except PlotLibraryError as error:
        problem = str(error)
    page = [f"# {title}", "", *(f"- {key}: {_plain(value)}" for key, value in report["about"].items()), ""]
    page += [f"- {line}" for line in lines]
    for each in tables:
        page += ["", f"**{each.title}**", "", *table(each.header, each.rows)]
    page += ["", f"![{plot_of}]({name}.png)"] if problem is None else []
    write_json(folder / f"{name}.json", report)
    write_atomically(folder / f"{name}.md", lambda path: path.write_text("\n".join(page) + "\n", encoding="utf-8"))
    return problem


def _plain(value: Any) -> str:
    return ", ".join(f"{key} {each}" for key, each in value.items()) if isinstance(value, dict) else str(value)


__all__ = ["MARKDOWN_FILE", "REPORT_FILE", "write_benchmark", "write_report"]
