"""The benchmark of the loss runs, compares before it measures, and prints its table.

Catches: a benchmark that no longer runs, or that gives figures of forms that differ.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SIZES = ("--vocab", "64", "--width", "16", "--rank", "4", "--rows", "2", "--length", "16", "--anchors", "4")


def test_it_prints_both_forms_side_by_side(tmp_path) -> None:
    command = [sys.executable, "examples/benchmarks/bench_loss.py", *SIZES, "--chunk", "8", "--steps", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "found.json")],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    header, _, plain, chunked = done.stdout.splitlines()
    assert header == "| loss | peak MiB | x plain | tokens/s | x plain |"
    assert plain.startswith("| plain | ")
    assert chunked.startswith("| chunked | ")
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found["plain"]["seconds"]) == len(found["chunked"]["seconds"]) == 3
    assert found["plain"]["values"].keys() == found["chunked"]["values"].keys() > {"loss", "fc.weight"}
