"""Model cards of drafters, made from the drafter's own files."""

from .card import TAGS, build_card, write_card
from .sections import METADATA, Notes, read_notes

__all__ = ["METADATA", "TAGS", "Notes", "build_card", "read_notes", "write_card"]
