"""A model card made from what is known: the drafter, its reports, its training, and an author's notes.

Every figure comes from a report of `dspark eval` or `dspark demo`; what no file says is left out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import ModelCard, ModelCardData

from dspark.conversion import Record, check_tensors

from ..files import write_atomically
from ..hub import read_record
from .recipe import recipe_section
from .reports import num_parameters, report_section
from .sections import Notes, read_notes

TAGS = ("assistant", "speculative-decoding", "dspark")
_TRAINING = "training.json"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HEADS = {"vanilla": "Markov", "gated": "gated Markov", "rnn": "recurrent"}
_WRITTEN_BY = "Written by `dspark card`: change the reports or the notes, not this file."


class Section(NamedTuple):
    """A part of the card under a title of its own."""

    title: str
    text: str


def build_card(
    folder: str | Path,
    *,
    reports: Sequence[str | Path] = (),
    notes: str | Path | None = None,
    repo_id: str | None = None,
    base_model: str | None = None,
    license: str | None = None,
    tags: Sequence[str] = (),
) -> str:
    """The card of a drafter as Markdown with metadata.

    Args:
        folder: The drafter's, with `training.json` where `dspark train` wrote it.
        reports: Files of `dspark eval` (or its folder) and of `dspark demo --json`.
        notes: An author's file; see [`read_notes`].
        repo_id: What users load the drafter by; None: the folder's name.
        base_model: Hub id of the target; None: the notes', or the one the drafter was trained for, if it is one.
        license: Of the drafter; None: the notes'.
        tags: More tags.

    Raises:
        ValueError: No drafter, or a report or file that is not about it; names the file.
        OSError: A file cannot be read.
    """
    folder = Path(folder)
    record = read_record(folder)
    check_tensors(record, record.to_config())
    written = Notes() if notes is None else read_notes(notes)
    trained_for = (record["target"] or {}).get("name")
    metadata: dict[str, Any] = {**written.metadata}
    metadata |= {"base_model": base_model} if base_model else {}
    metadata |= {"license": license} if license else {}
    if "base_model" not in metadata and trained_for and _HUB_ID.fullmatch(trained_for):
        metadata["base_model"] = trained_for
    target = metadata.get("base_model")
    target = target[0] if isinstance(target, list) else target
    tags = list(dict.fromkeys([*TAGS, *metadata.pop("tags", ()), *tags]))
    card = ModelCard.from_template(
        ModelCardData(library_name="dspark", tags=tags, **metadata),
        template_str=(resources.files("dspark.cards") / "template.md").read_text(encoding="utf-8"),
        target=target,
        target_name=str(target or trained_for or "an unnamed target").rpartition("/")[2],
        place=repo_id or folder.resolve().name,
        has_chat_template=(record["target"] or {}).get("chat_template_hash") is not None,
        shape=_shape(record),
        sections=_sections(folder, record, reports, written),
        written_by=_WRITTEN_BY,
    )
    return str(card).strip() + "\n"


def write_card(folder: str | Path, out: str | Path, **about: Any) -> None:
    """Write [`build_card`] of `folder` to a file, whole or not at all; `about` are its other arguments."""
    text = build_card(folder, **about)
    write_atomically(Path(out), lambda path: path.write_text(text, encoding="utf-8"))


def _sections(folder: Path, record: Record, reports: Sequence[str | Path], notes: Notes) -> list[Section]:
    """The card's own sections, each with what the notes add to it, then the notes' own; empty ones are left out."""
    own = {
        "Figures": "\n\n".join(report_section(path, record) for path in reports),
        "Data and recipe": recipe_section(folder / _TRAINING),
        "Limits": "\n".join(f"- {limit}" for limit in _limits(record)),
        "Licence": "",
    }
    both = {title: "\n\n".join(filter(None, (text, notes.sections.get(title)))) for title, text in own.items()}
    both["Limits"] = both["Limits"].replace("\n\n-", "\n-")  # one list
    both |= {title: text for title, text in notes.sections.items() if title not in own}
    return [Section(title, text) for title, text in both.items() if text]


def _shape(record: Record) -> str:
    """What the drafter is made of, in two sentences."""
    layers = record["num_hidden_layers"]
    head = record["markov_head_type"]
    parts = [f"{layers} layer{'s' if layers > 1 else ''}"]
    parts += [f"a rank-{record['markov_rank']} {_HEADS[head]} head"] if head in _HEADS else []
    parts += ["a confidence head"] if record["enable_confidence_head"] else []
    made_of = " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
    vocabulary = record["draft_vocab"]
    over = "" if vocabulary is None else f", over a reduced vocabulary of {len(vocabulary):,} tokens"
    dtypes = sorted({t.dtype for name, t in (record.tensors or {}).items() if name != "draft_token_ids"})
    stored = f"{num_parameters(record) / 1e6:.1f} M stored parameters in {' and '.join(dtypes)}"
    borrowed = " and ".join(record.missing)
    sentences = [f"It drafts {record.num_draft_tokens} tokens per round with {made_of}{over}; {stored}."]
    sentences += [f"It borrows the target's {borrowed}."] if borrowed else []
    return " ".join(sentences)


def _limits(record: Record) -> list[str]:
    limits = []
    if name := (record["target"] or {}).get("name"):
        limits.append(
            f"Trained for {name}. On other weights of it the output stays exact and acceptance may differ; the "
            "pairing check says so."
        )
    if record["enable_confidence_head"] and not record["confidence_temperatures"]:
        limits.append("The confidence is not calibrated (`dspark calibrate`).")
    return limits


__all__ = ["TAGS", "build_card", "write_card"]
