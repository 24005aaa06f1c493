"""`dspark push`: a drafter's folder to the Hub, or a look at what would be sent."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from ..publishing import Plan, plan_push, push_folder
from .common import BAD_INPUT, bad_input_exits, check_source, err, out, print_json


def push(
    folder: Annotated[Path, typer.Argument(help="Folder of the drafter, with its card.")],
    repo_id: Annotated[str, typer.Argument(help="Where to: owner/name on the Hub; made if missing.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List what would be sent and refused; send nothing.")
    ] = False,
    curve: Annotated[
        Path | None, typer.Option(help="Step curve of `dspark profile`, to go along as curve.json.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch; made if missing.")] = None,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request instead of committing.")] = False,
    message: Annotated[str, typer.Option(help="Of the commit.")] = "Upload DSpark drafter",
    as_json: Annotated[bool, typer.Option("--json", help="Print what was or would be sent as JSON.")] = False,
) -> None:
    """Push a drafter to the Hub: weights, config, card, reports, and custom_generate/ so that `generate` finds it.

    Refused, each with its line: no card, pickles, weights that do not load, local paths, user names and tokens in
    texts. Log in with `hf auth login`, or set HF_TOKEN.

    Example: dspark push my-drafter me/my-drafter --dry-run

    Exit codes: 0 sent (or nothing stands in the way), 2 refused, or bad input.
    """
    with bad_input_exits():
        check_source(str(folder))
        plan = plan_push(folder, repo_id, curve=curve)
    if not as_json:
        _show(plan)
    elif dry_run or plan.refusals:
        print_json(_facts(plan))
    if plan.refusals:
        raise typer.Exit(BAD_INPUT)
    if dry_run:
        return
    with bad_input_exits():
        commit = push_folder(
            folder, repo_id, curve=curve, private=private or None, revision=revision, create_pr=create_pr,
            commit_message=message,
        )  # fmt: skip
    if as_json:
        print_json({**_facts(plan), "commit": commit.commit_url})
    else:
        out.print(f"{commit.pr_url or commit.commit_url}", highlight=False, soft_wrap=True)


def _facts(plan: Plan) -> dict[str, Any]:
    return {
        "files": [{"path": file.path, "bytes": file.size, "note": file.note} for file in plan.files],
        "left_out": plan.left_out,
        "refused": plan.refusals,
    }


def _show(plan: Plan) -> None:
    table = Table(title=f"{len(plan.files)} files, {plan.size:,} bytes")
    for column in ("file", "bytes", ""):
        table.add_column(column, justify="right" if column == "bytes" else "left", overflow="fold")
    for file in plan.files:
        table.add_row(file.path, f"{file.size:,}", file.note)
    out.print(table)
    for path in plan.left_out:
        out.print(
            f"left out, no part of a drafter: {path}", style="dim", markup=False, highlight=False, soft_wrap=True
        )
    for reason in plan.refusals:
        err.print(f"refused: {reason}", style="red", markup=False, highlight=False, soft_wrap=True)


__all__ = ["push"]
