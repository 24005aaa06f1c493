"""Which implementation of an op runs: Triton where it can, else torch; never quietly something else than asked for.

`"auto"` takes Triton for tensors on a CUDA or HIP device where triton is installed, unless the environment variable
`DSPARK_OPS` names an implementation for all ops. Triton's interpreter, which `TRITON_INTERPRET=1` turns on before
triton is imported, also takes tensors on the CPU, but only when asked for.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, cast, get_args

import torch

Implementation = Literal["auto", "torch", "triton"]

logger = logging.getLogger(__name__)


def choose(implementation: Implementation, tensor: torch.Tensor) -> Literal["torch", "triton"]:
    """The implementation to run on tensors that lie where `tensor` does.

    Args:
        implementation: `"auto"`, `"torch"` or `"triton"`.
        tensor: Only its device is looked at.

    Raises:
        ValueError: An unknown name, or Triton was asked for and cannot run on that device.
        ImportError: Triton was asked for and is not installed.
    """
    name = "`implementation`"
    if implementation == "auto" and "DSPARK_OPS" in os.environ:
        name, implementation = "the environment variable DSPARK_OPS", cast("Implementation", os.environ["DSPARK_OPS"])
    if implementation not in get_args(Implementation):
        raise ValueError(f"{name} must be one of {get_args(Implementation)}, got {implementation!r}.")
    if implementation == "auto":
        reason = _reason_for_torch(tensor)
        if reason is not None:
            logger.debug("torch form: %s", reason)
        return "triton" if reason is None else "torch"
    if implementation == "triton":
        _require_triton(tensor, name)
    return implementation


def choice_and_reason(tensor: torch.Tensor) -> tuple[Literal["torch", "triton"], str]:
    """What `"auto"` takes for tensors that lie where `tensor` does, and why; raises as `choose` does."""
    chosen = choose("auto", tensor)
    if "DSPARK_OPS" in os.environ:
        return chosen, "the environment variable DSPARK_OPS says so"
    return chosen, _reason_for_torch(tensor) or f"tensors are on {tensor.device}, and triton is installed"


def _reason_for_torch(tensor: torch.Tensor) -> str | None:
    if tensor.device.type != "cuda":
        return f"tensors are on {tensor.device}"
    return "triton is not installed" if importlib.util.find_spec("triton") is None else None


def _require_triton(tensor: torch.Tensor, name: str) -> None:
    if importlib.util.find_spec("triton") is None:
        raise ImportError(
            f"'triton' as {name} needs triton, which is not installed: `pip install dspark[triton]`, or say 'auto' to "
            "take torch where triton is missing."
        )
    if tensor.device.type != "cuda" and not is_interpreted():
        raise ValueError(
            f"'triton' as {name} needs tensors on a CUDA or HIP device, got {tensor.device}. Say 'auto' or 'torch', "
            "or set TRITON_INTERPRET=1 before triton is imported to run its interpreter."
        )


def is_interpreted() -> bool:
    """Whether the environment asks for Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on")


def device_of(tensor: torch.Tensor) -> AbstractContextManager:
    """Makes the tensor's device the current one: Triton launches on the current device, whatever its arguments."""
    return torch.cuda.device(tensor.device) if tensor.device.type == "cuda" else nullcontext()


__all__ = ["Implementation", "choice_and_reason", "choose", "device_of", "is_interpreted"]
