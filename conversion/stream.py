"""Writing safetensors files tensor by tensor: the header first, then each tensor's bytes as it is read.

Memory is that of one tensor, not of a file; sums are taken on the way.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .stored import FLOATS, StoredTensor, is_finite

Progress = Callable[[int, int], None]
_CODES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


class FileSum(NamedTuple):
    """A file that was written: name, size in bytes, SHA-256 in hex."""

    name: str
    bytes: int
    sha256: str


class _Part(NamedTuple):
    name: str
    tensor: StoredTensor
    dtype: str

    @property
    def num_bytes(self) -> int:
        return self.tensor.num_elements * getattr(torch, self.dtype).itemsize


def parse_size(text: str) -> int:
    """Bytes of a size such as `5GB`, `256MB` or `1GiB`.

    Raises:
        ValueError: Not a size, or below one byte.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    unit = None if found is None else _UNITS.get(found[2].upper())
    size = 0.0 if found is None or unit is None else float(found[1]) * unit
    if not 1 <= size < 2**63:
        raise ValueError(f"`max_shard_size` must be a size of at least a byte such as 5GB or 256MB, got {text!r}.")
    return int(size)


def write_tensors(
    folder: Path,
    tensors: Mapping[str, StoredTensor],
    *,
    dtype: str | None,
    max_shard_size: int,
    progress: Progress | None = None,
) -> list[FileSum]:
    """Write `model.safetensors`, or shards and their index, into a folder.

    Args:
        folder: An existing folder.
        tensors: Name to tensor.
        dtype: Of all floating-point tensors, as torch names it; None: as they are stored (dequantised: float32).
        max_shard_size: Most bytes of tensors in a file, unless one tensor has more.
        progress: Called with bytes done and bytes in all after each tensor.

    Returns:
        The files in order.

    Raises:
        ValueError: A number is NaN or infinite, or becomes so in `dtype`.
    """
    parts = [_Part(name, tensor, _written_dtype(tensor, dtype)) for name, tensor in tensors.items()]
    shards = _shards(parts, max_shard_size)
    total, done = sum(part.num_bytes for part in parts), 0
    sums: list[FileSum] = []
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        one = len(shards) == 1
        name = "model.safetensors" if one else f"model-{number:05d}-of-{len(shards):05d}.safetensors"

        def tell(written: int, before: int = done) -> None:
            if progress is not None:
                progress(before + written, total)

        sums.append(_write_shard(folder / name, shard, tell))
        done += sum(part.num_bytes for part in shard)
        weight_map |= {part.name: name for part in shard}
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        path = folder / "model.safetensors.index.json"
        path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        sums.append(sum_of(path))
    return sums


def sum_of(path: Path) -> FileSum:
    """Size and SHA-256 of a file, read in pieces."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileSum(path.name, path.stat().st_size, digest)


def _written_dtype(tensor: StoredTensor, dtype: str | None) -> str:
    if tensor.dtype in _CODES and tensor.dtype not in FLOATS:
        return tensor.dtype
    return dtype or (tensor.dtype if tensor.dtype in FLOATS else "float32")


def _shards(parts: Iterable[_Part], limit: int) -> list[list[_Part]]:
    shards: list[list[_Part]] = [[]]
    size = 0
    for part in parts:
        if shards[-1] and size + part.num_bytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(part)
        size += part.num_bytes
    return shards


def _write_shard(path: Path, parts: list[_Part], tell: Callable[[int], None]) -> FileSum:
    # The widest numbers first, as the library orders them: every tensor then starts at a multiple of its width.
    parts = sorted(parts, key=lambda part: (-getattr(torch, part.dtype).itemsize, part.name))
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as file:
        for piece, of_tensors in _pieces(parts):
            file.write(piece)
            digest.update(piece)
            size += len(piece)
            if of_tensors is not None:
                tell(of_tensors)
        file.flush()
        os.fsync(file.fileno())
    return FileSum(path.name, size, digest.hexdigest())


def _pieces(parts: list[_Part]) -> Iterator[tuple[bytes | memoryview, int | None]]:
    """The bytes of a file in order, each tensor's with the bytes of tensors up to and with it."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for part in parts:
        header[part.name] = {
            "dtype": _CODES[part.dtype], "shape": list(part.tensor.shape), "data_offsets": [at, at + part.num_bytes],
        }  # fmt: skip
        at += part.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text, None
    at = 0
    for part in parts:
        at += part.num_bytes
        yield _bytes(part), at


def _bytes(part: _Part) -> memoryview:
    tensor = part.tensor[...]
    if not part.tensor.is_finite:
        raise ValueError(
            f"{part.tensor.key} in {part.tensor.file} has NaN or infinite numbers: a table that was never trained, or "
            "a damaged file. Nothing was written."
        )
    if tuple(tensor.shape) != part.tensor.shape:
        raise ValueError(f"{part.tensor.key} in {part.tensor.file} is {list(tensor.shape)}, not {part.tensor.shape}.")
    cast = tensor.to(getattr(torch, part.dtype))
    if cast is not tensor and not is_finite(cast):
        raise ValueError(
            f"{part.tensor.key} has numbers that {part.dtype} cannot hold. Write it as bfloat16 or float32."
        )
    numbers: Any = cast.contiguous().flatten().view(torch.uint8).numpy()
    return memoryview(numbers)


__all__ = ["FileSum", "Progress", "parse_size", "sum_of", "write_tensors"]
