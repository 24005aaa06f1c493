"""Readers of the drafters that other frameworks wrote (see the README of `tests/fixtures/peerfmt`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from tests.conftest import peer_root
from tests.golden import common

ROOT = peer_root()
ALL = sorted(path.parent.name for path in ROOT.glob("*/checkpoint"))
WITH_NUMBERS = [name for name in ALL if (ROOT / name / "expected.safetensors").is_file() and "dflash2" not in name]
REFUSED = [name for name in ALL if name not in WITH_NUMBERS]
CORRUPT = sorted(path.name for path in (ROOT / "corrupt").iterdir() if path.is_dir())


def folder(name: str) -> Path:
    return ROOT / name / "checkpoint"


def expected(name: str) -> dict[str, Any]:
    return json.loads((ROOT / name / "expected.json").read_text())


def numbers(name: str) -> dict[str, Any]:
    return load_file(ROOT / name / "expected.safetensors")


def target() -> Any:
    return common.target("targets/qwen3_a")
