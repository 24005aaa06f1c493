"""Fitting a record to a layout with the target at hand: unknown sizes, borrowed tables, parts of zeros.

Each step changes how a drafter is stored, never what it computes.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from .record import Field, Record
from .stored import StoredTensor
from .target_tables import TargetTables

_ZERO_RANK = 8  # divisible by the usual numbers of tensor-parallel ranks
_PARTS = (("has_embed", "embed_tokens.weight", "embedding"), ("has_lm_head", "lm_head.weight", "LM head"))


def changed(record: Record, source: str, **values: Any) -> Record:
    """A copy with other values of some fields."""
    fields = {**record.fields, **{name: Field(value, source) for name, value in values.items()}}
    return replace(
        record, fields=fields, tensors=dict(record.tensors or {}), warnings=list(record.warnings),
        ignored=dict(record.ignored),
    )  # fmt: skip


def explicit(record: Record) -> Record:
    """The record with what our own layout leaves out or says of parts that are not there."""
    width = record["target_hidden_size"] or record["hidden_size"]
    has_bias = bool(record["enable_confidence_head"] and record["confidence_head_bias"])
    return changed(record, "rule of the format", target_hidden_size=width, confidence_head_bias=has_bias)


def fit_to_target(record: Record, target: TargetTables) -> Record:
    """The record with what only the target tells: its layers and vocabulary, what its embedding gives.

    Raises:
        ValueError: It is not the target of this drafter.
    """
    found = {
        "num_target_layers": target.num_hidden_layers, "vocab_size": target.vocab_size,
        "target_hidden_size": target.hidden_size,
    }  # fmt: skip
    known = {name: record[name] for name in found}
    for name, value in found.items():
        borrows = name != "vocab_size" or record.missing
        if known[name] not in (None, value) and borrows:
            raise ValueError(
                f"{record.source} was made for a target whose `{name}` is {known[name]}, {target.source} has {value}. "
                "Name the target it was trained for."
            )
    values: dict[str, Any] = {name: value for name, value in found.items() if known[name] is None}
    if not record["has_embed"] and not record["raw_target_embedding"]:
        values |= {"raw_target_embedding": True, "embed_scale": target.embedding_factor}
    return changed(record, f"the target {target.source}", **values)


def with_tables(record: Record, target: TargetTables) -> Record:
    """The record with copies of the target's tables where the drafter borrows them.

    Raises:
        ValueError, OSError: They cannot be read.
    """
    found = changed(record, f"the target {target.source}", has_embed=True, has_lm_head=True)
    found = changed(found, "the embedding is stored", raw_target_embedding=False)
    assert found.tensors is not None
    for (field, name, _), table in zip(_PARTS, target.tables(), strict=True):
        if not record[field]:
            found.tensors[name] = table
    return found


def without_tables(record: Record, target: TargetTables) -> Record:
    """The record without tables that are the target's own; others stay.

    Raises:
        ValueError, OSError: The target's cannot be read.
    """
    found = record
    for (field, name, part), table in zip(_PARTS, target.tables(), strict=True):
        own = (record.tensors or {}).get(name)
        if own is None or (field == "has_lm_head" and record["draft_vocab"] is not None):
            continue
        difference, is_exact = _difference(own, table)
        if difference:
            found.warnings.append(
                f"The drafter's {part} is not the target's (largest difference {difference:.3g}), so it stays."
            )
            continue
        found = changed(found, f"the same as that of the target {target.source}", **{field: False})
        if field == "has_embed":
            found = changed(found, "rows are borrowed as they are stored", raw_target_embedding=True)
        assert found.tensors is not None
        del found.tensors[name]
        if not is_exact:
            found.warnings.append(
                f"The drafter's {part} is the target's, rounded to {own.dtype}: left out, it is used in the dtype the "
                "target is loaded in, and logits differ by that rounding."
            )
    return found


def _difference(one: StoredTensor, other: StoredTensor) -> tuple[float, bool]:
    """Largest difference of two tables once the one of more digits is rounded to the other's dtype, and whether
    they are equal without that."""
    if one.shape != other.shape:
        return math.inf, False
    a, b = one[...], other[...]
    narrow = min(a.dtype, b.dtype, key=lambda dtype: torch.finfo(dtype).bits)
    largest, is_exact = 0.0, True
    rows = max(1, (1 << 22) // max(1, a.shape[-1]))
    for x, y in zip(a.split(rows), b.split(rows), strict=True):
        largest = max(largest, float((x.to(narrow).float() - y.to(narrow).float()).abs().max()))
        is_exact = is_exact and bool(torch.equal(x.double(), y.double()))
    return largest, is_exact


def with_zeros(record: Record) -> Record:
    """The record with a vanilla head and a confidence bias of zeros where it has none: both change nothing.

    Raises:
        ValueError: The vocabulary is not known.
    """
    found = record
    if record["enable_confidence_head"] and not record["confidence_head_bias"]:
        found = changed(found, "added, zero", confidence_head_bias=True)
        _add(found, "confidence_head.proj.bias", (1,))
    if not record["markov_rank"]:
        if record["vocab_size"] is None:
            raise ValueError(
                f"A head of zeros has a row per token of the target, and {record.source} does not say `vocab_size`: "
                "name the target with `--target` (`target=`)."
            )
        draft = record["draft_vocab"]
        rows = (record["vocab_size"], record["vocab_size"] if draft is None else len(draft))
        found = changed(found, "added, zeros", markov_rank=_ZERO_RANK, markov_head_type="vanilla")
        for name, count in zip(("markov_w1", "markov_w2"), rows, strict=True):
            _add(found, f"markov_head.{name}.weight", (count, _ZERO_RANK))
    return found


def _add(record: Record, name: str, shape: tuple[int, ...]) -> None:
    dtype = str(record["dtype"] or "float32").removeprefix("torch.")
    zeros = torch.zeros(1, dtype=getattr(torch, dtype)).expand(shape)
    assert record.tensors is not None
    record.tensors[name] = StoredTensor("none", name, dtype, shape, lambda: zeros, 0, "added, zeros")


__all__ = ["changed", "explicit", "fit_to_target", "with_tables", "with_zeros", "without_tables"]
