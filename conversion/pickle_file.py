"""Training states and other pickles, read only when the caller says so, and then as plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .stored import StoredTensor

PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_STATES = ("draft_state_dict", "state_dict", "model_state_dict", "model")  # where trainers put the weights


def open_pickle(path: str) -> dict[str, StoredTensor]:
    """Tensors of a training state or of a bare state dict.

    Raises:
        OSError: It cannot be read as plain tensors.
        ValueError: No state dict of plain tensors is in it.
    """
    name = Path(path).name
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # bytes that make no sense end in an error of any class
        raise OSError(f"{path} cannot be read as plain tensors ({error!s:.200}). Convert it elsewhere.") from error
    state = _state_dict(loaded)
    if state is None:
        found = sorted(map(str, loaded)) if isinstance(loaded, dict) else type(loaded).__name__
        raise ValueError(f"{path} holds no state dict under {', '.join(_STATES)}, nor is it one: {found}.")
    if odd := [key for key, tensor in state.items() if not _is_plain(tensor)]:
        raise ValueError(
            f"{path} holds {', '.join(odd[:5])} not as plain numbers (sparse, quantised or without data). Save dense "
            "tensors."
        )
    return {
        key: StoredTensor(
            name, key, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), _same(tensor),
            tensor.numel() * tensor.element_size(),
        )
        for key, tensor in state.items()
    }  # fmt: skip


def _state_dict(loaded: Any) -> dict[str, torch.Tensor] | None:
    if not isinstance(loaded, dict):
        return None
    for part in (*(loaded.get(key) for key in _STATES), loaded):
        if isinstance(part, dict) and part and all(_is_tensor(key, value) for key, value in part.items()):
            return part
    return None


def _is_tensor(key: Any, value: Any) -> bool:
    return isinstance(key, str) and isinstance(value, torch.Tensor)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_meta


def _same(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: tensor


__all__ = ["PICKLES", "open_pickle"]
