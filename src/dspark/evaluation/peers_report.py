"""The report of `dspark bench peers`: figures, tables and a plot of each way's speed over plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from .peers import PeerCell
from .plots import STYLES, subplots
from .report_files import write_benchmark
from .rows import NONE, Table, number

DIFFERS, FAILS = "differs", "fails"


def peers_report(cells: Sequence[PeerCell], about: dict[str, Any]) -> dict[str, Any]:
    """JSON-able report.

    Args:
        cells: Of one run; of each set the first is plain decoding.
        about: What it was taken with.
    """
    plain: dict[str, PeerCell] = {}
    for cell in cells:
        plain.setdefault(cell.prompt_set, cell)
    return {
        "what": "dspark bench peers",
        "about": about,
        "cells": [_entry(cell, cell.ratios(plain[cell.prompt_set])) for cell in cells],
    }


def _entry(cell: PeerCell, ratios: list[float]) -> dict[str, Any]:
    return {
        "set": cell.prompt_set, "way": cell.way, "prompts": cell.num_prompts, "new_tokens": cell.new_tokens,
        "outputs": FAILS if cell.failure else DIFFERS if cell.differing else "equal", "failure": cell.failure,
        "differing": [{"prompt": index, "new_token": place} for index, place in cell.differing],
        "over_plain": median(ratios) if ratios else None, "ratios": ratios,
        "tokens_per_second": cell.tokens_per_second, "tokens_per_pass": cell.tokens_per_pass,
        "seconds": cell.seconds if cell.is_equal else [],
    }  # fmt: skip


def peers_tables(report: dict[str, Any]) -> list[Table]:
    """Speed over plain, tokens per second and tokens per pass of the target, ways by prompt sets."""
    sets, ways = (list(dict.fromkeys(cell[name] for cell in report["cells"])) for name in ("set", "way"))
    found = {(cell["way"], cell["set"]): cell for cell in report["cells"]}

    def of(title: str, shown: Callable[[dict[str, Any]], str]) -> Table:
        return Table(title, ("way", *sets), [[way, *(shown(found[way, name]) for name in sets)] for way in ways])

    return [
        of("Speed over plain generate: median of paired runs (least, most)", _over_plain),
        of("Tokens per second", lambda cell: number(cell["tokens_per_second"], 1)),
        of("New tokens per pass of the target", lambda cell: number(cell["tokens_per_pass"])),
    ]


def _over_plain(cell: dict[str, Any]) -> str:
    if cell["outputs"] != "equal":
        return str(cell["outputs"])
    if not cell["ratios"]:
        return NONE
    return f"{cell['over_plain']:.2f} ({min(cell['ratios']):.2f}, {max(cell['ratios']):.2f})"


def peers_notes(report: dict[str, Any]) -> list[str]:
    """What is wrong with the ways that have no speed."""
    lines = []
    for cell in report["cells"]:
        if cell["failure"]:
            lines.append(f"{cell['set']}, {cell['way']}: fails ({cell['failure']}).")
        elif cell["differing"]:
            first = cell["differing"][0]
            prompts = len({entry["prompt"] for entry in cell["differing"]})
            lines.append(
                f"{cell['set']}, {cell['way']}: differs from plain generate in {prompts} of {cell['prompts']} "
                f"prompts; prompt {first['prompt'] + 1} at new token {first['new_token'] + 1}."
            )
    return lines


def write_peers(report: dict[str, Any], folder: Path) -> str | None:
    """`peers.json`, `peers.md` and the plot; returns why there is no plot, or None."""
    return write_benchmark(
        folder, "peers", report, title="Ways to decode the same text", lines=peers_notes(report),
        tables=peers_tables(report), draw=lambda path: draw_peers(report, path), plot_of="speed over plain generate",
    )  # fmt: skip


def draw_peers(report: dict[str, Any], path: Path) -> None:
    """A panel per set: each way's median with its value, a line from the least to the most of its paired runs.

    Raises:
        PlotLibraryError: matplotlib is not installed.
    """
    sets = list(dict.fromkeys(cell["set"] for cell in report["cells"]))
    columns = min(len(sets), 2)
    figure, panels = subplots()(-(-len(sets) // columns), columns)
    for panel in panels[len(sets) :]:
        panel.axis("off")
    for panel, name in zip(panels, sets, strict=False):
        cells = [cell for cell in report["cells"] if cell["set"] == name]
        most = max([1.0, *(ratio for cell in cells for ratio in cell["ratios"])])
        panel.axvline(1, color="0.75", linewidth=1)
        for place, cell in enumerate(cells):
            _draw_way(panel, place, cell)
        panel.set_yticks(range(len(cells)), [cell["way"] for cell in cells], fontsize=7)
        panel.set(xlim=(0, 1.15 * most), ylim=(len(cells) - 0.4, -0.6), xlabel="speed over plain generate", title=name)
    figure.savefig(path, dpi=130)


def _draw_way(panel: Any, place: int, cell: dict[str, Any]) -> None:
    marker, _, grey = STYLES[place % len(STYLES)]
    if not cell["ratios"]:
        panel.annotate(str(cell["outputs"]), (0.02, place), fontsize=7, va="center")
        return
    x = cell["over_plain"]
    panel.plot([min(cell["ratios"]), max(cell["ratios"])], [place, place], color=grey, linewidth=1.2)
    filled = grey if place < len(STYLES) else "white"
    panel.plot([x], [place], marker=marker, color=grey, markerfacecolor=filled, markersize=5)
    panel.annotate(f"{x:.2f}", (x, place), xytext=(0, 5), textcoords="offset points", fontsize=7, ha="center")


__all__ = ["DIFFERS", "FAILS", "draw_peers", "peers_notes", "peers_report", "peers_tables", "write_peers"]
