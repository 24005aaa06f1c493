"""The benchmark of the ops: refuses without a GPU, and times no form that gives something else.

Catches: a figure printed for kernels nobody checked, a run that fails late instead of at the start.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "examples/benchmarks/bench_ops.py"


@pytest.fixture(scope="module")
def bench() -> Any:
    spec = importlib.util.spec_from_file_location("bench_ops", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_refuses_without_a_gpu() -> None:
    run = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=300)
    assert run.returncode == 1
    assert run.stderr.strip() == "This benchmark needs a CUDA or HIP device, and torch sees none."
    assert not run.stdout


@pytest.mark.parametrize(
    ("op", "wrong", "right"),
    [
        ({}, [1, 2, 4], [1, 2, 3]),
        ({"agreement": 0.6}, [1, 4, 4], [1, 2, 4]),
        ({"tolerance": 1e-3}, [1, 2, 3.1], [1, 2, 3.001]),
    ],
)
def test_times_nothing_that_differs(bench: Any, op: dict[str, float], wrong: Any, right: Any) -> None:
    want, entry = torch.tensor([1.0, 2, 3]), bench.Op(lambda form: None, 1, **op)
    bench.check("op", "triton", torch.tensor(right), want, entry)
    with pytest.raises(SystemExit, match="not measured: op in the triton form agrees on"):
        bench.check("op", "triton", torch.tensor(wrong), want, entry)


def test_the_table_has_a_dash_where_nothing_was_compiled(bench: Any) -> None:
    row = {"name": "greedy", "columns": 100, "rows": 2, "torch": 9.0, "compiled": None, "triton": 4.0, "floor": 3.0}
    assert bench.table([row]).splitlines()[-1] == "| greedy | 100 | 2 | 9 | - | 4 | 3 | 0.75 |"
