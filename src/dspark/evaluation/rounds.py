"""Real decoding rounds with the confidence of every draft, for calibration and reliability figures.

Every draft is verified whatever its confidence says: a cut by confidence would hide what becomes of slots behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from transformers import PreTrainedModel

from ..calibration.rounds import ScoredRounds, check_rounds
from ..configuration_dspark import DSparkConfig
from ..modeling_dspark import DSparkDrafter
from ..speculation import SpeculationConfig
from ..stats import SpeculationStats
from .settings import EvaluationSettings


def collect_rounds(
    target: PreTrainedModel,
    drafter: DSparkDrafter,
    prompt_ids: Sequence[torch.Tensor],
    *,
    temperature: float = 0.0,
    max_new_tokens: int = 256,
    seed: int = 0,
    on_progress: Callable[[int, SpeculationStats], None] | None = None,
) -> list[SpeculationStats]:
    """Decode prompts one by one, verify every draft and keep its confidence.

    Args:
        target: The target.
        drafter: Its drafter, with a confidence head.
        prompt_ids: int64 `[1, P]` each, on the target's device.
        temperature: 0 is greedy; above, the target's plain law at that temperature (no top-k, top-p or penalties).
        max_new_tokens: New tokens per prompt at most.
        seed: Of sampled text. A prompt's draws depend on it, the temperature and the prompt's place alone.
        on_progress: Called after each prompt with its place and statistics.

    Returns:
        Statistics per prompt, in order; `scored_rounds()` of each has its rounds. See [`stack_rounds`].

    Raises:
        ValueError: The drafter has no confidence head, or does not fit the target.
    """
    check_confidence_head(drafter.config, "The drafter")
    settings = EvaluationSettings(temperatures=(temperature,), max_new_tokens=max_new_tokens, seed=seed)
    speculation = SpeculationConfig(policy="fixed", record_confidence=True)
    collected = []
    for index, ids in enumerate(prompt_ids):
        torch.manual_seed(settings.seed_of("rounds", index, temperature))
        output = target.generate(  # type: ignore[misc]
            ids,
            assistant_model=drafter,
            speculation=speculation,
            return_dict_in_generate=True,
            **settings.generate_arguments(temperature),
        )
        collected.append(output.speculation)
        if on_progress is not None:
            on_progress(index, output.speculation)
    return collected


def check_confidence_head(config: DSparkConfig, name: str) -> None:
    """Refuse a drafter without a confidence head.

    Args:
        config: The drafter's.
        name: What the message calls it.

    Raises:
        ValueError: It has none.
    """
    if not config.enable_confidence_head:
        raise ValueError(
            f"{name} has no confidence head (`enable_confidence_head=False`), so there is nothing to calibrate. "
            "Train one with a confidence loss (`dspark train --confidence 1.0`)."
        )


def stack_rounds(stats: Iterable[SpeculationStats], num_draft_tokens: int) -> ScoredRounds:
    """Rounds of several calls as one set of tensors.

    Args:
        stats: Statistics with recorded confidence.
        num_draft_tokens: Draft positions g of the drafter.

    Returns:
        `logits [N, g]`, `accepted [N]`, `verified [N]`; N may be 0.

    Raises:
        ValueError: A recorded logit is not finite, or a round has another number of them.
    """
    rounds = [entry for part in stats for entry in part.scored_rounds()]
    if wrong := [len(logits) for logits, _, _ in rounds if len(logits) != num_draft_tokens]:
        raise ValueError(f"Rounds have {num_draft_tokens} confidence logits each, got one of {wrong[0]}.")
    logits = torch.tensor([logits for logits, _, _ in rounds], dtype=torch.float64).view(-1, num_draft_tokens)
    verified, accepted = ([entry[i] for entry in rounds] for i in (1, 2))
    return check_rounds(logits, torch.tensor(accepted).long(), torch.tensor(verified).long())


__all__ = ["check_confidence_head", "collect_rounds", "stack_rounds"]
