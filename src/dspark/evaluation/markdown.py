"""The report as Markdown, from its JSON alone: what `report.md` holds and a model card embeds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .rows import (
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

_ABOUT_RELIABILITY = (
    "Survival (the running product of confidences) against the share of rounds that got that far; ECE over 20 bins. "
    "*Calibrated*: with the drafter's own temperatures, where it has them."
)
_ABOUT_POSITIONS = (
    "Acceptance of a position given that all before it were accepted / over all rounds that verified it."
)


def report_markdown(report: dict[str, Any], *, heading_level: int = 1) -> str:
    """The whole report.

    Args:
        report: As `build_report` made it, or as read back from `report.json`.
        heading_level: Of its title; sections are one deeper.

    Returns:
        Markdown that ends with a line break.
    """
    head, sub = "#" * heading_level, "#" * (heading_level + 1)
    sections = [
        (f"{head} Evaluation", [_what(report), *[f"- {note}" for note in report["notes"]]]),
        (f"{sub} Per set", _per_set(report)),
        (f"{sub} Acceptance per draft position", _acceptance(report)),
        (f"{sub} Confidence threshold", _sweep(report)),
        (f"{sub} Reliability of the confidence", _reliability(report)),
        (f"{sub} Where a round's time goes", _time_split(report)),
        (f"{sub} Taken with", _taken_with(report)),
        (f"{sub} Plots", [f"![{name}]({name})" for name in report["plots"]]),
    ]
    return "\n".join("\n".join([title, "", *lines, ""]) for title, lines in sections if lines)


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, texts: int = 1) -> list[str]:
    """Lines of a Markdown table, its first `texts` columns aligned left, the rest right; none without rows."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    rule = "|" + "|".join([*["---"] * texts, *["---:"] * (len(header) - texts)]) + "|"
    return ["| " + " | ".join(header) + " |", rule, *lines] if lines else []


def _what(report: dict[str, Any]) -> str:
    configuration = report["configuration"]
    prompts = ", ".join(f"{name} {count}" for name, count in report["prompts"].items())
    drafters = ", ".join(f"`{name}`" for name in configuration["drafters"])
    return (
        f"{drafters} with `{configuration['target']['name']}`, {report['date']}; prompts: {prompts}; up to "
        f"{configuration['settings']['max_new_tokens']} new tokens each.\n"
    )


def _titled(groups: Iterable[tuple[str, list[str]]]) -> list[str]:
    """Groups of lines under bold titles, those without lines left out."""
    lines: list[str] = []
    for title, body in groups:
        if body:
            lines += [*([""] if lines else []), f"**{title}**", "", *body]
    return lines


def _per_set(report: dict[str, Any]) -> list[str]:
    return _titled((of_run(run), table(SET_COLUMNS, set_rows(run))) for run in runs_per_set(report))


def _acceptance(report: dict[str, Any]) -> list[str]:
    lines = _titled((of_run(run), table(position_columns(run), position_rows(run))) for run in whole_runs(report))
    return [_ABOUT_POSITIONS, "", *lines] if lines else []


def _sweep(report: dict[str, Any]) -> list[str]:
    return _titled(
        (
            f"{group[0]['drafter']}, {at_temperature(group[0]['temperature'])}",
            table(SWEEP_COLUMNS, map(sweep_cells, group)),
        )
        for group in sweeps(report)
    )


def _reliability(report: dict[str, Any]) -> list[str]:
    lines = _titled(
        (of_run(entry), table(RELIABILITY_COLUMNS, reliability_rows(entry))) for entry in report["reliability"]
    )
    return [_ABOUT_RELIABILITY, "", *lines] if lines else []


def _time_split(report: dict[str, Any]) -> list[str]:
    return _titled((of_run(run), table(SPLIT_COLUMNS, split_rows(run))) for run in whole_runs(report))


def _taken_with(report: dict[str, Any]) -> list[str]:
    return table(("", "value"), facts(report).items(), texts=2)


__all__ = ["report_markdown"]
