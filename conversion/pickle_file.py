"""Training states and other pickles, read only when the caller says so, and then as plain tensors."""

from __future__ import annotations

import pickle
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
        ValueError: No state dict is in it.
    """
    name = Path(path).name
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError) as error:
        raise OSError(f"{path} cannot be read as plain tensors ({error!s:.200}). Convert it elsewhere.") from error
    state = _state_dict(loaded)
    if state is None:
        found = sorted(map(str, loaded)) if isinstance(loaded, dict) else type(loaded).__name__
        raise ValueError(f"{path} holds no state dict under {', '.join(_STATES)}, nor is it one: {found}.")
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
        if isinstance(part, dict) and part and all(isinstance(value, torch.Tensor) for value in part.values()):
            return part
    return None


def _same(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: tensor


__all__ = ["PICKLES", "open_pickle"]
