"""Real accepted length during training: the drafter decodes a few prompts with its target, as it will be used.

What training logs as `tau` is an estimate on teacher-forced text; this is the figure itself. Nothing here leaves a
trace in the run: random states, modes and gradients are as before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..modeling_dspark import DSparkDrafter
from ..plain_decoding import plain_decoding
from ..speculation import SpeculationConfig


class DecodingEvaluation:
    """Decodes prompts greedily with whole blocks verified, and counts what was accepted.

    Args:
        target: All of it, layers included.
        drafter: Being trained.
        prompts: Ids of each prompt.
        new_tokens: Most tokens decoded per prompt.
    """

    def __init__(
        self, target: PreTrainedModel, drafter: DSparkDrafter, prompts: Sequence[Sequence[int]], new_tokens: int
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.prompts = [list(prompt) for prompt in prompts]
        self.new_tokens = new_tokens

    def __bool__(self) -> bool:
        return bool(self.prompts)

    def check(self) -> None:
        """Decode two tokens of the first prompt.

        Raises:
            ValueError: The target cannot be decoded with a drafter; says why.
        """
        with undisturbed(self.drafter):
            self._decode(self.prompts[0], 2)

    @torch.no_grad()
    def count(self, part: slice) -> torch.Tensor:
        """Decode the prompts of a slice; sums that add up over slices: float64 `[2 + 2K]`.

        Rounds, accepted drafts, then per position: rounds that reached it, rounds that accepted it.
        """
        positions = self.drafter.config.num_draft_tokens
        sums = torch.zeros(2 + 2 * positions, dtype=torch.float64)
        for prompt in self.prompts[part]:
            stats = self._decode(prompt, self.new_tokens)
            for verified, accepted in zip(stats.verified, stats.accepted, strict=True):
                reached = min(accepted + 1, verified)
                sums[:2] += torch.tensor([1, accepted])
                sums[2 : 2 + reached] += 1
                sums[2 + positions : 2 + positions + accepted] += 1
        return sums

    def figures(self, sums: torch.Tensor) -> dict[str, float]:
        """`tau` (bonus included) and `acceptance_k`, the share of rounds reaching position k that accept it."""
        rounds, accepted, *counts = sums.tolist()
        half = len(counts) // 2
        result = {"tau": 1 + accepted / max(rounds, 1)}
        for k, (reached, taken) in enumerate(zip(counts[:half], counts[half:], strict=True), 1):
            if reached:
                result[f"acceptance_{k}"] = taken / reached
        return result

    def _decode(self, prompt: list[int], new_tokens: int) -> Any:
        before = self.drafter.last_stats
        generate: Any = self.target.generate
        try:
            output = generate(
                input_ids=torch.tensor([prompt], device=self.target.device),
                assistant_model=self.drafter,
                speculation=SpeculationConfig(),
                max_new_tokens=new_tokens,
                return_dict_in_generate=True,
                **plain_decoding(self.target, 0.0),
            )
        finally:
            self.drafter.last_stats = before
        return output.speculation


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluate inside: `model` is in evaluation mode; modes and torch's random states are put back at the end."""
    modes = {module: module.training for module in model.modules()}
    device = next(model.parameters()).device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        model.eval()
        try:
            yield
        finally:
            for module, is_training in modes.items():
                module.training = is_training


class EvaluateEvery(TrainerCallback):
    """Asks for an evaluation every so many steps and after the last one.

    Args:
        steps: Between evaluations; 0: a tenth of the run.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def on_step_end(
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """See the class."""
        steps = self._steps or max(state.max_steps // 10, 1)
        control.should_evaluate = state.global_step % steps == 0 or state.global_step >= state.max_steps


def as_estimates(figures: dict[str, float]) -> dict[str, float]:
    """Names of evaluation figures that tell estimates from what decoding gives: `eval_tau_estimate`, ..."""
    names = {name: f"{name}_estimate" for name in figures if name == "tau" or name.startswith("acceptance_")}
    return {f"eval_{names.get(name, name)}": value for name, value in figures.items()}


__all__ = ["DecodingEvaluation", "EvaluateEvery", "as_estimates", "undisturbed"]
