"""Confidence and survival in torch: any device, the contract of the door."""

from __future__ import annotations

import torch


def confidence_scores(
    hidden: torch.Tensor,
    previous_ids: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    w1: torch.Tensor | None,
    temperatures: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, own confidence and survival; arguments as the door's, `temperatures [B, g]`."""
    seen = hidden.float()
    if w1 is not None:
        seen = torch.cat([seen, torch.nn.functional.embedding(previous_ids, w1).float()], dim=-1)
    logits = seen @ weight.float()
    if bias is not None:
        logits = logits + bias.float()
    return scores_of_logits(logits, temperatures)


def scores_of_logits(
    logits: torch.Tensor, temperatures: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, own confidence and survival of float32 logits `[B, g]`; see the door for the rest."""
    logits = logits.nan_to_num(nan=-torch.inf)  # of an overflow in the head: such a slot is not trusted
    own = logits.sigmoid()
    calibrated = own if temperatures is None else (logits / temperatures).sigmoid()
    return logits, own, calibrated.cumprod(-1)


__all__ = ["confidence_scores", "scores_of_logits"]
