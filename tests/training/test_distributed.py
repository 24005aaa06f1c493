"""Two processes against one: replicated (DDP) and sharded (FSDP) weights, on CPUs over gloo.

Catches: micro-batches or devices averaged instead of one mean per step, an epoch's copies that are trained on twice,
anchors that depend on the device, a chunked loss whose gradients bypass the reduction or read sharded weights, layers
called outside their own forward pass.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from . import distributed

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """What one and two processes left."""
    path = tmp_path_factory.mktemp("distributed")
    threads = torch.get_num_threads()
    distributed.main(path)
    torch.set_num_threads(threads)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d",
        "--rdzv-endpoint", "localhost:0", "-m", "tests.training.distributed", str(path),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return path


@pytest.mark.parametrize("name", ["replicated", "sharded-None", "sharded-4"])
def test_two_processes_end_with_the_weights_of_one(folder, name) -> None:
    one, two = (torch.load(folder / f"{name}-{world}.pt") for world in (1, 2))
    assert one.keys() == two.keys()
    for key, tensor in one.items():
        torch.testing.assert_close(two[key], tensor, rtol=1e-5, atol=1e-5, msg=lambda m, key=key: f"{key}: {m}")


def test_two_processes_log_what_one_does(folder) -> None:
    one, two = (json.loads((folder / f"logs-{world}.json").read_text()) for world in (1, 2))
    assert [entry["step"] for entry in one] == [entry["step"] for entry in two]
    names = set()
    for ours, theirs in zip(one, two, strict=True):
        for name, value in ours.items():
            if not name.endswith(("runtime", "_per_second", "flos")):
                assert theirs[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
                names.add(name)
    assert {"loss", "grad_norm", "tau", "acceptance_4", "eval_loss", "eval_tau_estimate", "eval_tau"} <= names
