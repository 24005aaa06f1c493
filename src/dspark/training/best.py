"""The weights of the best evaluation so far, in one file beside the checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from ..files import write_atomically

NAME = "best.safetensors"
# What "best" means: the first of these that an evaluation gives, and its sign.
_METRICS = {"eval_tau": 1.0, "eval_tau_estimate": 1.0, "eval_loss": -1.0}


class BestWeights:
    """Keeps the best weights on disk; what the file says is what counts, also for a resumed run.

    Args:
        folder: Of the run's checkpoints.
    """

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder) / NAME

    def forget(self) -> None:
        """Start over."""
        self.path.unlink(missing_ok=True)

    def consider(self, model: nn.Module, metrics: Mapping[str, float], step: int) -> None:
        """Keep the weights of `model` if `metrics` are better than all before; the earlier of equals stays."""
        name = next(name for name in _METRICS if name in metrics)
        known = self.note()
        if known is not None and metrics[name] * _METRICS[name] <= known["value"] * _METRICS[name]:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        note = {"metric": name, "value": repr(float(metrics[name])), "step": str(step)}
        # Copies, since tied weights share memory, which the format refuses.
        state = {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
        write_atomically(self.path, lambda path: save_file(state, path, metadata=note))

    def note(self) -> dict[str, Any] | None:
        """`{"metric", "value", "step"}` of the kept weights; None without any."""
        if not self.path.exists():
            return None
        with safe_open(self.path, "pt") as file:
            found = file.metadata()
        return {"metric": found["metric"], "value": float(found["value"]), "step": int(found["step"])}

    @torch.no_grad()
    def restore(self, model: nn.Module) -> None:
        """Put the kept weights into `model`."""
        model.load_state_dict(load_file(self.path))


__all__ = ["BestWeights"]
