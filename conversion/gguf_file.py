"""GGUF files by the package `gguf`: metadata as plain values, tensors dequantised when they are read."""

from __future__ import annotations

import importlib
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .stored import StoredTensor

# What the package raises for bytes that make no sense.
_OF_DAMAGE = (ValueError, IndexError, KeyError, ArithmeticError, MemoryError, TypeError, AttributeError)
_HEADER = struct.Struct("<4sIQQ")  # magic, version, number of tensors, number of keys
# The shortest entry a header can hold: name length, one letter, dimensions, one extent, type, offset; and for a key
# its name length, one letter, type, one byte of value.
_SHORTEST_TENSOR, _SHORTEST_KEY = 8 + 1 + 4 + 8 + 4 + 8, 8 + 1 + 4 + 1
_PLAIN = {
    "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32", "F64": "float64",
    "I16": "int16", "I8": "int8",
}  # fmt: skip


def open_gguf(path: str) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Metadata and tensors of a GGUF file.

    Raises:
        ImportError: The package `gguf` is not installed.
        OSError: The file is damaged; found before anything is allocated.
    """
    gguf, reader = gguf_package(path), gguf_reader(path)
    try:
        metadata = {name: part.contents() for name, part in reader.fields.items() if not name.startswith("GGUF.")}
        tensors = {part.name: _stored(gguf, Path(path).name, part) for part in reader.tensors}
    except _OF_DAMAGE as error:
        raise OSError(_damaged(path, str(error))) from error
    return metadata, tensors


def gguf_reader(path: str) -> Any:
    """`gguf.GGUFReader` of a file.

    Raises:
        ImportError: The package `gguf` is not installed.
        OSError: The file is damaged; found before anything is allocated.
    """
    _check_header(path)
    gguf = gguf_package(path)
    try:
        return gguf.GGUFReader(path)
    except _OF_DAMAGE as error:
        raise OSError(_damaged(path, str(error))) from error


def gguf_package(path: str | os.PathLike[str]) -> Any:
    """The package `gguf`, wanted for the file at `path`.

    Raises:
        ImportError: It is not installed.
    """
    try:
        return importlib.import_module("gguf")
    except ImportError as error:
        raise ImportError(
            f"{path} is a GGUF file, and reading or writing it needs the package `gguf`: pip install gguf."
        ) from error


def _check_header(path: str) -> None:
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        start = file.read(_HEADER.size)
    if len(start) < _HEADER.size or start[:4] != b"GGUF":
        raise OSError(_damaged(path, "it does not begin as one"))
    _, _, tensors, keys = _HEADER.unpack(start)
    if tensors * _SHORTEST_TENSOR + keys * _SHORTEST_KEY > size:
        raise OSError(
            _damaged(path, f"its header counts {tensors} tensors and {keys} keys, more than {size} bytes hold")
        )


def _damaged(path: str, reason: str) -> str:
    return f"{path} cannot be read as a GGUF file ({reason}): it is damaged or was cut short. Download it again."


def _stored(gguf: Any, file: str, part: Any) -> StoredTensor:
    kind = part.tensor_type.name
    shape = tuple(int(extent) for extent in reversed(part.shape.tolist()))
    # Of a truncated file the data comes out short instead of failing.
    if part.data.nbytes != part.n_bytes:
        raise ValueError(f"tensor {part.name} ends beyond the file")
    transform = "" if kind in _PLAIN else f"dequantised from {kind}"
    return StoredTensor(
        file, part.name, _PLAIN.get(kind, kind), shape, _reader(gguf, file, part, shape), int(part.n_bytes), transform
    )


def _reader(gguf: Any, file: str, part: Any, shape: tuple[int, ...]) -> Callable[[], torch.Tensor]:
    def read() -> torch.Tensor:
        kind = part.tensor_type.name
        if kind == "BF16":
            return torch.from_numpy(part.data.copy()).view(torch.bfloat16).reshape(shape)
        if kind in _PLAIN:
            return torch.from_numpy(part.data.copy()).reshape(shape)
        try:
            return torch.from_numpy(gguf.quants.dequantize(part.data, part.tensor_type)).reshape(shape)
        except NotImplementedError as error:
            raise ValueError(
                f"{part.name} in {file} is stored as {kind}, which the package `gguf` cannot read. Name the drafter's "
                "file in another type, e.g. F16 or Q8_0."
            ) from error

    return read


__all__ = ["gguf_package", "gguf_reader", "open_gguf"]
