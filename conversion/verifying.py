"""Whether a result is the drafter it was made from: same draft and confidence logits on fixed random contexts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from .record import SEMANTIC_FIELDS, Record
from .target_tables import TargetTables

_ROWS, _LONGEST = 2, 4096
_LARGEST_TABLE = 2**31  # numbers; four bytes each, twice
# Fields that decide nothing about drafts: a layout that does not hold one is told apart from one that changes it.
NOT_DRAFTING = (
    "target", "num_target_layers", "initializer_range", "attention_dropout", "confidence_temperatures", "dtype",
    "vocab_size", "max_position_embeddings",
)  # fmt: skip


class VerificationError(RuntimeError):
    """A written drafter is not the one it was made from; the message names the differences."""


@dataclass(frozen=True)
class Verification:
    """Largest absolute differences between source and result; None: there are no such numbers.

    Attributes:
        logits: Of the corrected draft logits.
        confidence: Of the confidence logits.
        tokens_equal: Whether the greedy drafts are the same.
        tolerance: What was allowed.
        dtype: That both were computed in, from weights in the result's dtype.
    """

    logits: float
    confidence: float | None
    tokens_equal: bool
    tolerance: float
    dtype: str = "float32"

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def differences(before: Record, after: Record) -> dict[str, tuple[Any, Any]]:
    """Semantic fields in which two records differ."""
    return {name: (before[name], after[name]) for name in SEMANTIC_FIELDS if before[name] != after[name]}


class _Table(nn.Embedding):
    """The target's embedding: rows times its own factor."""

    def __init__(self, rows: torch.Tensor, factor: float) -> None:
        super().__init__(*rows.shape, _weight=rows)
        self.embed_scale = factor

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Look ids up."""
        return super().forward(input) * self.embed_scale


class _StandIn(nn.Module):
    """What drafters borrow of a target: its tables, or random ones of its size."""

    def __init__(self, rows: torch.Tensor, head: torch.Tensor, factor: float) -> None:
        super().__init__()
        self.embedding = _Table(rows, factor)
        self.head = nn.Linear(head.shape[1], head.shape[0], bias=False)
        self.head.weight = nn.Parameter(head)

    def get_input_embeddings(self) -> nn.Module:
        """The embedding."""
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        """The LM head."""
        return self.head


@torch.no_grad()
def verify(
    source: Callable[[], Any], result: Callable[[], Any], target: TargetTables | None, *, tolerance: float
) -> Verification:
    """Compare the drafts of a source and a result.

    Args:
        source: Makes its drafter, with weights of the result's dtype in float32.
        result: Makes the result's, likewise.
        target: Whose tables are borrowed; None: random ones stand in.
        tolerance: Largest difference allowed; 0: none.

    Raises:
        VerificationError: They differ by more.
        ValueError: Tables that stand in for a target's would not go into memory.
    """
    one = source()
    generator = torch.Generator().manual_seed(20)
    vocab = one.config.vocab_size or one.config.mask_token_id + 1
    windows = [window for window in one.config.attention_windows or () if window]
    length = min(max([8, *windows]) + 2 * one.config.block_size, _LONGEST)
    states = torch.randn(_ROWS, length, one.config.context_width, generator=generator)
    anchors = torch.randint(vocab, (_ROWS,), generator=generator)
    if target is None and vocab * one.config.hidden_size > _LARGEST_TABLE:
        raise ValueError(
            f"Verification makes up tables for a vocabulary of {vocab} (`vocab_size`), which is too large. Name the "
            "target with `--target` (`target=`), whose tables are then used."
        )
    tables = _tables(target, vocab, one.config.hidden_size, generator)
    first = one.draft(anchors, states, target=tables)
    del one
    second = result().draft(anchors, states, target=tables)
    confidence = None
    if (first.confidence_logits is None) != (second.confidence_logits is None):
        raise VerificationError("Only one of source and result has confidence logits.")
    if first.confidence_logits is not None:
        confidence = _largest(first.confidence_logits, second.confidence_logits)
    same = torch.equal(first.token_ids, second.token_ids)
    found = Verification(_largest(first.logits, second.logits), confidence, same, tolerance)
    if not (found.logits <= tolerance and (found.confidence or 0.0) <= tolerance):
        raise VerificationError(
            f"The result is not the drafter it was made from: draft logits differ by up to {found.logits:.3g}, "
            f"confidence logits by {found.confidence or 0.0:.3g}, {tolerance:g} was allowed; greedy drafts are "
            f"{'the same' if same else 'others'}. Nothing was kept."
        )
    return found


def _tables(target: TargetTables | None, vocab: int, width: int, generator: torch.Generator) -> _StandIn:
    if target is None:
        rows = [torch.randn(vocab, width, generator=generator) for _ in range(2)]
        return _StandIn(rows[0], rows[1], 1.0)
    embedding, head = (table[...].float() for table in target.tables())
    return _StandIn(embedding, head, target.embedding_factor)


def _largest(one: torch.Tensor, other: torch.Tensor) -> float:
    """Largest difference; NaN counts as infinite."""
    if one.shape != other.shape:
        return float("inf")
    return float((one - other).abs().nan_to_num(nan=float("inf")).max())


__all__ = ["NOT_DRAFTING", "Verification", "VerificationError", "differences", "verify"]
