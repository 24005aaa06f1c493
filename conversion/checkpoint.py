"""Opening a checkpoint: which files it has, what their headers say. Nothing of a tensor is read, no code is run."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers.utils import cached_file

from dspark.files import read_json

from .gguf_file import open_gguf
from .pickle_file import PICKLES, open_pickle
from .stored import FLOATS, StoredTensor

_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
_INTEGERS = ("int64", "int32", "int16", "int8", "uint8")
_WAY_OUT = "a file is damaged or was cut short. Download or save it again."


@dataclass
class Checkpoint:
    """A checkpoint by its headers.

    Attributes:
        source: Folder, file or Hub id.
        config: Contents of config.json, or the metadata of a GGUF file.
        tensors: Name in the files to tensor; None where only the config is known.
        is_gguf: Whether it is a GGUF file.
        files: Other files beside it that matter to readers, by name.

    Raises:
        ValueError: `architectures` of the config is no list of names.
    """

    source: str
    config: dict[str, Any]
    tensors: dict[str, StoredTensor] | None
    is_gguf: bool = False
    files: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        names = self.config.get("architectures")
        if not isinstance(names, list | None) or not all(isinstance(name, str) for name in names or ()):
            raise ValueError(f"{self.source}: `architectures` must be a list of class names, got {names!r}.")


def open_checkpoint(
    source: str | os.PathLike[str],
    config: dict[str, Any],
    *,
    gguf_file: str | None = None,
    variant: str | None = None,
    allow_pickle: bool = False,
    **hub_kwargs: Any,
) -> Checkpoint:
    """Open a checkpoint.

    Args:
        source: Folder, GGUF file or Hub id.
        config: What its config.json holds; empty for GGUF.
        gguf_file: Name of a GGUF file in the folder or repository.
        variant: As in transformers: `model.<variant>.safetensors`.
        allow_pickle: Read a pickle (with `weights_only=True`) where there is no safetensors file.
        **hub_kwargs: `revision`, `token`, `cache_dir`, `subfolder`, `local_files_only`, ...

    Raises:
        ValueError: Only a pickle and not allowed, or an index that leads out of the folder.
        OSError: A file is missing or damaged.
        ImportError: It is a GGUF file, and the package `gguf` is not installed.
    """
    place = _Place(source, hub_kwargs)
    if (path := find_gguf(source, gguf_file, has_config=bool(config), **hub_kwargs)) is not None:
        metadata, tensors = open_gguf(path)
        return Checkpoint(str(source), metadata, tensors, is_gguf=True)
    stored = _open_safetensors(place, variant)
    if stored is None:
        stored = _open_pickles(place, allow_pickle=allow_pickle)
    return Checkpoint(str(source), config, stored, files=place.listing())


class _Place:
    """Where the files of a checkpoint are: a folder, or a repository of the Hub."""

    def __init__(self, source: str | os.PathLike[str], hub_kwargs: dict[str, Any]) -> None:
        self.source = source
        self.hub_kwargs = {key: value for key, value in hub_kwargs.items() if value is not None}

    def find(self, name: str) -> str | None:
        """Path of a file, downloaded if need be; None if there is none."""
        if os.path.isfile(self.source):
            return None
        return cached_file(self.source, name, _raise_exceptions_for_missing_entries=False, **self.hub_kwargs)

    def listing(self) -> tuple[str, ...]:
        """Names of the files of a local folder; empty for a repository."""
        folder = Path(self.source) / self.hub_kwargs.get("subfolder", "")
        return tuple(sorted(path.name for path in folder.iterdir())) if folder.is_dir() else ()


def find_gguf(source: Any, gguf_file: str | None, *, has_config: bool, **hub_kwargs: Any) -> str | None:
    """Path of the GGUF file meant, or None: it is something else.

    Args:
        source: Folder, GGUF file or Hub id.
        gguf_file: Name of the file in the folder or repository; None: the only one of a folder without a config.
        has_config: Whether there is a config.json.
        **hub_kwargs: As [`open_checkpoint`].

    Raises:
        ValueError: Several files, none named.
        OSError: The file named is not there.
    """
    place = _Place(source, hub_kwargs)
    if os.path.isfile(source):
        if not str(source).endswith(".gguf"):
            raise ValueError(f"{source} is one file, and no GGUF file. Name the folder that holds its config.json.")
        return str(source)
    if gguf_file is not None:
        path = place.find(gguf_file)
        if path is None:
            raise OSError(f"{source} has no file {gguf_file}.")
        return path
    found = [name for name in place.listing() if name.endswith(".gguf")]
    if has_config or not found:
        return None
    if len(found) > 1:
        raise ValueError(f"{source} holds several GGUF files: {', '.join(found)}. Name one with `gguf_file`.")
    return place.find(found[0])


def _open_safetensors(place: _Place, variant: str | None) -> dict[str, StoredTensor] | None:
    middle = "" if variant is None else f".{variant}"
    whole = place.find(name := f"model{middle}.safetensors")
    if whole is not None:
        return _headers(place, name, whole)
    index = place.find(name := f"model.safetensors.index{middle}.json")
    if index is None:
        return None
    tensors: dict[str, StoredTensor] = {}
    for shard in _shards(place, name, index):
        path = place.find(shard)
        if path is None:
            raise OSError(f"{place.source} has no file {shard}, which its {name} names. Download the missing shard.")
        for key, tensor in _headers(place, shard, path).items():
            if key in tensors:
                raise ValueError(f"{place.source}: {key} is stored twice, in {tensors[key].file} and {shard}.")
            tensors[key] = tensor
    return tensors


def open_some(
    source: str | os.PathLike[str], choose: Callable[[list[str]], list[str]], **hub_kwargs: Any
) -> dict[str, StoredTensor]:
    """Some tensors of a safetensors checkpoint; of a repository only the shards they are in are fetched.

    Args:
        source: Folder or Hub id.
        choose: The names wanted, of all names.
        **hub_kwargs: As [`open_checkpoint`].

    Raises:
        OSError: There are no safetensors files, or damaged ones.
        ValueError: An index leads out of the folder.
    """
    place = _Place(source, hub_kwargs)
    if (path := place.find(name := "model.safetensors")) is not None:
        held = _headers(place, name, path)
        return {key: held[key] for key in choose(list(held))}
    if (path := place.find(name := "model.safetensors.index.json")) is None:
        raise OSError(f"{source} has no safetensors weights to read tables from.")
    places = _weight_map(place, name, path)
    wanted = choose(list(places))
    found: dict[str, StoredTensor] = {}
    for shard in sorted({places[key] for key in wanted}):
        if (path := place.find(shard)) is None:
            raise OSError(f"{source} has no file {shard}, which its {name} names. Download the missing shard.")
        found |= _headers(place, shard, path)
    if missing := [key for key in wanted if key not in found]:
        raise OSError(f"{name} of {source} names {', '.join(missing)}, which its shards do not hold: {_WAY_OUT}")
    return {key: found[key] for key in wanted}


def _shards(place: _Place, name: str, path: str) -> list[str]:
    return sorted(set(_weight_map(place, name, path).values()))


def _weight_map(place: _Place, name: str, path: str) -> dict[str, str]:
    try:
        weight_map = read_json(path)["weight_map"]
        shards = sorted(set(weight_map.values()))
    except (KeyError, TypeError, AttributeError) as error:
        raise OSError(f"{name} of {place.source} is not an index of shards ({error!r}): {_WAY_OUT}") from error
    check_shard_names(place.source, name, shards)
    return weight_map


def check_weights(folder: str, variant: str | None) -> None:
    """Hold the safetensors files of a local folder in our own format to what can be loaded, by their headers.

    Raises:
        ValueError: An index leads elsewhere, a tensor is stored twice, or holds no plain floats (ids: integers).
        OSError: A file is missing or damaged.
    """
    stored = _open_safetensors(_Place(folder, {}), variant) or {}
    wrong = [
        f"{name} is {tensor.dtype}"
        for name, tensor in sorted(stored.items())
        if (tensor.dtype not in _INTEGERS if name == "draft_token_ids" else tensor.dtype not in FLOATS)
    ]
    if wrong:
        raise ValueError(
            f"The checkpoint {folder} has wrong dtypes: {'; '.join(wrong[:10])} (floating-point numbers are wanted, "
            "of draft_token_ids integers). Save or download it again; nothing was loaded."
        )


def check_shard_names(source: Any, index: str, shards: list[str]) -> None:
    """Hold the shards of an index to plain names of safetensors files beside it.

    Raises:
        ValueError: One leads elsewhere; it is not opened.
    """
    for shard in shards:
        if not isinstance(shard, str) or not shard.endswith(".safetensors") or Path(shard).name != shard:
            raise ValueError(
                f"{index} of {source} sends tensors to {shard!r}, which is no safetensors file beside it. A shard "
                "must lie in the checkpoint's folder; nothing was opened."
            )


def _headers(place: _Place, name: str, path: str) -> dict[str, StoredTensor]:
    if "\ufffd" in os.fsencode(path).decode(errors="replace"):
        raise ValueError(
            f"{path!r} is no UTF-8, and the reader of safetensors takes no other paths. Rename the folder."
        )
    try:
        with safe_open(path, framework="pt") as handle:
            slices = {key: handle.get_slice(key) for key in handle.keys()}  # noqa: SIM118 - a handle is not a mapping
            found = {key: (part.get_dtype(), tuple(part.get_shape())) for key, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise OSError(f"The weights of {place.source} cannot be read ({name}: {error}): {_WAY_OUT}") from error
    tensors = {}
    for key, (code, shape) in found.items():
        dtype = _DTYPES.get(code, code)
        tensor = StoredTensor(name, key, dtype, shape, _reader(path, key), 0)
        width = getattr(torch, dtype).itemsize if dtype in _DTYPES.values() else 1
        tensor.num_bytes = tensor.num_elements * width
        tensors[key] = tensor
    return tensors


def _reader(path: str, key: str) -> Callable[[], torch.Tensor]:
    def read() -> torch.Tensor:
        # Opened for each tensor: pages of a file that stays mapped count as memory in use.
        try:
            with safe_open(path, framework="pt") as handle:
                return handle.get_tensor(key)
        except SafetensorError as error:
            raise OSError(f"{key} cannot be read from {path} ({error}): {_WAY_OUT}") from error

    return read


def _open_pickles(place: _Place, *, allow_pickle: bool) -> dict[str, StoredTensor] | None:
    names = [name for name in place.listing() if name.endswith(PICKLES)]
    if not names:
        return None
    if not allow_pickle:
        raise ValueError(
            f"{place.source} has no safetensors file, only {', '.join(names)}: a pickle, which can run code when it "
            "is opened, so it is not. If you trust its writer, pass `allow_pickle=True` (plain tensors only are then "
            "read), or convert it to safetensors."
        )
    if len(names) > 1:
        raise ValueError(f"{place.source} has several pickles: {', '.join(names)}. Leave the one with the weights.")
    path = place.find(names[0])
    assert path is not None
    return open_pickle(path)


__all__ = ["Checkpoint", "check_shard_names", "check_weights", "find_gguf", "open_checkpoint", "open_some"]
