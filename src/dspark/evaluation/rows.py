"""Rows and cells of the report's tables, as text: the terminal and the Markdown report show the same ones.

`None` in the report means that there was nothing to divide by; it is shown as a dash.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..stats import STEPS

NONE = "\N{EN DASH}"
_MOST_THRESHOLDS = 3  # with a table per set each
_MACHINE = ("device", "device_name", "dtype", "threads", "packed", "attention", "cache")

SPLIT_COLUMNS = ("step", "ms per round", "share")


def of_run(run: dict[str, Any]) -> str:
    """Short name of a drafter's run: label, temperature, threshold."""
    return f"{run['drafter']}, {at_temperature(run['temperature'])}, threshold {run['threshold']:g}"


def at_temperature(temperature: float) -> str:
    """`greedy`, or `T = 1`."""
    return "greedy" if temperature == 0 else f"T = {temperature:g}"


def number(value: float | None, digits: int = 2, suffix: str = "") -> str:
    """A figure, or a dash for None."""
    return NONE if value is None else f"{value:.{digits}f}{suffix}"


def percent(value: float | None) -> str:
    """A share in [0, 1] as a percentage, or a dash."""
    return NONE if value is None else f"{value:.1%}"


SET_COLUMNS = (
    "set", "prompts", "new tokens", "accepted length", "tokens per pass", "acceptance rate", "verified per round",
    "ids equal", "x plain",
)  # fmt: skip


def set_cells(figures: dict[str, Any]) -> list[str]:
    """Cells of one set under `SET_COLUMNS`."""
    ids, speed = figures["ids"], figures["speed"]
    return [
        figures["name"],
        str(figures["prompts"]),
        str(figures["new_tokens"]),
        number(figures["accepted_length"]),
        number(figures["tokens_per_pass"]),
        percent(figures["acceptance_rate"]),
        number(figures["verified_per_round"]),
        NONE if ids is None else f"{ids['equal']}/{ids['compared']}",
        NONE if speed is None else number(speed["speedup"]),
    ]


def set_rows(run: dict[str, Any]) -> list[list[str]]:
    """Rows of a run under `SET_COLUMNS`: its sets and, where there are several, all prompts and the sets' mean."""
    rows = [set_cells(figures) for figures in run["sets"]]
    if len(rows) > 1:
        mean = run["mean"]
        rows.append(set_cells(run["all"]))
        rows.append(["mean of sets", "", "", number(mean["accepted_length"]), *[""] * 4, number(mean["speedup"])])
    return rows


def position_columns(run: dict[str, Any]) -> list[str]:
    """Header of `position_rows`: draft positions, 1-based."""
    return ["conditional / survival", *[str(row["position"]) for row in run["all"]["positions"]]]


def position_rows(run: dict[str, Any]) -> list[list[str]]:
    """Per set, acceptance of each draft position: given all before it, and over all rounds that verified it."""
    width = len(run["all"]["positions"])
    sets = run["sets"] if len(run["sets"]) == 1 else [*run["sets"], run["all"]]
    rows = [
        [figures["name"], *[f"{number(p['conditional'])} / {number(p['survival'])}" for p in figures["positions"]]]
        for figures in sets
    ]
    return [row + [NONE] * (width + 1 - len(row)) for row in rows] if width else []


SWEEP_COLUMNS = ("threshold", "accepted length", "acceptance rate", "verified per round", "verified tokens", "x plain")


def sweep_cells(run: dict[str, Any]) -> list[str]:
    """Cells of one threshold under `SWEEP_COLUMNS`, over all prompts."""
    figures = run["all"]
    return [
        f"{run['threshold']:g}",
        number(figures["accepted_length"]),
        percent(figures["acceptance_rate"]),
        number(figures["verified_per_round"]),
        str(figures["verified_tokens"]),
        NONE if figures["speed"] is None else number(figures["speed"]["speedup"]),
    ]


