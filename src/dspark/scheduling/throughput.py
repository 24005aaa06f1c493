"""`ThroughputCurve`: seconds of one step by tokens in the target's forward, profiled once or learnt while decoding.

A profile fills the same windows of recent samples that `learn` adds to, so a curve of another day is corrected by the
rounds that use it. The raw curve is a staircase with real cliffs (a kernel that changes its tiling) and is kept as it
is; `envelope` beside it is the least time in which at least n tokens can be run.
"""

from __future__ import annotations

import copy
import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .curve_file import CurveKey, Document, read, write
from .row_tables import DraftTables, RowTables
from .samples import Line, Samples, believed_seconds, check_timing, envelope

_MOST_COUNTS = 512  # token counts kept per context; the one not seen for longest goes first


class ThroughputCurve:
    """Step times of a target and its drafter; call it with tokens to get steps per second.

    Between measured token counts the time is linear, and it goes on linearly beyond the last (see `samples.Line`). The
    same holds for context lengths and for rows and slots of the drafter's side. Times of a number of rows, kept at the
    shortest context, come before those of any rows where enough were taken.

    Args:
        key: What the times belong to; None where they are learnt and not kept.
    """

    def __init__(self, key: CurveKey | None = None) -> None:
        self.key = key
        self._target: dict[int, dict[int, Samples]] = {}  # context -> tokens -> seconds
        self._rows = RowTables()  # of the shortest context
        self._draft = DraftTables()
        self._lines: dict[int, Line] = {}  # context -> believed seconds by tokens

    # --- reading --------------------------------------------------------------------------------------------------

    @property
    def contexts(self) -> list[int]:
        """Context lengths measured, in tokens; times learnt without one lie under the first (0 if it is the only)."""
        return sorted(self._target)

    def token_counts(self, context: int | None = None) -> list[int]:
        """Token counts measured at a context length; None: the shortest."""
        return sorted(self._target.get(self._context(context), {}))

    def num_samples(self, tokens: int, context: int | None = None) -> int:
        """Timings kept of one token count: the recent ones, up to `samples.WINDOW`."""
        return len(self._target.get(self._context(context), {}).get(tokens, ()))

    def __call__(self, tokens: int | Sequence[int] | torch.Tensor) -> float | torch.Tensor:
        """Steps per second: a number for a number, float64 `[n]` for several."""
        if isinstance(tokens, int):
            return 1.0 / float(self.seconds(tokens))
        return self.at_counts(torch.as_tensor(tokens))

    def at_counts(self, tokens: torch.Tensor) -> torch.Tensor:
        """Steps per second of the target alone, float64 `[n]`, for `tokens` int64 `[n]`."""
        return 1.0 / torch.as_tensor(self.seconds(tokens))

    def seconds(
        self, tokens: int | Sequence[int] | torch.Tensor, context: int | None = None, *, rows: int | None = None
    ) -> float | torch.Tensor:
        """Seconds of the target's forward and what follows it.

        Args:
            tokens: In the forward, over all rows; at least 1.
            context: Tokens in the cache; None: the shortest measured.
            rows: Over how many rows, looked at where `context` is None; None: any.

        Returns:
            A number for a number, float64 `[n]` for several.

        Raises:
            ValueError: Nothing was measured, or a count below 1.
        """
        if not isinstance(tokens, int):
            return torch.from_numpy(self.seconds_of(np.asarray(tokens), context, rows=rows))
        if tokens < 1:
            raise _too_few(tokens)
        first = self._first_line(rows)
        if context is None or len(self._target) == 1:
            return first.at(tokens)
        return Line(self.contexts, [self._line(each).at(tokens) for each in self.contexts]).at(context)

    def seconds_of(self, tokens: np.ndarray, context: int | None = None, *, rows: int | None = None) -> np.ndarray:
        """`seconds` of many counts as arrays: float64 `[n]` for integers `[n]`."""
        first = self._first_line(rows)
        if tokens.min(initial=1) < 1:
            raise _too_few(int(tokens.min()))
        if context is None or len(self._target) == 1:
            return first.at_counts(tokens)
        return np.array([self.seconds(n, context) for n in tokens.tolist()], np.float64)

    def draft_seconds(self, rows: int, slots: int | None = None) -> float:
        """Seconds of a round before the target's forward; 0.0 where none were measured.

        Args:
            rows: Live rows.
            slots: Drafted slots per row; None: the most measured. Rounds without drafts (0) are kept apart.
        """
        return self._draft.seconds(rows, slots)

    def step_seconds(self, rows: int, tokens: int, slots: int | None = None) -> float:
        """Seconds of a whole round: `draft_seconds` and the target's forward over `tokens`."""
        return self.draft_seconds(rows, slots) + float(self.seconds(tokens, rows=rows))

    def points(self, context: int | None = None) -> list[tuple[int, float]]:
        """The staircase: measured token counts and their median seconds."""
        table = self._target.get(self._context(context), {})
        return [(tokens, table[tokens].median) for tokens in sorted(table)]

    def envelope(self, context: int | None = None) -> list[tuple[int, float]]:
        """Measured token counts and the least seconds in which at least so many were run; never falls."""
        points = self.points(context)
        return list(zip([n for n, _ in points], envelope([seconds for _, seconds in points]), strict=True))

    def uncertainty(self, tokens: int, context: int | None = None) -> float:
        """Relative standard error of `seconds(tokens)`; infinite where no count within a factor of two is known."""
        table = self._target.get(self._context(context), {})
        if tokens in table:
            return table[tokens].relative_error
        below = max((n for n in table if tokens / 2 <= n < tokens), default=None)
        above = min((n for n in table if tokens < n <= 2 * tokens), default=None)
        return max((table[n].relative_error for n in (below, above) if n is not None), default=math.inf)

    def has_near(self, tokens: int, context: int | None = None) -> bool:
        """Whether a count within a factor of two was measured, so that `uncertainty(tokens)` is finite."""
        if not self._target.get(self._context(context)):
            return False
        counts = self._line(self._context(context)).places
        first = bisect_left(counts, tokens / 2)
        return first < len(counts) and counts[first] <= 2 * tokens

    # --- learning -------------------------------------------------------------------------------------------------

    def learn(self, tokens: int, seconds: float, context: int | None = None, *, rows: int | None = None) -> None:
        """Take one timing of the target's forward over `tokens` tokens of `rows` rows (None: not known).

        Raises:
            ValueError: A count below 1, or seconds that are not positive and finite.
        """
        check_timing(tokens, seconds, "tokens", least=1)
        where = self._context(context)
        shortest = min(self._target, default=where)
        if rows is not None:
            check_timing(rows, seconds, "rows", least=1)
        if where < shortest:
            self._rows = RowTables()  # those were of a longer context
        if rows is not None and where <= shortest:
            self._rows.learn(rows, tokens, seconds)
        table = self._target.setdefault(where, {})
        table[tokens] = table.pop(tokens, Samples())  # to the end: the order is that of the last timing
        table[tokens].add(seconds)
        if len(table) > _MOST_COUNTS:
            del table[next(iter(table))]
        self._lines.pop(where, None)

    def learn_draft(self, rows: int, slots: int, seconds: float) -> None:
        """Take one timing of what comes before the target's forward, for `rows` rows of `slots` drafts (0: none).

        Raises:
            ValueError: A count below its least, or seconds that are not positive and finite.
        """
        check_timing(rows, seconds, "rows", least=1)
        check_timing(slots, seconds, "slots", least=0)
        self._draft.learn(rows, slots, seconds)

    @classmethod
    def profile(
        cls,
        measure: Callable[[int, int], Any],
        token_counts: Iterable[int],
        *,
        contexts: Iterable[int] = (0,),
        repeats: int = 5,
        key: CurveKey | None = None,
    ) -> ThroughputCurve:
        """Measure the target's side.

        Each shape runs once unmeasured; then all are timed in turns, `repeats` times, so that a machine that is slow
        for a while is slow for all of them.

        Args:
            measure: Called with (tokens, context); runs one forward and returns when it is done (a GPU is waited for).
            token_counts: Counts to measure.
            contexts: Context lengths to measure them at.
            repeats: Timings per shape.
            key: What the times belong to.

        Raises:
            ValueError: No counts, a count below 1, a context below 0 or fewer repeats than 1.
        """
        shapes = [(n, context) for context in sorted(set(contexts)) for n in sorted(set(token_counts))]
        if not shapes or min(shapes)[0] < 1 or min(context for _, context in shapes) < 0 or repeats < 1:
            raise ValueError(
                "A profile needs token counts of at least 1, contexts of at least 0 and at least one repeat, got "
                f"(tokens, context) {shapes} and {repeats} repeats."
            )
        curve = cls(key)
        for shape in shapes:
            measure(*shape)
        for _ in range(repeats):
            for tokens, context in shapes:
                start = time.perf_counter()
                measure(tokens, context)
                seconds = time.perf_counter() - start
                curve._target.setdefault(context, {}).setdefault(tokens, Samples()).add(seconds)
        return curve

    def copy(self) -> ThroughputCurve:
        """A curve that learns on its own from here."""
        return copy.deepcopy(self)

    # --- files ----------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """All samples as JSON-able values."""
        tables = (self._target, self._rows.tables, self._draft.tables)
        values = ({a: {b: list(s.values) for b, s in row.items()} for a, row in table.items()} for table in tables)
        return Document(self.key, *values).to_json()

    @classmethod
    def from_json(cls, data: Any) -> ThroughputCurve:
        """The curve of `to_json`.

        Raises:
            ValueError: `data` is not one; names the entry.
        """
        document = Document.from_json(data)
        curve = cls(document.key)
        tables = (document.target, document.rows, document.draft)
        curve._target, rows, draft = (
            {a: {b: Samples(s) for b, s in row.items()} for a, row in table.items()} for table in tables
        )
        curve._rows, curve._draft = RowTables(rows), DraftTables(draft)
        return curve

    def save(self, path: str | Path) -> None:
        """Write a JSON file; an interruption leaves what was there.

        Raises:
            OSError: It cannot be written.
        """
        write(Path(path), self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> ThroughputCurve:
        """Read what `save` wrote.

        Raises:
            ValueError: The file is no curve; names it and the entry.
            OSError: It cannot be read.
        """
        return read(Path(path), cls.from_json)

    # --- inside ---------------------------------------------------------------------------------------------------

    def _context(self, context: int | None) -> int:
        return min(self._target, default=0) if context is None else context

    def _first_line(self, rows: int | None = None) -> Line:
        """Of the shortest context, and of so many rows where that is known."""
        if not self._target:
            raise ValueError("The curve is empty: profile it (`dspark profile`), or give `learn` some rounds first.")
        own = None if rows is None else self._rows.line(rows)
        return self._line(self._context(None)) if own is None else own

    def _line(self, context: int) -> Line:
        if context not in self._lines:
            table = self._target[context]
            counts = sorted(table)
            self._lines[context] = Line(counts, believed_seconds([table[n] for n in counts]))
        return self._lines[context]


def _too_few(tokens: int) -> ValueError:
    return ValueError(f"`tokens` must be at least 1 (each row runs its anchor), got {tokens}.")


__all__ = ["ThroughputCurve"]
