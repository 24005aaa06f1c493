"""The tables of formats in both READMEs are the registry, `dspark.conversion.tables` makes them.

Catches: a format that is read or written and not said, or said and neither.
"""

from __future__ import annotations

import re
from pathlib import Path

import dspark.conversion
import pytest
from dspark.conversion import FORMATS, WRITERS, tables

ROOT = Path(dspark.conversion.__file__).resolve().parents[1]


PAGES = pytest.mark.parametrize("page", ["README.md", "conversion/README.md"])


def table(page: str, name: str) -> list[str]:
    found = re.search(rf"<!-- {name} table -->\n(.*?)<!-- end -->", (ROOT / page).read_text(), re.DOTALL)
    assert found is not None
    return found[1].splitlines()


@PAGES
def test_what_is_read(page: str) -> None:
    assert table(page, "format") == tables.format_table()
    assert all(any(row.startswith(f"| `{name}` |") for row in table(page, "format")) for name in FORMATS)


@PAGES
def test_what_is_written(page: str) -> None:
    assert table(page, "writer") == tables.writer_table()
    assert all(any(row.startswith(f"| `{name}` |") for row in table(page, "writer")) for name in WRITERS)
