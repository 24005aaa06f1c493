"""Plots of a report, readable in black and white: line styles, markers and greys tell curves apart, figures beside.

matplotlib comes with the extra `eval`; it is imported here only, and without a display.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .rows import at_temperature, number, of_run, percent, sweeps, whole_runs

# One entry per curve, in turn: marker, line style, grey.
STYLES = (("o", "-", "0.0"), ("s", "--", "0.35"), ("^", ":", "0.0"), ("D", "-.", "0.5"), ("v", "-", "0.6"))
_WIDTH, _HEIGHT = 4.2, 3.2  # inches of a panel
_MOST_COLUMNS = 4
MISSING = "Plots need matplotlib: pip install 'dspark[eval]'. Everything else is written."


class PlotLibraryError(ImportError):
    """matplotlib is not installed."""


def write_plots(report: dict[str, Any], folder: str | Path) -> list[str]:
    """Plots of everything the report has.

    Args:
        report: As `build_report` made it, or as read back from its JSON.
        folder: Where the PNG files go.

    Returns:
        Names of the files: `acceptance.png`; `sweep.png` where there are several thresholds; one
        `reliability-....png` per drafter and temperature with recorded confidence.

    Raises:
        PlotLibraryError: matplotlib is not installed; the message says what to install.
    """
    new = subplots()
    written = []

    def save(name: str, draw: Callable[[Any], Any]) -> None:
        figure = draw(new)
        if figure is not None:
            figure.savefig(Path(folder) / name, dpi=130)
            written.append(name)

    save("acceptance.png", lambda new: _acceptance(report, new))
    save("sweep.png", lambda new: _sweep(report, new))
    for entry in report["reliability"]:
        name = f"{_slug(entry['drafter'])}-t{_slug(format(entry['temperature'], 'g'))}"
        save(f"reliability-{name}.png", lambda new, entry=entry: _reliability(entry, new))
    return written


def subplots() -> Callable[[int, int], tuple[Any, list[Any]]]:
    """A function of rows and columns that makes a figure and its panels, row by row.

    Raises:
        PlotLibraryError: matplotlib is not installed; the message says what to install.
    """
    try:
        figures = importlib.import_module("matplotlib.figure")
        canvas = importlib.import_module("matplotlib.backends.backend_agg")
    except ImportError as error:
        raise PlotLibraryError(MISSING) from error

    def new(rows: int, columns: int) -> tuple[Any, list[Any]]:
        figure = figures.Figure(figsize=(_WIDTH * columns, _HEIGHT * rows), layout="constrained")
        canvas.FigureCanvasAgg(figure)
        return figure, list(figure.subplots(rows, columns, squeeze=False).flat)

    return new


def _acceptance(report: dict[str, Any], new: Any) -> Any:
    """Conditional acceptance per draft position, one panel per temperature, one curve per drafter."""
    runs = [run for run in whole_runs(report) if run["all"]["positions"]]
    temperatures = list(dict.fromkeys(run["temperature"] for run in runs))
    if not runs:
        return None
    figure, panels = new(1, len(temperatures))
    for panel, temperature in zip(panels, temperatures, strict=True):
        shown = [run for run in runs if run["temperature"] == temperature]
        for i, run in enumerate(shown):
            rows = [row for row in run["all"]["positions"] if row["conditional"] is not None]
            x, y = [row["position"] for row in rows], [row["conditional"] for row in rows]
            label = f"{run['drafter']} (accepted length {number(run['all']['accepted_length'])})"
            _curve(panel, x, y, i, label=label, digits=2)
        panel.set(ylim=(0, 1.08), xlabel="draft position", title=f"all prompts, {at_temperature(temperature)}")
        panel.set_xlim(0.6, max(len(run["all"]["positions"]) for run in runs) + 0.4)
        panel.set_ylabel("accepted, given all before it")
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.legend(fontsize=7)
    return figure


def _sweep(report: dict[str, Any], new: Any) -> Any:
    """Accepted length, acceptance rate, verified drafts and speed-up over thresholds; a row per temperature."""
    groups = sweeps(report)
    if not groups:
        return None
    temperatures = list(dict.fromkeys(group[0]["temperature"] for group in groups))
    values: dict[str, Callable[[dict[str, Any]], float | None]] = {
        "accepted length": lambda f: f["accepted_length"],
        "acceptance rate": lambda f: f["acceptance_rate"],
        "verified drafts per round": lambda f: f["verified_per_round"],
        "x plain": lambda f: f["speed"] and f["speed"]["speedup"],
    }
    shown = [name for name, of in values.items() if any(of(run["all"]) is not None for g in groups for run in g)]
    figure, panels = new(len(temperatures), len(shown))
    for row, temperature in enumerate(temperatures):
        for column, name in enumerate(shown):
            panel = panels[row * len(shown) + column]
            for i, group in enumerate(g for g in groups if g[0]["temperature"] == temperature):
                points = [(run["threshold"], values[name](run["all"])) for run in group]
                kept = [(x, y) for x, y in points if y is not None]
                _curve(panel, [x for x, _ in kept], [y for _, y in kept], i, label=group[0]["drafter"], digits=2)
            panel.set(xlabel="confidence threshold", title=f"{name}, {at_temperature(temperature)}")
            panel.margins(y=0.2)
            panel.set(xlim=(-0.05, 1), ylim=(0, None))
            panel.legend(fontsize=7)
    return figure


def _reliability(entry: dict[str, Any], new: Any) -> Any:
    """Observed against predicted survival, one panel per position, raw and calibrated."""
    count = len(entry["raw"])
    if not count:
        return None
    columns = min(count, _MOST_COLUMNS)
    figure, panels = new(-(-count // columns), columns)
    for k, panel in enumerate(panels):
        if k >= count:
            panel.axis("off")
            continue
        kinds = [("raw", entry["raw"][k]), ("calibrated", (entry["calibrated"] or entry["raw"])[k])]
        panel.plot([0, 1], [0, 1], color="0.75", linewidth=1)
        for i, (kind, row) in enumerate(kinds[: 2 if entry["calibrated"] else 1]):
            marker, line, grey = STYLES[i]
            x, y = ([b[name] for b in row["bins"]] for name in ("predicted", "observed"))
            sizes = [6 + 90 * b["count"] / row["num_rounds"] for b in row["bins"]]
            label = f"{kind}: ECE {percent(row['ece'])}, AUC {number(row['auc'])}"
            panel.plot(x, y, line, color=grey, linewidth=1)
            panel.scatter(x, y, s=sizes, marker=marker, color=grey, facecolors="white" if i else grey, label=label)
        panel.set(xlim=(-0.04, 1.04), ylim=(-0.04, 1.3), xlabel="mean predicted survival", ylabel="observed")
        panel.set_yticks([0, 0.25, 0.5, 0.75, 1])
        panel.set_title(f"position {k + 1}, {entry['raw'][k]['num_rounds']} rounds", fontsize=9)
        panel.legend(fontsize=7, loc="upper left")
    figure.suptitle(of_run(entry), fontsize=10)
    return figure


def _curve(panel: Any, x: list[float], y: list[float], i: int, *, label: str, digits: int) -> None:
    """A curve with its values beside the points, above or below them in turn."""
    marker, line, grey = STYLES[i % len(STYLES)]
    panel.plot(x, y, linestyle=line, marker=marker, color=grey, markersize=4, linewidth=1.2, label=label)
    for a, b in zip(x, y, strict=True):
        offset = (0, 5) if i % 2 == 0 else (0, -11)
        panel.annotate(
            f"{b:.{digits}f}", (a, b), xytext=offset, textcoords="offset points", fontsize=6, ha="center", color=grey
        )


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-") or "drafter"


__all__ = ["MISSING", "STYLES", "PlotLibraryError", "subplots", "write_plots"]
