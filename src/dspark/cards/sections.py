"""What an author adds to a card: a Markdown file whose head names metadata and whose sections join the card's own."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from yaml import YAMLError

# Metadata an author may set; the rest is read from the drafter.
METADATA = ("license", "base_model", "datasets", "language", "license_name", "license_link", "tags")


@dataclass
class Notes:
    """An author's notes.

    Attributes:
        metadata: Fields of `METADATA`.
        sections: Title to text; a title of the card's own adds to that section, another makes one.
    """

    metadata: dict[str, Any] = field(default_factory=dict)
    sections: dict[str, str] = field(default_factory=dict)


def read_notes(path: str | Path) -> Notes:
    """Notes of a Markdown file: `---`, YAML metadata, `---`, then sections under `##` titles; both may be missing.

    Raises:
        ValueError: Metadata that is no YAML mapping or sets another field, text before the first title, or a title
            twice.
        OSError: The file cannot be read.
    """
    text = Path(path).read_text(encoding="utf-8")
    metadata, body = _metadata(path, text) if text.startswith("---\n") else ({}, text)
    before, *parts = re.split(r"(?m)^## +(.+)$", body)
    if before.strip():
        raise ValueError(f"{path} has text before its first `## title`: {before.strip()[:60]!r}. Put it under one.")
    titles = [title.strip() for title in parts[::2]]
    if twice := {title for title in titles if titles.count(title) > 1}:
        raise ValueError(f"{path} has {', '.join(sorted(twice))} twice. Put the texts under one title.")
    return Notes(metadata, {title: part.strip() for title, part in zip(titles, parts[1::2], strict=True)})


def _metadata(path: str | Path, text: str) -> tuple[dict[str, Any], str]:
    try:
        card = ModelCard(text)
    except (YAMLError, ValueError, TypeError) as error:
        raise ValueError(f"The head of {path} is not YAML ({' '.join(str(error).split())}).") from error
    found = card.data.to_dict()
    if unknown := [name for name in found if name not in METADATA]:
        raise ValueError(f"The head of {path} may set {', '.join(METADATA)}, got {', '.join(unknown)}.")
    return found, card.text


__all__ = ["METADATA", "Notes", "read_notes"]
