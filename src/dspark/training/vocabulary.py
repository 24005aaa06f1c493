"""Choices of token ids: the mask token that fills a block, and a reduced draft vocabulary."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from ..plain_decoding import eos_ids
from ..target import describe, unwrap
from .features import vocabulary_rows


class MaskChoice(NamedTuple):
    """A mask token and why it was taken."""

    token_id: int
    reason: str


def choose_mask_token(target: PreTrainedModel, tokenizer: Any = None, token_id: int | None = None) -> MaskChoice:
    """The id that fills the slots after the anchor: one with an embedding row that never occurs in text.

    In this order: the id given, the tokenizer's mask token, the first embedding row behind the tokenizer's vocabulary,
    a special token that neither plays a role (bos, eos, pad, unk) nor stands in the chat template (the highest).

    Args:
        target: Its embedding must have the row.
        tokenizer: The target's tokenizer; may be None when `token_id` is given.
        token_id: The user's own choice.

    Raises:
        ValueError: The id is outside the embedding or ends texts, or nothing suitable is found.
    """
    rows, ends = vocabulary_rows(target), eos_ids(target)
    if token_id is not None:
        if not 0 <= token_id < rows:
            raise ValueError(
                f"`mask_token_id` {token_id} has no row in the embedding of {describe(unwrap(target))} ({rows} rows)."
            )
        if token_id in ends:
            raise ValueError(
                f"`mask_token_id` {token_id} is an end-of-sequence id of {describe(unwrap(target))} ({sorted(ends)}). "
                "A padding token often equals it. Choose an id that never occurs in text."
            )
        return MaskChoice(token_id, "given")
    if tokenizer is None:
        raise ValueError(
            "`mask_token_id` is missing and there is no tokenizer to find one. Pass the tokenizer, or an id with a "
            f"row in the target's embedding (below {rows}) that never occurs in text."
        )
    return _find_mask_token(rows, ends, tokenizer)


def _find_mask_token(rows: int, ends: set[int], tokenizer: Any) -> MaskChoice:
    known = tokenizer.mask_token_id
    if known is not None and known < rows and known not in ends:
        return MaskChoice(known, f"the tokenizer's mask token {tokenizer.mask_token!r}")
    if len(tokenizer) < rows:
        return MaskChoice(len(tokenizer), f"first embedding row behind the tokenizer's {len(tokenizer)} tokens")
    template = tokenizer.chat_template
    text = template if isinstance(template, str) else " ".join((template or {}).values())
    taken = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id, *ends}
    free = [
        (token_id, token.content)
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if token.special and token_id < rows and token_id not in taken and token.content not in text
    ]
    if not free:
        raise ValueError(
            "No token is free to be the mask: the tokenizer has no mask token, its vocabulary fills the embedding, "
            "and every special token is in use. Pass `mask_token_id`: an id that never occurs in text."
        )
    token_id, content = max(free)
    return MaskChoice(token_id, f"special token {content!r}, in no role and not in the chat template")


def draft_vocab_from_counts(token_counts: torch.Tensor, size: int, always: Iterable[int] = ()) -> list[int]:
    """The `size` most frequent tokens, sorted; ties go to the lower id.

    Args:
        token_counts: int64 `[V]`, how often the target wrote each token.
        size: Tokens of the draft vocabulary.
        always: Ids kept whatever their count (end-of-sequence and special tokens).

    Raises:
        ValueError: `size` is out of range, or an id in `always` is.
    """
    rows, kept = token_counts.shape[0], sorted(set(always))
    if not max(len(kept), 1) <= size <= rows:
        raise ValueError(
            f"The draft vocabulary must have between {max(len(kept), 1)} (the ids always kept) and {rows} (the "
            f"target's) tokens, got {size}."
        )
    if kept and not 0 <= kept[0] <= kept[-1] < rows:
        raise ValueError(f"Ids to keep must lie in 0..{rows - 1}, got {kept}.")
    ranked = token_counts.clone()
    ranked[kept] = torch.iinfo(torch.int64).max
    return sorted(ranked.argsort(descending=True, stable=True)[:size].tolist())


def check_draft_vocab(token_ids: Sequence[int], rows: int) -> list[int]:
    """Ids of a draft vocabulary, checked.

    Raises:
        ValueError: They are not strictly increasing ids below `rows`.
    """
    ids = list(token_ids)
    if not ids or ids[0] < 0 or ids[-1] >= rows or any(b <= a for a, b in pairwise(ids)):
        raise ValueError(
            f"`draft_vocab` must be strictly increasing target ids in 0..{rows - 1}, got {len(ids)} ids "
            f"{ids[:3]}..{ids[-3:]}. `draft_vocab_from_counts` makes such a list."
        )
    return ids


__all__ = ["MaskChoice", "check_draft_vocab", "choose_mask_token", "draft_vocab_from_counts"]
