"""One tensor of a checkpoint, known by its header and read when asked for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

FLOATS = ("float64", "float32", "float16", "bfloat16")
_PIECE = 1 << 20


@dataclass
class StoredTensor:
    """A tensor of a file.

    It can stand in a state dict: transformers reads `tensor[...]` when it comes to it.

    Attributes:
        file: Name of the file in the checkpoint.
        key: Its name there.
        dtype: As torch names it, or the name of a quantised block type.
        shape: As `DSparkDrafter` has it, `[out, in]`.
        read: Reads it.
        num_bytes: Size in the file.
        transform: What is done to the stored numbers; empty: nothing.
        is_finite: False once it was read and a number was NaN or infinite.
    """

    file: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor] = field(repr=False)
    num_bytes: int
    transform: str = ""
    is_finite: bool = True

    def __getitem__(self, _index: object) -> torch.Tensor:
        tensor = self.read()
        if not is_finite(tensor):
            self.is_finite = False
        return tensor

    def get_shape(self) -> list[int]:
        """As a safetensors slice gives it."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """As a safetensors slice gives it."""
        return self.dtype

    @property
    def num_elements(self) -> int:
        """Numbers it holds."""
        return math.prod(self.shape)

    def transformed(self, name: str, tensor: torch.Tensor) -> StoredTensor:
        """The same place in the file with other, already computed numbers."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        return replace(
            self, dtype=dtype, shape=tuple(tensor.shape), read=lambda: tensor, transform=name, is_finite=True
        )


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no number of a tensor is NaN or infinite; looked at in pieces, as the test needs room of its own."""
    if not tensor.is_floating_point():
        return True
    parts = tensor.reshape(-1).split(_PIECE)
    # Numbers of one byte have no such test of their own.
    return all(bool((part.float() if part.element_size() == 1 else part).isfinite().all()) for part in parts)


__all__ = ["FLOATS", "StoredTensor", "is_finite"]
