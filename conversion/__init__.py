"""Drafter formats: each is read into one lossless record, from which models are made and other formats written."""

from __future__ import annotations

from .checkpoint import Checkpoint, check_weights, find_gguf, open_checkpoint
from .converting import ConversionOptions, ConversionReport, VerificationError, convert
from .layout import check_finite, check_tensors, expected_tensors
from .record import SEMANTIC_FIELDS, Field, LayerSight, Record
from .registry import FORMATS, WRITERS, Format, is_recognised, read_record
from .stored import StoredTensor
from .target_tables import TargetTables, open_target
from .writing import Writer

__all__ = [
    "FORMATS",
    "SEMANTIC_FIELDS",
    "WRITERS",
    "Checkpoint",
    "ConversionOptions",
    "ConversionReport",
    "Field",
    "Format",
    "LayerSight",
    "Record",
    "StoredTensor",
    "TargetTables",
    "VerificationError",
    "Writer",
    "check_finite",
    "check_tensors",
    "check_weights",
    "convert",
    "expected_tensors",
    "find_gguf",
    "is_recognised",
    "open_checkpoint",
    "open_target",
    "read_record",
]
