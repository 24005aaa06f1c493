"""The figures of one report as Markdown: what they were taken with, then tables; one that is not there is left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..evaluation.markdown import table
from ..evaluation.rows import NONE, number, percent, tables

_SHOWN = ("Per set", "Acceptance per draft position", "Confidence threshold", "Reliability of the confidence")
_ABOUT = {
    "Acceptance per draft position": (
        "Acceptance per draft position, given that all before it were accepted / over all rounds that verified it"
    ),
    "Reliability of the confidence": "Survival as the confidence predicts it against what happened",
}


def demo_section(report: dict[str, Any], _label: str) -> str:
    """Figures of a report of `dspark demo`."""
    settings, sets = report["settings"], report["sets"]
    prompts, equal = (sum(one[key] for one in sets) for key in ("prompts", "equal"))
    per_set = sorted({one["prompts"] for one in sets})
    threshold = settings["threshold"]
    parts = [
        f"first {' to '.join(map(str, per_set))} prompts of each set",
        "greedy" if not settings["do_sample"] else "sampled",
        f"{settings['max_new_tokens']} new tokens",
        f"{settings['dtype']}, {_threads(settings)}",
        *([f"confidence threshold {threshold:g}"] if threshold else []),
        *([report["machine"]] if report.get("machine") else []),
        _versions(report["versions"]),
    ]
    identity = f"ids equal plain `generate` on {'all ' if equal == prompts else f'{equal} of '}{prompts} prompts"
    rows = [
        [
            one["name"],
            number(one["mean_acceptance_length"]),
            number(one["speedup"]),
            number(one["speedup_over_stock"]),
        ]
        for one in sets
    ]
    columns = ("mean_acceptance_length", "speedup", "speedup_over_stock")
    rows.append(["mean", *[number(sum(one[key] for one in sets) / len(sets)) for key in columns]])
    lines = table(("set", "accepted length", "x plain, packed", "x plain, stock"), rows)
    host = f", host time {percent(_host_share(sets))} of a round"
    return _told(report, parts) + f"\n{identity[0].upper()}{identity[1:]}{host}.\n\n" + "\n".join(lines)


def _host_share(sets: Sequence[dict[str, Any]]) -> float:
    total = sum(sum(one["step_seconds"].values()) for one in sets)
    return sum(one["host_share"] * sum(one["step_seconds"].values()) for one in sets) / total


def eval_section(report: dict[str, Any], label: str) -> str:
    """Figures of a report of `dspark eval`, of the drafter `label` alone."""
    configuration = report["configuration"]
    settings, machine = configuration["settings"], configuration["machine"]
    own = {
        **report,
        "runs": [run for run in report["runs"] if run["drafter"] == label],
        "reliability": [entry for entry in report["reliability"] if entry["drafter"] == label],
    }
    parts = [
        "prompts: " + ", ".join(f"{name} {count}" for name, count in report["prompts"].items()),
        f"up to {settings['max_new_tokens']} new tokens",
        f"target {configuration['target']['name']}",
        f"{machine['device_name']}, {machine['dtype']}" + (", packed linears" if machine["packed"] else ""),
        *([_threads(machine)] if machine["device"] == "cpu" else []),
        _versions(configuration["versions"]),
    ]
    lines = [_told(report, parts), *[f"- {note}" for note in report["notes"]], ""]
    found = tables(own)
    for section in _SHOWN:
        for each in found[section]:
            title = each.title.removeprefix(f"{label}, ")
            header, rows = without_empty_columns(each.header, each.rows)
            lines += [f"**{_ABOUT.get(section, section)}** ({title})", "", *table(header, rows), ""]
    return "\n".join(lines).strip()


def without_empty_columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """A table without the columns that no row has a value in."""
    kept = [i for i in range(len(header)) if any(row[i] not in ("", NONE) for row in rows)]
    return [header[i] for i in kept], [[row[i] for i in kept] for row in rows]


def _told(report: dict[str, Any], parts: Sequence[str]) -> str:
    date = f", {report['date']}" if report.get("date") else ""
    return f"`{report['what']}`{date}: " + "; ".join(parts) + "."


def _threads(settings: dict[str, Any]) -> str:
    return f"{settings['threads']} thread{'s' if settings['threads'] != 1 else ''}"


def _versions(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


__all__ = ["demo_section", "eval_section", "without_empty_columns"]