def sweeps(report: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Runs of one drafter at one temperature, one list each, where there are several thresholds."""
    groups: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for run in report["runs"]:
        groups.setdefault((run["drafter"], run["temperature"]), []).append(run)
    return [group for group in groups.values() if len(group) > 1]


def whole_runs(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs at the lowest threshold, where most is verified."""
    lowest = min((run["threshold"] for run in report["runs"]), default=0)
    return [run for run in report["runs"] if run["threshold"] == lowest]


def runs_per_set(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs shown set by set: all of them, but of a long sweep only those at the lowest threshold."""
    is_long = len({run["threshold"] for run in report["runs"]}) > _MOST_THRESHOLDS
    return whole_runs(report) if is_long else report["runs"]


RELIABILITY_COLUMNS = (
    "position", "rounds", "mean survival", "observed", "ECE", "ECE calibrated", "AUC", "AUC calibrated",
)  # fmt: skip


def reliability_rows(entry: dict[str, Any]) -> list[list[str]]:
    """Rows of one drafter at one temperature under `RELIABILITY_COLUMNS`."""
    after = entry["calibrated"] or [None] * len(entry["raw"])
    return [
        [
            str(raw["position"]),
            str(raw["num_rounds"]),
            number(raw["predicted"], 3),
            number(raw["observed"], 3),
            percent(raw["ece"]),
            percent(calibrated and calibrated["ece"]),
            number(raw["auc"], 3),
            number(calibrated and calibrated["auc"], 3),
        ]
        for raw, calibrated in zip(entry["raw"], after, strict=True)
    ]


def split_rows(run: dict[str, Any]) -> list[list[str]]:
    """Name, milliseconds per round and share of every step, then of both models' forward passes and the host."""
    figures = run["all"]
    steps, models = figures["step_seconds"], figures["model_seconds"]
    total, rounds = sum(steps.values()), figures["rounds"]
    parts = [(step, steps[step]) for step in STEPS]
    parts += [(f"({model} forward)", seconds) for model, seconds in models.items()]
    parts.append(("(host)", figures["host_share"] * total))
    return [
        [name, number(1000 * seconds / rounds), percent(seconds / total)]
        for name, seconds in parts
        if rounds and total
    ]


class Table(NamedTuple):
    """A table with its title, or without rows."""

    title: str
    header: Sequence[str]
    rows: list[list[str]]


def tables(report: dict[str, Any]) -> dict[str, list[Table]]:
    """All tables of a report by section, in the order they are shown; those without rows are left out."""
    whole = whole_runs(report)
    found = {
        "Per set": [Table(of_run(run), SET_COLUMNS, set_rows(run)) for run in runs_per_set(report)],
        "Acceptance per draft position": [
            Table(of_run(run), position_columns(run), position_rows(run)) for run in whole
        ],
        "Confidence threshold": [
            Table(
                f"{group[0]['drafter']}, {at_temperature(group[0]['temperature'])}",
                SWEEP_COLUMNS,
                [sweep_cells(run) for run in group],
            )
            for group in sweeps(report)
        ],
        "Reliability of the confidence": [
            Table(of_run(entry), RELIABILITY_COLUMNS, reliability_rows(entry)) for entry in report["reliability"]
        ],
        "Where a round's time goes": [Table(of_run(run), SPLIT_COLUMNS, split_rows(run)) for run in whole],
    }
    return {section: [table for table in group if table.rows] for section, group in found.items()}


def facts(report: dict[str, Any]) -> dict[str, str]:
    """What the figures were taken with, name to text."""
    configuration = report["configuration"]
    target, settings, prompting = (configuration[part] for part in ("target", "settings", "prompting"))
    lines = {
        "date": report["date"],
        "target": f"{target['name']} ({target['architecture']}, {target['num_parameters'] / 1e6:.1f} M parameters)",
        "target hashes": f"embedding {target['embedding_hash']}, LM head {target['lm_head_hash']}, "
        f"tokenizer {target['tokenizer_hash']}",
    }
    for name, note in configuration["drafters"].items():
        state = "calibrated" if note["confidence_temperatures"] else "not calibrated"
        lines[f"drafter {name}"] = (
            f"{note['parameters'] / 1e6:.1f} M parameters, block {note['block_size']}, weights "
            f"{note['weights_hash']}, confidence {state}"
        )
    lines |= {
        "chat template": prompting["chat_template_hash"] or "none",
        "thinking": prompting["thinking"],
        "temperatures": ", ".join(f"{t:g}" for t in settings["temperatures"]) + f" ({settings['sampling']})",
        "seed": str(settings["seed"]),
    }
    lines |= {name: _plain(configuration["machine"][name]) for name in _MACHINE}
    lines["versions"] = ", ".join(f"{name} {version}" for name, version in configuration["versions"].items())
    return lines


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return NONE if value is None else str(value)


__all__ = [
    "NONE",
    "Table",
    "at_temperature",
    "facts",
    "number",
    "of_run",
    "percent",
    "set_rows",
    "sweeps",
    "tables",
    "whole_runs",
]
