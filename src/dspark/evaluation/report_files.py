"""The files of a report beside `rounds.jsonl`: `report.json`, `report.md` and the plots."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .markdown import report_markdown
from .plots import PlotLibraryError, write_plots

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
    text = json.dumps(report, indent=1, ensure_ascii=False) + "\n"
    (folder / REPORT_FILE).write_text(text, encoding="utf-8")
    (folder / MARKDOWN_FILE).write_text(report_markdown(report), encoding="utf-8")
    return problem


__all__ = ["MARKDOWN_FILE", "REPORT_FILE", "write_report"]
