"""`DSparkDrafter.push_to_hub`: save, write the card, push."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import CommitInfo

from ..cards import write_card
from ..evaluation.report_files import REPORT_FILE
from ..peft_layers import carries_adapters
from .contents import CARD
from .upload import push_folder

Source = str | os.PathLike[str]


def push_drafter(
    drafter: Any,
    repo_id: str,
    *,
    card: Source | None,
    reports: Sequence[Source],
    max_shard_size: int | str,
    about: dict[str, Any],
    how: dict[str, Any],
) -> CommitInfo:
    """Push a drafter in memory.

    Args:
        drafter: A `DSparkDrafter`.
        repo_id: `owner/name`.
        card: A card that is written already; None: one is made of the drafter and `reports`.
        reports: Reports of `dspark eval` and `dspark demo`, which go along too.
        max_shard_size: Of the weights, as in `save_pretrained`.
        about: What else the card is made of: arguments of `cards.build_card`.
        how: Arguments of `push_folder`.

    Raises:
        ValueError: The drafter carries adapters, a report is not about it, or something must not be pushed.
    """
    if carries_adapters(drafter):
        raise ValueError(
            "This drafter carries adapters, and a repository holds a plain one. Push "
            "`copy.deepcopy(drafter).merge_and_unload()`, or the adapter with PEFT."
        )
    with TemporaryDirectory() as temporary:
        folder = Path(temporary) / repo_id.rpartition("/")[2]
        drafter.save_pretrained(folder, max_shard_size=max_shard_size)
        for report in reports:
            _copy(Path(report), folder)
        if card is None:
            write_card(folder, folder / CARD, reports=reports, repo_id=repo_id, **about)
        else:
            (folder / CARD).write_bytes(Path(card).read_bytes())
        return push_folder(folder, repo_id, **how)


def push_saved(folder: Source, *, repo_id: str | None = None, **how: Any) -> CommitInfo:
    """Push a folder that `save_pretrained` just wrote, with a card made of the drafter if it has none."""
    folder = Path(folder)
    repo_id = repo_id or folder.resolve().name
    if not (folder / CARD).exists():
        write_card(folder, folder / CARD, repo_id=repo_id)
    return push_folder(folder, repo_id, **how)


def _copy(report: Path, folder: Path) -> None:
    """A report beside the drafter; of a folder of `dspark eval` its report and plots."""
    sources = [report] if report.is_file() else [report / REPORT_FILE, *sorted(report.glob("*.png"))]
    for source in sources:
        if (folder / source.name).exists():
            raise ValueError(f"{source} cannot go along: another report is named {source.name} too. Rename one.")
        (folder / source.name).write_bytes(source.read_bytes())


__all__ = ["push_drafter", "push_saved"]
