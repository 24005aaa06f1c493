"""Llama-like drafters for engines that have Qwen3's layers only; the embedding is stored, as it is scaled along."""

from __future__ import annotations

from dataclasses import replace

from .record import Record
from .resolving import changed
from .target_tables import TargetTables
from .unnormed import as_normed

_NAME = "embed_tokens.weight"


def as_qwen3(record: Record, target: TargetTables | None) -> Record:
    """A record of family `llama` as one of family `qwen3`: the same drafts up to rounding.

    Args:
        record: What to change; of another family it is given back.
        target: Whose embedding is stored, scaled, where the drafter borrows it.

    Raises:
        ValueError: The embedding is needed and there is no target.
        OSError: The target has no weights to read.
    """
    if record["family"] != "llama":
        return record
    if not record["has_embed"] and target is None:
        raise ValueError(
            f"{record.source} borrows its embedding, and as Qwen3's layers want it, scaled, it has to be stored: name "
            "the target with `--target` (`target=`)."
        )
    found = as_normed(record)
    assert found.tensors is not None
    if not record["has_embed"] and target is not None:
        found.tensors[_NAME] = target.tables()[0]
    scale, rows = found["embed_scale"], found.tensors[_NAME]
    found.tensors[_NAME] = replace(rows, read=lambda: rows[...] * scale, transform=f"times {scale:g}")
    found.warnings.append(
        "Layers without norms of queries and keys are written as Qwen3's with norms that change nothing: the same "
        "drafts up to rounding (in bfloat16 attention scores are off by up to 0.4%), and the embedding is stored, "
        "scaled. Do not serve it in float16."
    )
    return changed(found, "scaled, stored", embed_scale=1.0, has_embed=True, raw_target_embedding=False)


__all__ = ["as_qwen3"]
