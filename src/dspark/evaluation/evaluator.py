"""The measuring itself: every prompt, at every temperature, plain and with every drafter at every threshold.

The runs of one prompt follow each other, in an order that turns by one from prompt to prompt, so that a machine that
is slow for a while is slow for all of them. Plain runs are shared by all drafters and thresholds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from ..modeling_dspark import DSparkDrafter
from ..pairing import require_pair
from ..stats import SpeculationStats
from .compare import first_difference, timed
from .results import DraftedRun, PlainRun, PromptResult, Results, ResultsLog
from .settings import EvaluationSettings

_WARM_UP_TOKENS = 4  # enough for a round: first calls build kernels and buffers
_LOGIT_DIGITS = 5  # of a confidence logit, behind the point: files stay small, and bins are 0.05 wide

Progress = Callable[[int, int, PromptResult], None]


def evaluate(
    target: PreTrainedModel,
    drafters: Mapping[str, DSparkDrafter],
    prompts: Mapping[str, Mapping[int, torch.Tensor]],
    settings: EvaluationSettings,
    log: ResultsLog,
    *,
    progress: Progress | None = None,
) -> Results:
    """Run what `log` lacks.

    Args:
        target: The model, in the state it is to be measured in (packed or not).
        drafters: Label to drafter, each fitting the target; see [`check_drafters`].
        prompts: Set to place to ids int64 `[1, P]`. Places are those in the whole set, so that parts of a set merge.
        settings: What to run.
        log: Where results are kept.
        progress: Called after each prompt and temperature with how many are done, how many there are, and the result.

    Returns:
        All results, those that were there before included.

    Raises:
        ValueError: A result that is there was taken on another prompt.
    """
    jobs = [(n, i, t) for n, ids in prompts.items() for i in ids for t in settings.temperatures]
    _check_prompts(log.results, prompts)
    missing = [job for job in jobs if job not in log.results.prompts]
    runner = _Runner(target, drafters, settings)
    if missing and settings.speed:
        name, index, _ = missing[0]
        runner.warm_up(prompts[name][index])
    for number, (name, index, temperature) in enumerate(missing, start=len(jobs) - len(missing) + 1):
        result = runner.measure(name, index, temperature, prompts[name][index])
        log.append(result)
        if progress is not None:
            progress(number, len(jobs), result)
    return log.results


def check_drafters(
    target: PreTrainedModel, drafters: Mapping[str, DSparkDrafter], settings: EvaluationSettings, tokenizer: Any = None
) -> None:
    """Refuse drafters that cannot be evaluated, before anything runs.

    Raises:
        ValueError: There is none, one does not fit the target, or has no confidence for the thresholds.
    """
    if not drafters:
        raise ValueError("There is no drafter to evaluate.")
    for label, drafter in drafters.items():
        require_pair(target, drafter, tokenizer)
        if max(settings.thresholds) > 0 and not drafter.config.enable_confidence_head:
            raise ValueError(
                f"Drafter {label!r} has no confidence head, so thresholds above 0 would change nothing, got "
                f"{', '.join(map(str, settings.thresholds))}. Evaluate it with threshold 0 alone."
            )


class _Way(NamedTuple):
    """One way to answer a prompt: with a drafter at a threshold."""

    drafter: str
    threshold: float


class _Answer(NamedTuple):
    new_ids: list[int]
    seconds: float
    stats: SpeculationStats | None  # None: plain


class _Runner:
    def __init__(
        self, target: PreTrainedModel, drafters: Mapping[str, DSparkDrafter], settings: EvaluationSettings
    ) -> None:
        self.target: Any = target
        self.drafters = drafters
        self.settings = settings

    def warm_up(self, input_ids: torch.Tensor) -> None:
        """Short runs that nothing is kept of."""
        arguments = {**self.settings.generate_arguments(0.0), "max_new_tokens": _WARM_UP_TOKENS}
        self._generate(input_ids, arguments)
        for drafter in self.drafters.values():
            self._generate(input_ids, {**arguments, "assistant_model": drafter})

    def measure(self, name: str, index: int, temperature: float, input_ids: torch.Tensor) -> PromptResult:
        """All runs of one prompt at one temperature."""
        settings = self.settings
        drafted = [_Way(label, threshold) for label in self.drafters for threshold in settings.thresholds]
        ways: list[_Way | None] = [*([None] if settings.speed else []), *drafted]
        first, seed = index % len(ways), settings.seed_of(name, index, temperature)
        answers = {way: self._answer(input_ids, temperature, way, seed) for way in [*ways[first:], *ways[:first]]}
        plain = answers.get(None)
        # Ids of two sampled runs differ by chance and say nothing about the law.
        wanted = plain.new_ids if plain is not None and temperature == 0 else None
        return PromptResult(
            name,
            index,
            temperature,
            prompt_hash(input_ids),
            input_ids.shape[1],
            None if plain is None else PlainRun(plain.seconds, len(plain.new_ids)),
            [_drafted_run(way, answers[way], wanted) for way in drafted],
        )

    def _answer(self, input_ids: torch.Tensor, temperature: float, way: _Way | None, seed: int) -> _Answer:
        arguments = self.settings.generate_arguments(temperature)
        if way is not None:
            drafter = self.drafters[way.drafter]
            has_confidence = bool(drafter.config.enable_confidence_head)
            arguments["assistant_model"] = drafter
            arguments["speculation"] = self.settings.speculation(way.threshold, has_confidence=has_confidence)
        device = self.target.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            output, seconds = timed(lambda: self._generate(input_ids, arguments))
        new_ids = output.sequences[0, input_ids.shape[1] :].tolist()
        return _Answer(new_ids, seconds, None if way is None else output.speculation)

    def _generate(self, input_ids: torch.Tensor, arguments: dict[str, Any]) -> Any:
        ids = input_ids.to(self.target.device)
        return self.target.generate(
            ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, **arguments
        )


def _drafted_run(way: _Way, answer: _Answer, wanted: list[int] | None) -> DraftedRun:
    assert answer.stats is not None
    logits = [[round(value, _LOGIT_DIGITS) for value in row] for row in answer.stats.confidence_logits]
    stats = replace(answer.stats, confidence_logits=logits)
    divergence = None if wanted is None else first_difference(answer.new_ids, wanted)
    is_equal = None if wanted is None else divergence is None
    return DraftedRun(way.drafter, way.threshold, answer.seconds, len(answer.new_ids), is_equal, divergence, stats)


def prompt_hash(input_ids: torch.Tensor) -> str:
    """Hash of a prompt's ids."""
    return hashlib.sha256(json.dumps(input_ids.tolist()).encode()).hexdigest()[:16]


def part_of(
    prompts: Mapping[str, Sequence[torch.Tensor]], part: int = 1, parts: int = 1
) -> dict[str, dict[int, torch.Tensor]]:
    """Every `parts`-th prompt of each set from the `part`-th on (1-based), with its place in the set.

    Raises:
        ValueError: `part` is not in 1..`parts`.
    """
    if not 1 <= part <= parts:
        raise ValueError(f"A part is one of 1 to {parts}, got {part}.")
    return {name: dict(list(enumerate(ids))[part - 1 :: parts]) for name, ids in prompts.items()}


def _check_prompts(results: Results, prompts: Mapping[str, Mapping[int, torch.Tensor]]) -> None:
    for (name, index, _), result in results.prompts.items():
        ids = prompts.get(name, {}).get(index)
        if ids is not None and prompt_hash(ids) != result.prompt_hash:
            raise ValueError(
                f"Set {name!r}, prompt {index}: the results that are there were taken on another prompt (hash "
                f"{result.prompt_hash} there, {prompt_hash(ids)} now). Name another folder with --out."
            )


__all__ = ["check_drafters", "evaluate", "part_of", "prompt_hash"]
