"""Drafter formats of other frameworks: each is read into one lossless record, from which all else is made."""

from __future__ import annotations

from .checkpoint import Checkpoint, check_index, find_gguf, open_checkpoint
from .layout import check_finite, check_tensors, expected_tensors
from .record import SEMANTIC_FIELDS, Field, LayerSight, Record
from .registry import FORMATS, Format, is_recognised, read_record
from .stored import StoredTensor

__all__ = [
    "FORMATS",
    "SEMANTIC_FIELDS",
    "Checkpoint",
    "Field",
    "Format",
    "LayerSight",
    "Record",
    "StoredTensor",
    "check_finite",
    "check_index",
    "check_tensors",
    "expected_tensors",
    "find_gguf",
    "is_recognised",
    "open_checkpoint",
    "read_record",
]
