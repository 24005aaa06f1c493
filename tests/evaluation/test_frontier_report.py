"""The frontier's report: figures, tables, verdicts and files, from points that are known.

Catches: a table cell of another policy or load, a verdict that hides a loss, a promise read at the wrong speed, a run
that is lost because matplotlib is missing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark.evaluation import frontier_report as module
from dspark.evaluation.frontier_report import frontier_report, frontier_tables, verdicts, write_frontier
from dspark.evaluation.plots import MISSING, PlotLibraryError
from dspark.simulation import FrontierPoint, SimulationResult

ABOUT = {"curve": "gpu", "texts": {"chat": 3}}


def point(policy: str, load: int, throughput: float, speed: float, domain: str = "chat") -> FrontierPoint:
    tokens = 1000
    result = SimulationResult(
        tokens=tokens, seconds=tokens / throughput, busy_seconds=tokens / throughput, prompt_seconds=0.0, rounds=100,
        row_rounds=100 * load, drafted=0, verified=50, accepted=25, user_speeds=np.full(4, speed), waits=np.zeros(4),
    )  # fmt: skip
    return FrontierPoint(domain, policy, load, result)


def points(domain: str = "chat", auto: float = 50.0) -> list[FrontierPoint]:
    return [
        point("plain", 1, 10, 10, domain), point("fixed", 1, 25, 25, domain), point("auto", 1, 25, 25, domain),
        point("plain", 4, 32, 8, domain), point("fixed", 4, 40, 10, domain), point("auto", 4, auto, 12.5, domain),
    ]  # fmt: skip


def test_figures() -> None:
    report = frontier_report(points(), ABOUT)
    assert json.loads(json.dumps(report)) == report
    assert report["about"] == ABOUT
    first = report["points"][0]
    assert (first["domain"], first["policy"], first["load"]) == ("chat", "plain", 1)
    assert (first["throughput"], first["user_speed"]) == (10, 10)
    assert [entry["share"] for entry in report["promises"]] == [0.9, 0.7, 0.5, 0.3]
    nine = report["promises"][0]  # 9 tokens per second: plain breaks the promise with four rows
    assert nine["user_speed"] == pytest.approx(9)
    assert nine["throughput"] == pytest.approx({"plain": 10 + 22 / 2, "fixed": 40, "auto": 50})


def test_tables_are_in_units_of_the_first_policy_alone() -> None:
    whole = frontier_report([*points("chat"), *points("code", auto=20)], ABOUT)
    tables = frontier_tables(whole)
    assert [table.title.split(":")[0] for table in tables] == ["chat", "chat", "code", "code"]
    assert tables[0].header == ("policy", "1", "4")
    assert tables[0].rows == [["plain", "1.00", "3.20"], ["fixed", "2.50", "4.00"], ["auto", "2.50", "5.00"]]
    assert tables[1].header == ("policy", "90%", "70%", "50%", "30%")
    assert tables[1].rows[0] == ["plain", "2.10", "3.20", "3.20", "3.20"]
    assert tables[2].rows[2] == ["auto", "2.50", "2.00"]


def test_without_plain_there_are_no_promises() -> None:
    report = frontier_report([p for p in points() if p.policy != "plain"], ABOUT)
    assert report["promises"] == []
    (only,) = frontier_tables(report)
    assert only.title.endswith("in units of fixed with 1")


def test_verdicts_name_the_worst_losses() -> None:
    (line,) = verdicts(frontier_report(points(), ABOUT))
    assert line == "auto has the largest throughput of auto, mtp-1 and fixed at every load."
    (line,) = verdicts(frontier_report([*points("chat"), *points("code", auto=30)], ABOUT))
    assert line == "auto falls behind in 1 places: code, 4 rows: 0.750 of fixed."
    many = [point for n in range(5) for point in points(f"code{n}", auto=30 + n)]
    (line,) = verdicts(frontier_report(many, ABOUT))
    assert line.startswith("auto falls behind in 5 places, the worst: code0, 4 rows: 0.750 of fixed; code1, 4 rows: ")
    assert line.count("rows") == 3
    assert verdicts(frontier_report([p for p in points() if p.policy != "auto"], ABOUT)) == []


def test_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = frontier_report([*points("chat"), *points("code")], ABOUT)
    assert write_frontier(report, tmp_path / "new" / "folder") is None
    folder = tmp_path / "new" / "folder"
    assert sorted(path.name for path in folder.iterdir()) == ["frontier.json", "frontier.md", "frontier.png"]
    assert json.loads((folder / "frontier.json").read_text()) == report
    page = (folder / "frontier.md").read_text()
    for text in ("- curve: gpu", "largest throughput", "| auto | 2.50 | 5.00 |", "frontier.png", "**code: "):
        assert text in page
    assert (folder / "frontier.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_rest_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise PlotLibraryError(MISSING)

    monkeypatch.setattr(module, "subplots", missing)
    assert write_frontier(frontier_report(points(), ABOUT), tmp_path) == MISSING
    assert sorted(path.name for path in tmp_path.iterdir()) == ["frontier.json", "frontier.md"]
    assert "frontier.png" not in (tmp_path / "frontier.md").read_text()
