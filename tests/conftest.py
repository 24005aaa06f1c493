"""Shared fixtures: seeds, threads, where the golden data lies."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

FIXTURES = Path(__file__).parent / "fixtures"
# The full golden set lies beside the checkout where it is kept; a clone alone has the subset under tests/fixtures.
SHARED = Path(os.environ.get("DSPARK_SHARED", Path(__file__).parents[2] / "shared"))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def golden_root() -> Path:
    """Folder of the reference vectors: the full set if present, else the shipped subset."""
    full = SHARED / "golden"
    return full if full.is_dir() else FIXTURES / "golden"


def peer_root() -> Path:
    """Folder of the drafters other frameworks wrote: the full set if present, else the shipped subset."""
    full = SHARED / "peerfmt"
    return full if full.is_dir() else FIXTURES / "peerfmt"
