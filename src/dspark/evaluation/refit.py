"""A drafter's confidence head fitted again on the rounds that calibration decodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from ..calibration import ConfidenceFit, LinearHead, fit_confidence_head
from ..modeling_dspark import DSparkDrafter
from ..stats import SpeculationStats
from .rounds import check_confidence_head, collect_rounds, stack_rounds


class HeadRounds(NamedTuple):
    """Rounds of one prompt with what the confidence head saw.

    Attributes:
        stats: Of the call.
        inputs: `[N, g, F]` in the drafter's dtype, on the CPU.
    """

    stats: SpeculationStats
    inputs: torch.Tensor


def collect_head_rounds(
    target: PreTrainedModel,
    drafter: DSparkDrafter,
    prompt_ids: Sequence[torch.Tensor],
    *,
    on_progress: Callable[[int, SpeculationStats], None] | None = None,
    **arguments: Any,
) -> list[HeadRounds]:
    """[`collect_rounds`], with the inputs of the confidence head's linear layer.

    Args:
        target, drafter, prompt_ids, on_progress: As there.
        **arguments: Its others.
    """
    seen: list[torch.Tensor] = []
    found: list[HeadRounds] = []

    def record(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        seen.append(inputs[0].reshape(-1, inputs[0].shape[-1]).detach().to("cpu", copy=True))

    def finish(place: int, stats: SpeculationStats) -> None:
        found.append(_head_rounds(stats, seen, head))
        seen.clear()
        if on_progress is not None:
            on_progress(place, stats)

    check_confidence_head(drafter.config, "The drafter")
    head = _current_head(drafter)
    handle = _layer(drafter).register_forward_pre_hook(record)
    try:
        collect_rounds(target, drafter, prompt_ids, on_progress=finish, **arguments)
    finally:
        handle.remove()
    return found


def refit(
    drafter: DSparkDrafter, rounds: Sequence[Sequence[HeadRounds]], is_held_out: Sequence[bool]
) -> tuple[ConfidenceFit, list[list[torch.Tensor]]]:
    """Fit the head to the prompts that are not held out; the drafter stays as it is.

    Args:
        drafter: Whose head the rounds' inputs belong to.
        rounds: Per decoding temperature and prompt: one head serves them all.
        is_held_out: Per prompt.

    Returns:
        The fit, and per decoding temperature and prompt the logits `[N, g]` to fit temperatures to and to judge: of
        the fitted head where the prompt is held out, else of the fold without it, so that no temperature is fitted to
        predictions of what they were fitted to.

    Raises:
        ValueError: Too little was decided to fit on; see [`fit_confidence_head`].
    """
    start = _current_head(drafter)
    inputs, accepted, groups = [torch.zeros(0, len(start.weight))], [], []
    for part in rounds:
        for place, (prompt, out) in enumerate(zip(part, is_held_out, strict=True)):
            for seen, (_, verified, count) in zip(prompt.inputs, prompt.stats.scored_rounds(), strict=True):
                if out:
                    break
                reached = min(verified, count + 1)
                inputs.append(seen[:reached].float())
                accepted += [True] * count + [False] * (reached - count)
                groups += [place] * reached
    fit = fit_confidence_head(
        torch.cat(inputs), torch.tensor(accepted, dtype=torch.bool), groups, start,
        with_bias=drafter.config.confidence_head_bias,
    )  # fmt: skip
    logits = [
        [
            (fit.head if out else fit.without(place)).logits(prompt.inputs)
            for place, (prompt, out) in enumerate(zip(part, is_held_out, strict=True))
        ]
        for part in rounds
    ]
    return fit, logits


def set_head(drafter: DSparkDrafter, head: LinearHead) -> None:
    """Put a fitted head into the drafter, in the drafter's dtype."""
    layer = _layer(drafter)
    with torch.no_grad():
        layer.weight.copy_(head.weight.view_as(layer.weight))
        if layer.bias is not None:
            layer.bias.fill_(head.bias)


def _current_head(drafter: DSparkDrafter) -> LinearHead:
    layer = _layer(drafter)
    bias = 0.0 if layer.bias is None else float(layer.bias.detach())
    weight = layer.state_dict()["weight"]  # the plain numbers, also of a packed layer
    return LinearHead(weight.cpu().float().flatten().clone(), bias)


def _layer(drafter: DSparkDrafter) -> nn.Linear:
    assert drafter.confidence_head is not None
    return drafter.confidence_head.proj


def _head_rounds(stats: SpeculationStats, seen: Sequence[torch.Tensor], head: LinearHead) -> HeadRounds:
    """A call's rounds and what the head saw in them.

    Raises:
        RuntimeError: The recorded inputs are not those of the recorded logits.
    """
    rounds = stats.scored_rounds()
    logits = stack_rounds([stats], len(rounds[0][0]) if rounds else 1).logits.float()  # refuses what is not finite
    inputs = torch.stack(list(seen)) if seen else torch.zeros(0, 1, len(head.weight))
    # Tolerances: a bfloat16 head rounds its logits.
    if len(seen) != len(rounds) or not torch.allclose(head.logits(inputs), logits, rtol=0.05, atol=0.05):
        raise RuntimeError(
            f"{len(seen)} inputs of the confidence head were recorded in {len(rounds)} rounds and do not give their "
            "logits. Please report it."
        )
    return HeadRounds(stats, inputs)


__all__ = ["HeadRounds", "collect_head_rounds", "refit", "set_head"]
