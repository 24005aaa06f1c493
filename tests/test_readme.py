"""The README's support table is the one the tests are generated from."""

from __future__ import annotations

from pathlib import Path

from tests.zoo import markdown

README = Path(__file__).parents[1] / "README.md"


def test_support_table_is_the_generated_one() -> None:
    text = README.read_text(encoding="utf-8")
    table = text.split("<!-- support table -->")[1].split("<!-- end -->")[0]
    assert table.strip() == markdown().strip()
