"""The report as Markdown, from its JSON alone: what `report.md` holds and a model card embeds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .rows import Table, facts, tables

_ABOUT = {
    "Acceptance per draft position": (
        "Acceptance of a position given that all before it were accepted / over all rounds that verified it."
    ),
    "Reliability of the confidence": (
        "Survival (the running product of confidences) against the share of rounds that got that far; ECE over 20 "
        "bins. *Calibrated*: with the drafter's own temperatures, where it has them."
    ),
}


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
        *[(f"{sub} {section}", _section(section, group)) for section, group in tables(report).items()],
        (f"{sub} Taken with", table(("", "value"), facts(report).items(), texts=2)),
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


def _section(name: str, group: Sequence[Table]) -> list[str]:
    """What a section is about, then its tables under bold titles; nothing without tables."""
    lines = [_ABOUT[name], ""] if name in _ABOUT and group else []
    for number, each in enumerate(group):
        lines += [*([""] if number else []), f"**{each.title}**", "", *table(each.header, each.rows)]
    return lines


__all__ = ["report_markdown"]
