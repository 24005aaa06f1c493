"""A small real tokenizer for the tiny target: 128 tokens of one to three letters, joined without spaces."""

from __future__ import annotations

from functools import lru_cache
from itertools import product

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tests.decoding.pair import VOCAB

_LETTERS = "abcdefghijkl"


@lru_cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-pair encoding over twelve letters; id 0 is padding."""
    pieces = ["<pad>", *_LETTERS]
    merges = []
    for left, right in product(_LETTERS, repeat=2):
        if len(pieces) < VOCAB - 25:
            merges.append((left, right))
            pieces.append(left + right)
    for pair in list(pieces[13:]):
        if len(pieces) < VOCAB:
            merges.append((pair, "l"))
            pieces.append(pair + "l")
    model = models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges)
    built = Tokenizer(model)
    built.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=built, pad_token="<pad>")


__all__ = ["tokenizer"]
