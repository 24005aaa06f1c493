"""Tables in the terminal: nothing of them is cut off, a table wider than the terminal is printed in parts."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

_FRAME = 3  # of each column: two spaces and a line; one more line at the end


def print_table(
    console: Console,
    title: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    caption: str | None = None,
    num_keys: int = 1,
) -> None:
    """Print a table of short cells; its first column is text, the others are numbers.

    Args:
        console: Where; its width is what must do.
        title: Above the first part.
        header: Names of the columns, which may be broken at their spaces.
        rows: Cells, which are never broken.
        caption: Below the last part.
        num_keys: Leading columns that every part has.
    """
    cells = [max((len(row[i]) for row in rows), default=0) for i in range(len(header))]
    widths = [max(size, len(name)) for size, name in zip(cells, header, strict=True)]
    if _total(widths) > console.width:
        widths = [max(size, *map(len, name.split() or [""])) for size, name in zip(cells, header, strict=True)]
    parts = _parts(widths, console.width, num_keys)
    for number, part in enumerate(parts):
        table = Table(
            title=escape(title) if number == 0 else None,
            caption=escape(caption) if caption and number == len(parts) - 1 else None,
        )
        for i in part:
            name = "\n".join(textwrap.wrap(header[i], max(widths[i], 1)))
            table.add_column(escape(name), justify="left" if i == 0 and num_keys == 1 else "right")
        for row in rows:
            table.add_row(*(escape(row[i]) for i in part))
        console.print(table)


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + _FRAME * len(widths) + 1


def _parts(widths: Sequence[int], room: int, num_keys: int) -> list[list[int]]:
    """Columns of each part: the keys, and as many others as fit, at least one."""
    keys = list(range(num_keys))
    parts = [list(keys)]
    for i in range(num_keys, len(widths)):
        if len(parts[-1]) > num_keys and _total([widths[j] for j in (*parts[-1], i)]) > room:
            parts.append(list(keys))
        parts[-1].append(i)
    return parts


__all__ = ["print_table"]
