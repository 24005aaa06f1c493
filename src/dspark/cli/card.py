"""`dspark card`: a drafter's model card, with figures from its reports alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from huggingface_hub import ModelCard

from ..cards import build_card
from ..files import write_atomically
from .common import bad_input_exits, check_out_file, check_source, err, out


def card(
    drafter: Annotated[Path, typer.Argument(help="Folder of the drafter, in any format that can be read.")],
    report: Annotated[
        list[Path],
        typer.Option(
            "--report",
            "--eval",
            help="Report to take figures from: a file of `dspark eval` or `dspark demo --json`, or the folder of "
            "`dspark eval --out`. Repeatable. None: a card without figures.",
        ),
    ] = [],  # noqa: B006 - typer reads it, nothing changes it
    notes: Annotated[
        Path | None,
        typer.Option(
            help="Markdown of your own: YAML metadata between --- lines (license, datasets, ...), then ## sections. "
            "Those named Figures, Data and recipe, Limits, Licence join the card's."
        ),
    ] = None,
    repo_id: Annotated[
        str | None, typer.Option(help="Hub id or path in the card's snippets. Default: the folder's name.")
    ] = None,
    base_model: Annotated[
        str | None, typer.Option(help="Hub id of the target. Default: the one the drafter was trained for.")
    ] = None,
    license: Annotated[str | None, typer.Option(help="Licence of the drafter, by its Hub name (apache-2.0).")] = None,
    out_file: Annotated[
        Path | None, typer.Option("--out", help="File to write; without it the card is printed.")
    ] = None,
) -> None:
    """Write a drafter's model card: what it is, a snippet that runs, figures, training, limits, metadata for the Hub.

    Figures come from report files alone, and only from those that were taken with these very weights; how it was
    trained comes from training.json in its folder. What no file says is left out.

    Example: dspark card my-drafter --report evaluation --license apache-2.0 --out my-drafter/README.md

    Exit codes: 0 written, 2 bad input (no drafter, a report that is damaged or about another drafter, ...).
    """
    with bad_input_exits():
        check_source(str(drafter))
        if out_file is not None:
            check_out_file(out_file)
        text = build_card(
            drafter, reports=report, notes=notes, repo_id=repo_id, base_model=base_model, license=license
        )
        if out_file is None:
            out.file.write(text)
        else:
            write_atomically(out_file, lambda path: path.write_text(text, encoding="utf-8"))
    data = ModelCard(text).data
    lacking = [f"--{name.replace('_', '-')}" for name in ("base_model", "license") if not getattr(data, name, None)]
    if lacking:
        err.print(f"The card lacks what {' and '.join(lacking)} would say; the Hub shows it.", style="yellow")


__all__ = ["card"]
