"""Tensors of a GGUF file that a record in llama.cpp's terms becomes: their names, shapes and GGUF types."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from .names import GGUF_DFLASH
from .record import Record
from .unnormed import is_scaled

DTYPES = ("f32", "bf16", "f16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
_LARGEST = 65504  # of float16, in which block types have their scales
_BLOCK = 32  # numbers of a row that a block type holds together
_TABLES = ("token_embd.weight", "output.weight", "markov_w1.weight", "markov_w2.weight")


class Part(NamedTuple):
    """One tensor of the file; `kind` is its GGUF type, `read` gives its numbers."""

    name: str
    shape: tuple[int, ...]
    kind: str
    read: Callable[[], torch.Tensor]


def parts(record: Record, dtype: str) -> Iterator[Part]:
    """Tensors of the file, matrices in one of `DTYPES`."""
    for canonical, stored in (record.tensors or {}).items():
        name = "d2t" if canonical == "draft_token_ids" else GGUF_DFLASH.stored(canonical)
        kind = _kind(name, stored.shape, dtype)
        if kind not in ("F32", "I64") and is_scaled(record, canonical):
            kind = "BF16"  # float16, and the float16 scales of block types, would overflow
        yield Part(name, stored.shape, kind, lambda stored=stored: stored[...])
    factors = record["rope_parameters"].get("long_factor")
    if factors is not None:
        yield Part("rope_freqs.weight", (len(factors),), "F32", lambda: torch.tensor(factors))


def _kind(name: str, shape: tuple[int, ...], dtype: str) -> str:
    """GGUF type of a tensor, as llama.cpp's converter chooses it; tables over the vocabulary keep eight bits."""
    if name == "d2t":
        return "I64"
    if len(shape) == 1 or name.endswith("_norm.weight"):
        return "F32"
    if not dtype.startswith("q"):
        return dtype.upper()
    if shape[-1] % _BLOCK:
        return "F16"
    return "Q8_0" if name in _TABLES else dtype.upper()


def as_bytes(gguf: Any, part: Part) -> np.ndarray[Any, Any]:
    """Numbers of a tensor as they stand in the file.

    Raises:
        ValueError: Some are too large for its type.
    """
    tensor = part.read()
    if part.kind == "I64":
        return tensor.long().numpy()
    numbers = tensor.float().contiguous().numpy()
    if part.kind not in ("F32", "BF16") and float(np.abs(numbers).max()) > _LARGEST:
        raise ValueError(
            f"{part.name} has numbers beyond {_LARGEST:,}, which {part.kind} cannot hold. Write it as bf16 or f32."
        )
    return gguf.quants.quantize(numbers, gguf.GGMLQuantizationType[part.kind])


__all__ = ["DTYPES", "Part", "as_bytes", "parts"]
