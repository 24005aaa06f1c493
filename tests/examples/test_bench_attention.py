"""`bench_attention.py` runs both forms on tiny sizes and compares their logits before it says a ratio."""

from __future__ import annotations

import re
import subprocess
import sys


def test_runs_both_forms():
    command = [sys.executable, "examples/benchmarks/bench_attention.py", "--shape", "2x3", "--context", "12"]
    result = subprocess.run([*command, "--repeats", "1", "--threads", "1"], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"2x3: [\d.]+ ms, copied [\d.]+ ms, ratio [\d.]+\n", result.stdout)
