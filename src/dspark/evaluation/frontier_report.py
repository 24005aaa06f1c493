"""The report of a serving frontier: figures, a Markdown page and a plot of throughput against user speed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..simulation import FrontierPoint, dominated, throughput_at
from .plots import STYLES, subplots
from .report_files import write_benchmark
from .rows import Table, number

JUDGED = ("scheduled", "async", "auto")
BEATEN = ("mtp-1", "fixed")
_PROMISES = (0.9, 0.7, 0.5, 0.3)  # of the speed a user alone sees with plain decoding
_WORST = 3  # places where a policy falls behind that are told of


def frontier_report(points: Sequence[FrontierPoint], about: dict[str, Any]) -> dict[str, Any]:
    """JSON-able report.

    Args:
        points: Of one run.
        about: What it was taken with (curve, traces, workload).
    """
    domains = list(dict.fromkeys(point.domain for point in points))
    policies = list(dict.fromkeys(point.policy for point in points))
    promised = []
    for domain in domains:
        of_domain = [point for point in points if point.domain == domain]
        alone = max(p.result.user_speed for p in of_domain if p.policy == "plain") if "plain" in policies else None
        for share in _PROMISES if alone else ():
            kept = {
                policy: throughput_at([p for p in of_domain if p.policy == policy], share * alone)  # type: ignore[operator]
                for policy in policies
            }
            promised.append({"domain": domain, "share": share, "user_speed": share * alone, "throughput": kept})  # type: ignore[operator]
    judged = [policy for policy in JUDGED if policy in policies]
    others = [policy for policy in BEATEN if policy in policies]
    return {
        "what": "dspark bench frontier",
        "about": about,
        "points": [{"domain": p.domain, "policy": p.policy, "load": p.load, **p.result.to_dict()} for p in points],
        "promises": promised,
        "not_dominated": {policy: dominated(points, policy, others) for policy in judged},
    }


def frontier_tables(report: dict[str, Any]) -> list[Table]:
    """Per domain: throughput of each policy by load, over plain decoding; then throughput at promised user speeds."""
    tables = []
    points = report["points"]
    for domain in dict.fromkeys(point["domain"] for point in points):
        mine = [point for point in points if point["domain"] == domain]
        loads = list(dict.fromkeys(point["load"] for point in mine))
        found = {(point["policy"], point["load"]): point for point in mine}
        policies = list(dict.fromkeys(point["policy"] for point in mine))
        first = found[policies[0], loads[0]]["throughput"]
        rows = [
            [policy, *(number(found[policy, load]["throughput"] / first) for load in loads)] for policy in policies
        ]
        title = f"{domain}: throughput by rows, in units of {policies[0]} with {loads[0]}"
        tables.append(Table(title, ("policy", *map(str, loads)), rows))
        promises = [entry for entry in report["promises"] if entry["domain"] == domain]
        if promises:
            rows = [
                [policy, *(number(entry["throughput"][policy] / first) for entry in promises)] for policy in policies
            ]
            header = ("policy", *(f"{entry['share']:.0%}" for entry in promises))
            title = f"{domain}: throughput that keeps a share of the speed a user alone has with plain decoding"
            tables.append(Table(title, header, rows))
    return tables


def verdicts(report: dict[str, Any]) -> list[str]:
    """Whether each policy is at least as good as fixed blocks and single drafts everywhere, and where it is least so;
    the report has all such places."""
    lines = []
    for policy, losses in report["not_dominated"].items():
        if not losses:
            lines.append(f"{policy} has the largest throughput of {policy}, {' and '.join(BEATEN)} at every load.")
            continue
        worst = sorted(losses, key=lambda entry: entry["ratio"])[:_WORST]
        places = "; ".join(f"{e['domain']}, {e['load']} rows: {e['ratio']:.3f} of {e['policy']}" for e in worst)
        more = "" if len(losses) <= _WORST else ", the worst"
        lines.append(f"{policy} falls behind in {len(losses)} places{more}: {places}.")
    return lines


def write_frontier(report: dict[str, Any], folder: Path) -> str | None:
    """`frontier.json`, `frontier.md` and the plot; returns why there is no plot, or None."""
    return write_benchmark(
        folder, "frontier", report, title="Serving frontier", lines=verdicts(report), tables=frontier_tables(report),
        draw=lambda path: _draw(report, path), plot_of="throughput against user speed",
    )  # fmt: skip


def _draw(report: dict[str, Any], path: Path) -> None:
    points = report["points"]
    domains = list(dict.fromkeys(point["domain"] for point in points))
    policies = list(dict.fromkeys(point["policy"] for point in points))
    figure, panels = subplots()(-(-len(domains) // 2), min(len(domains), 2))
    for panel, domain in zip(panels, domains, strict=False):
        for i, policy in enumerate(policies):
            mine = [p for p in points if p["domain"] == domain and p["policy"] == policy]
            marker, line, grey = STYLES[i % len(STYLES)]
            x, y = ([p[name] for p in mine] for name in ("user_speed", "throughput"))
            filled = grey if i < len(STYLES) else "white"
            panel.plot(x, y, line, marker=marker, color=grey, markerfacecolor=filled, markersize=4, label=policy)
        panel.set(xlabel="tokens per second of a user", ylabel="tokens per second of all", title=domain)
        panel.legend(fontsize=7)
    figure.savefig(path, dpi=130)


__all__ = ["BEATEN", "JUDGED", "frontier_report", "frontier_tables", "verdicts", "write_frontier"]
