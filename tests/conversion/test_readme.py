"""The tables of formats in both READMEs are the registry.

Catches: a format that is read and not said, or said and not read.
"""

from __future__ import annotations

import re
from pathlib import Path

import dspark.conversion
import pytest
from dspark.conversion import FORMATS

ROOT = Path(dspark.conversion.__file__).resolve().parents[1]


@pytest.mark.parametrize("page", ["README.md", "conversion/README.md"])
def test_table_is_the_registry(page: str) -> None:
    table = re.search(r"<!-- format table -->\n(.*?)<!-- end -->", (ROOT / page).read_text(), re.DOTALL)
    assert table is not None
    rows = [f"| `{entry.name}` | {entry.title} |" for entry in FORMATS.values()]
    assert table[1].splitlines()[2:] == rows
