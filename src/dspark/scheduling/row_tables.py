"""Step times by rows: the target's side by rows and tokens, the drafter's by rows and slots.

Several rows are another pass of the target than one row of as many tokens, and another pass of the drafter anyway.
"""

from __future__ import annotations

from bisect import bisect_left

from .samples import BELIEVED, Line, Samples, believed_seconds

_MOST_COUNTS = 64  # token counts kept per number of rows
_MOST_ROWS = 512
_LEAST_COUNTS = 3  # token counts of a number of rows from which on it has a line of its own


class RowTables:
    """Samples per rows and tokens.

    Args:
        tables: Rows to token count to samples.
    """

    def __init__(self, tables: dict[int, dict[int, Samples]] | None = None) -> None:
        self.tables = {} if tables is None else tables
        self._lines: dict[int, Line | None] = {}  # as far as asked since the last timing

    def learn(self, rows: int, tokens: int, seconds: float) -> None:
        """Take one timing."""
        table = self.tables.setdefault(rows, {})
        table[tokens] = table.pop(tokens, Samples())  # to the end: the order is that of the last timing
        table[tokens].add(seconds)
        if len(table) > _MOST_COUNTS:
            del table[next(iter(table))]
        self._lines.clear()

    def line(self, rows: int) -> Line | None:
        """Believed seconds by tokens for so many rows; None where too little is known.

        Between numbers of rows that are known a block of the same width is in between.
        """
        if rows not in self._lines:
            self._lines[rows] = self._build(rows)
        return self._lines[rows]

    def _build(self, rows: int) -> Line | None:
        known = sorted(count for count, table in self.tables.items() if _is_known(table))
        place = bisect_left(known, rows)
        if place < len(known) and known[place] == rows:
            return self._own(rows)
        if place in (0, len(known)):
            return None
        pair = known[place - 1 : place + 1]
        sides = [self._own(count) for count in pair]
        widths = sorted({tokens / count for count in pair for tokens in self.tables[count]})
        values = [
            Line(pair, [side.at(width * count) for count, side in zip(pair, sides, strict=True)]).at(rows)
            for width in widths
        ]
        return Line([width * rows for width in widths], values)

    def _own(self, rows: int) -> Line:
        table = self.tables[rows]
        counts = sorted(table)
        return Line(counts, believed_seconds([table[n] for n in counts]))


class DraftTables:
    """Samples of a round before the target's forward, per rows and slots; rounds without drafts (0) are kept apart.

    Args:
        tables: Rows to slots to samples.
    """

    def __init__(self, tables: dict[int, dict[int, Samples]] | None = None) -> None:
        self.tables = {} if tables is None else tables
        self._lines: dict[tuple[int, bool], Line | None] = {}  # rows, without drafts -> seconds by slots

    def learn(self, rows: int, slots: int, seconds: float) -> None:
        """Take one timing."""
        self.tables[rows] = self.tables.pop(rows, {})  # to the end: the order is that of the last timing
        self.tables[rows].setdefault(slots, Samples()).add(seconds)
        self._lines.pop((rows, slots == 0), None)
        if len(self.tables) > _MOST_ROWS:
            oldest = next(iter(self.tables))
            del self.tables[oldest]
            self._lines.pop((oldest, True), None)
            self._lines.pop((oldest, False), None)

    def seconds(self, rows: int, slots: int | None) -> float:
        """Believed seconds; `slots` None: the most measured; 0.0 where none were measured."""
        if (line := self._line(rows, is_plain=slots == 0)) is not None:
            return line.up_to_last(slots)
        lines = {count: self._line(count, is_plain=slots == 0) for count in sorted(self.tables)}
        known = {count: line.up_to_last(slots) for count, line in lines.items() if line is not None}
        return Line(list(known), list(known.values())).at(rows) if known else 0.0

    def _line(self, rows: int, *, is_plain: bool) -> Line | None:
        """Seconds by slots at one number of rows, measured there; None where nothing was."""
        key = (rows, is_plain)
        if key not in self._lines:
            table = self.tables.get(rows, {})
            widths = sorted(width for width in table if (width == 0) == is_plain)
            medians = [table[width].median for width in widths]
            self._lines[key] = Line(widths, medians) if widths else None
        return self._lines[key]


def _is_known(table: dict[int, Samples]) -> bool:
    return len(table) >= _LEAST_COUNTS and sum(map(len, table.values())) >= _LEAST_COUNTS * BELIEVED


__all__ = ["DraftTables", "RowTables"]
