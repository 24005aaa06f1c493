"""A trace in a terminal: the text in its rounds, refused drafts beside what replaced them, and the figures.

Nothing is told by colour alone, so it also reads in a pipe: rounds end at a bar, a refused draft stands struck out in
brackets before the token that took its place.
"""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..round_trace import Kind
from .figures import Figures, figures
from .file import Trace
from .page import title
from .tokens import laid_out, shown

_STYLES: dict[Kind, str] = {
    "first": "italic",
    "accepted": "underline blue",
    "recovered": "bold red",
    "bonus": "underline2 green",
}


def terminal_view(trace: Trace) -> RenderableType:
    """What `rich` prints of a trace."""
    known = figures(trace)
    legend = Text.assemble(
        ("first", _STYLES["first"]), "  ", ("accepted draft", _STYLES["accepted"]),
        "  [", ("refused draft", "strike"), "]", ("recovered", _STYLES["recovered"]), "  ",
        ("bonus", _STYLES["bonus"]), "  | end of a round",
    )  # fmt: skip
    tables = [_lengths(known), _steps(known)] if known.num_rounds else []
    return Group(Text(title(trace), style="bold"), legend, Text(), _text(trace), Text(), _summary(known), *tables)


def _text(trace: Trace) -> Text:
    """The answer; texts go in as text, so nothing in them is read as markup or reaches the terminal as a command."""
    first = trace.row.first_id
    text = Text.assemble((laid_out(trace.texts[first], first), _STYLES["first"]), ("|", "dim"))
    for entry in trace.row.rounds:
        for place, (token, kind) in enumerate(zip(entry.emitted_ids, entry.kinds(), strict=True)):
            if kind == "recovered":
                refused = entry.draft_ids[place]
                text.append("[", "dim").append(shown(trace.texts[refused], refused), "strike").append("]", "dim")
            text.append(laid_out(trace.texts[token], token), _STYLES[kind])
        text.append("|", "dim")
    return text


def _summary(known: Figures) -> Text:
    return Text(
        f"{known.num_tokens} tokens, {known.num_rounds} rounds, accepted length {known.accepted_length:.2f}, "
        f"{known.num_accepted} of {known.num_verified} verified drafts accepted"
    )


def _lengths(known: Figures) -> Table:
    table = Table()
    for name in ("drafts", "rounds that verified as many", "rounds that accepted as many"):
        table.add_column(name, justify="right")
    for drafts, counts in enumerate(zip(known.verified_lengths, known.accepted_lengths, strict=True)):
        table.add_row(str(drafts), *map(str, counts))
    return table


def _steps(known: Figures) -> Table:
    table = Table()
    for name, justify in (("step", "left"), ("ms per round", "right"), ("share of time", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for step in known.steps:
        table.add_row(step.name, f"{step.milliseconds:.2f}", f"{step.share:.1%}")
    return table


__all__ = ["terminal_view"]
