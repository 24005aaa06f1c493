"""Poisons uninitialised memory, and keeps kernels out of processes without Triton's interpreter.

The interpreter must be asked for before triton is first imported, so `interpreted/` runs in processes of its own
(`test_interpreter.py`).
"""

from __future__ import annotations

import os

import pytest
import torch

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted/*"]


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.empty` gives NaN, or a number no test expects: an output nobody wrote cannot pass."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        return tensor.fill_(torch.nan if tensor.is_floating_point() else -77)

    monkeypatch.setattr(torch, "empty", poisoned)
