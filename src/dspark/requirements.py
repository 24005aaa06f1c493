"""Refuses an older transformers when the package is imported, before a name it lacks is missed somewhere inside.

A newer one is let in: `compat.check_generation_hooks` looks at what the decoding loop stands on.
"""

from __future__ import annotations

import re

import transformers

OLDEST, NEWEST = "5.15", "5.24"  # as pyproject.toml has them; the newest is the last that was tested


def check_transformers(version: str) -> None:
    """Refuse a version of transformers.

    Raises:
        ImportError: It is older than `OLDEST`; says how to get one that is not.
    """
    found, least = ([int(part) for part in re.findall(r"\d+", text)[:2]] for text in (version, OLDEST))
    if found < least:
        raise ImportError(
            f"dspark needs transformers {OLDEST} to {NEWEST}, found {version}, whose caches and generation hooks are "
            f"others: pip install 'transformers>={OLDEST},<5.{int(NEWEST.split('.')[1]) + 1}'"
        )


check_transformers(transformers.__version__)

__all__ = ["NEWEST", "OLDEST", "check_transformers"]
