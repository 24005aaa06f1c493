"""Tables in a terminal of 80 columns: nothing is cut off, whatever the table.

Catches: a header or a figure that ends in an ellipsis, a number broken in two, a part without the column that says
whose figures they are.
"""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from dspark.cli.tables import print_table
from dspark.evaluation.rows import SET_COLUMNS

POSITIONS = ["conditional / survival", *map(str, range(1, 8))]


def printed(width: int, *what, **options) -> str:
    file = io.StringIO()
    print_table(Console(file=file, width=width), *what, **options)
    return file.getvalue()


def cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]


@pytest.mark.parametrize(
    ("header", "row"),
    [
        (SET_COLUMNS, ["arena-hard-v2", "100", "125770", "2.76", "2.72", "25.9%", "6.80", "100/100", "1.54"]),
        (POSITIONS, ["humaneval", *["0.57 / 0.57"] * 7]),
        (["way", *map(str, (1, 2, 4, 8, 16))], ["scheduled", *["1234.5 (1.05)"] * 5]),
    ],
)
def test_every_cell_is_whole_and_under_its_name(header, row) -> None:
    text = printed(80, "[title]", header, [row, ["other", *[""] * (len(row) - 1)]], caption="caption")
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    shown = cells(text)
    assert {line[0] for line in shown} == {row[0], "other"}
    found = [cell for line in shown if line[0] == row[0] for cell in line[1:]]
    assert found == row[1:]
    words = re.sub(r"[┃\s]+", " ", text)
    assert all(word in words for name in header for word in name.split())
    assert text.count("[title]") == text.count("caption") == 1


def test_what_fits_is_one_table_with_whole_names() -> None:
    text = printed(200, "title", SET_COLUMNS, [["a", *["1"] * 8]])
    assert text.count("┏") == 1
    assert all(name in text for name in SET_COLUMNS)


def test_all_keys_head_every_part() -> None:
    text = printed(30, "title", ("rows", "drafts", "one", "two"), [["1", "7", "a" * 9, "b" * 9]], num_keys=2)
    assert cells(text) == [["1", "7", "a" * 9], ["1", "7", "b" * 9]]
