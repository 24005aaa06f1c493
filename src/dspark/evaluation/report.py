"""The report of an evaluation: one JSON-able dict made from results, from which tables, plots and Markdown are made.

A pure function of the results: reports of merged files are those of one run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..calibration import position_reliability
from ..configuration_dspark import nearest_row
from .figures import figures, means, merged_stats, pick
from .results import Results, set_names

_GREEDY = "Greedy runs: ids were compared with plain generate first; speed-ups count only prompts whose ids are equal."
_SAMPLED = (
    "Sampled runs: two texts of one law differ by chance, so ids cannot show that the law is the target's; speed-ups "
    "there compare seconds per new token of different texts."
)
_COUNTS_ONLY = "Counts only: no plain runs were made, so ids were not compared and there are no speed-ups."
_NO_SPEED_WHERE_UNEQUAL = "Ids differ on some prompts, which have no speed-up: {}."
_QUEUED = (
    "On an accelerator the step times are the host's, which does not wait for the device: the wait falls to the step "
    "that reads a result first."
)


def build_report(results: Results) -> dict[str, Any]:
    """All figures of `results`.

    Returns:
        `configuration` and `date` of the results; `prompts` per set; `runs`, one entry per drafter, temperature and
        threshold with figures per `sets`, over `all` prompts, and the `mean` over sets; `reliability` per drafter and
        temperature; `notes` in words; `plots`, an empty list for file names.
    """
    settings = results.configuration["settings"]
    runs = list(_runs(results))
    reliability = list(_reliability(results)) if settings["reliability"] else []
    names = set_names(results.prompts.values())
    return {
        "what": "dspark eval",
        "date": results.date,
        "configuration": results.configuration,
        "prompts": {name: len({i for n, i, _ in results.prompts if n == name}) for name in names},
        "runs": runs,
        "reliability": reliability,
        "notes": _notes(results.configuration, runs, reliability),
        "plots": [],
    }


def calibration_note(label: str, share: str) -> str:
    """What figures of a drafter do not say that was calibrated on `share` of the prompts they are of."""
    return (
        f"{label} was calibrated on {share}: its confidence (reliability, thresholds above 0) looks better here than "
        "on other prompts. Accepted lengths at threshold 0 stand."
    )


def has_unequal_ids(report: dict[str, Any]) -> bool:
    """Whether a greedy run wrote other ids than plain `generate`."""
    return any(run["all"]["ids"] and run["all"]["ids"]["differing"] for run in report["runs"])


def _runs(results: Results) -> Iterator[dict[str, Any]]:
    settings, prompts = results.configuration["settings"], results.in_order()
    for drafter in results.configuration["drafters"]:
        for temperature in settings["temperatures"]:
            for threshold in settings["thresholds"]:
                pairs = pick(prompts, drafter=drafter, temperature=temperature, threshold=threshold)
                sets = [
                    figures(name, [pair for pair in pairs if pair[0].set_name == name])
                    for name in set_names(result for result, _ in pairs)
                ]
                yield {
                    "drafter": drafter,
                    "temperature": temperature,
                    "threshold": threshold,
                    "sets": sets,
                    "all": figures("all", pairs),
                    "mean": means(sets),
                }


def _reliability(results: Results) -> Iterator[dict[str, Any]]:
    """Survival against what happened, per drafter and temperature, raw and with the drafter's own temperatures."""
    settings = results.configuration["settings"]
    threshold = min(settings["thresholds"])
    for drafter, note in results.configuration["drafters"].items():
        for temperature in settings["temperatures"]:
            pairs = pick(results.in_order(), drafter=drafter, temperature=temperature, threshold=threshold)
            rounds = merged_stats(pairs).scored_rounds()
            if not rounds:
                continue
            fitted = nearest_row(note["confidence_temperatures"], temperature)
            entry = {"drafter": drafter, "temperature": temperature, "threshold": threshold, "rounds": len(rounds)}
            curves: dict[str, Any]
            try:
                curves = {"raw": _positions(rounds), "calibrated": _positions(rounds, fitted) if fitted else None}
            except ValueError as error:  # logits that are not finite: the other figures are worth having
                curves = {"raw": [], "calibrated": None, "problem": str(error)}
            yield {**entry, "confidence_temperatures": fitted, **curves}


def _positions(
    rounds: list[tuple[list[float], int, int]], temperatures: list[float] | None = None
) -> list[dict[str, Any]]:
    logits, verified, accepted = (list(column) for column in zip(*rounds, strict=True))
    table = position_reliability(logits, accepted, verified_lengths=verified, temperatures=temperatures)
    return [{**row.to_dict(), "position": row.position + 1} for row in table]


def _notes(configuration: dict[str, Any], runs: list[dict[str, Any]], reliability: list[dict[str, Any]]) -> list[str]:
    settings = configuration["settings"]
    notes = []
    if not settings["speed"]:
        notes.append(_COUNTS_ONLY)
    else:
        notes += [_GREEDY] if 0 in settings["temperatures"] else []
        notes += [_SAMPLED] if max(settings["temperatures"]) > 0 else []
    if differing := _differing(runs):
        notes.append(_NO_SPEED_WHERE_UNEQUAL.format(", ".join(differing)))
    if configuration["machine"]["device"] != "cpu":
        notes.append(_QUEUED)
    drafters = configuration["drafters"].items()
    notes += [calibration_note(label, d["calibrated_on"]) for label, d in drafters if d.get("calibrated_on")]
    notes += [f"{entry['drafter']}: {entry['problem']}" for entry in reliability if "problem" in entry]
    notes += sorted({f"{run['drafter']}: {reason}." for run in runs for reason in run["all"]["fallbacks"]})
    return notes


def _differing(runs: list[dict[str, Any]]) -> list[str]:
    return [
        f"{run['drafter']}, threshold {run['threshold']}: {row['set']} {row['index']} from new token {row['token']}"
        for run in runs
        for row in (run["all"]["ids"] or {"differing": []})["differing"]
    ]


__all__ = ["build_report", "has_unequal_ids"]
