"""Which implementation runs: Triton never where it cannot, and an error, not another form, when it was asked for.

Catches: a quiet fallback, an interpreter that slows a CPU down unasked, an import of triton where torch will do.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from dspark.ops.dispatch import choose, device_of, is_interpreted

CPU = torch.zeros(1)
NOWHERE = torch.zeros(1, device="meta")


class OnGpu:
    """Stands for a tensor on an accelerator: only its device is looked at."""

    device = torch.device("cuda", 0)


@pytest.fixture(params=[True, False], ids=["triton", "no triton"])
def has_triton(request, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("DSPARK_OPS", raising=False)
    found = object() if request.param else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    return request.param


def test_auto_takes_triton_on_a_gpu_where_it_is_installed(has_triton):
    assert choose("auto", OnGpu()) == ("triton" if has_triton else "torch")
    assert choose("torch", OnGpu()) == "torch"


@pytest.mark.parametrize("tensor", [CPU, NOWHERE])
def test_auto_is_torch_elsewhere(has_triton, tensor, monkeypatch):
    assert choose("auto", tensor) == "torch"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose("auto", tensor) == "torch"


def test_the_environment_decides_for_auto_alone(has_triton, monkeypatch):
    monkeypatch.setenv("DSPARK_OPS", "torch")
    assert choose("auto", OnGpu()) == "torch"
    monkeypatch.setenv("DSPARK_OPS", "triton")
    assert choose("torch", CPU) == "torch"
    if has_triton:
        assert choose("auto", OnGpu()) == "triton"
        with pytest.raises(
            ValueError, match="'triton' as the environment variable DSPARK_OPS needs tensors on a CUDA"
        ):
            choose("auto", CPU)
    else:
        with pytest.raises(ImportError, match="DSPARK_OPS needs triton"):
            choose("auto", OnGpu())
    monkeypatch.setenv("DSPARK_OPS", "auto")
    assert choose("auto", CPU) == "torch"
    monkeypatch.setenv("DSPARK_OPS", "fast")
    with pytest.raises(ValueError, match=r"DSPARK_OPS must be one of .*, got 'fast'"):
        choose("auto", CPU)


def test_triton_asked_for_and_missing_is_an_error(has_triton):
    if has_triton:
        assert choose("triton", OnGpu()) == "triton"
    else:
        with pytest.raises(ImportError, match=r"pip install dspark\[triton\]"):
            choose("triton", OnGpu())


def test_triton_off_the_gpu_needs_its_interpreter(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="as `implementation` needs tensors on a CUDA or HIP device, got cpu"):
        choose("triton", CPU)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert is_interpreted()
    assert choose("triton", CPU) == "triton"


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match=r"must be one of \('auto', 'torch', 'triton'\), got 'cuda'"):
        choose("cuda", CPU)


def test_the_cpu_needs_no_device_switch():
    with device_of(CPU):
        pass


def test_the_torch_forms_import_no_triton():
    code = (
        "import sys, torch; from dspark.ops.markov_step import *; from dspark.ops.rejection import *;"
        "from dspark.ops.confidence import *; from dspark.ops.training_loss import *;"
        "t = MarkovTables(torch.zeros(4, 2), torch.zeros(4, 2));"
        "markov_block(torch.zeros(1, 1, 4), torch.zeros(1).long(), t);"
        "assert not [m for m in sys.modules if m.startswith('dspark.ops') and 'triton' in m]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=300)
