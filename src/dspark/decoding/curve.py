"""What step times belong to, and a warning where a given curve was measured on something else."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from ..cpu import is_packed
from ..scheduling import CurveKey, ThroughputCurve

logger = logging.get_logger("dspark.curve")


def curve_key(target: PreTrainedModel, name: str) -> CurveKey:
    """What times of this target in its present state belong to; `name` is its public name."""
    device = target.device
    return CurveKey(
        model=name,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        dtype=str(target.dtype).removeprefix("torch."),
        attention=str(getattr(target.config, "_attn_implementation", None)),
        threads=torch.get_num_threads(),
        packed=is_packed(target),
    )


def warn_of_another_curve(target: PreTrainedModel, curve: ThroughputCurve | None) -> None:
    """Say once where a curve was measured on another device, dtype, attention or threads, or packed otherwise."""
    if curve is None or curve.key is None:
        return
    if differences := curve.key.differences(curve_key(target, curve.key.model)):
        logger.warning_once(
            f"dspark: `throughput_curve` was measured on something else ({'; '.join(differences)}), so verify lengths "
            "may be far from the best. Output is unchanged. Run `dspark profile` here, or leave the curve out."
        )


__all__ = ["curve_key", "warn_of_another_curve"]
