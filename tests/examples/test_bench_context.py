"""The benchmark of long contexts runs every window on the same prompts and compares the texts.

Catches: a benchmark that no longer runs, a window that is not asked for, a tau lost of the full context itself.
"""

from __future__ import annotations

import json
import subprocess
import sys


def test_every_context_has_a_line_per_window(tmp_path) -> None:
    words = ["--context", "40", "--context", "700", "--window", "16", "--max-new-tokens", "10", "--limit", "2"]
    command = [sys.executable, "examples/benchmarks/bench_context.py", *words, "--repeats", "1", "--chunk", "64"]
    saved = tmp_path / "found.json"
    done = subprocess.run(
        [*command, "--threads", "1", "--json", str(saved)], capture_output=True, text=True, timeout=300, check=True
    )
    header, _, *lines = done.stdout.splitlines()
    rows = json.loads(saved.read_text())
    assert header.startswith("| context | window | context ms | draft ms | round ms | slots | tau | tau lost |")
    assert [(row["tokens"], row["window"]) for row in rows] == [(40, None), (40, 16), (700, None), (700, 16)]
    assert len(lines) == 4
    assert all(row["equal"] == row["runs"] == 2 for row in rows)
    assert [row["tau_lost"] for row in rows if row["window"] is None] == [0, 0]
    assert rows[2]["slots"] > 700 > rows[3]["slots"]
    assert all(0 < row["draft"] < row["round"] for row in rows)
