"""Drafter formats of other frameworks, read and written. One module per format."""

from __future__ import annotations

from types import ModuleType

from . import deepspec

FORMATS: dict[str, ModuleType] = {"deepspec": deepspec}

__all__ = ["FORMATS"]
