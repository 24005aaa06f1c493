"""What one round costs, part by part, and what that leaves of the speed-up its accepted length could give.

Single row, every draft verified. Plain and speculative `generate` run in turns on each prompt, each once as it is (for
the speed-up) and once under a clock (for the parts), after their greedy texts were found equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from ..modeling_dspark import DSparkDrafter
from ..plain_decoding import plain_decoding
from ..stats import STEPS, SpeculationStats
from .batches import PLAIN, in_turns
from .compare import first_difference, timed
from .round_clock import RoundClock, RoundSettings, RoundTimes, StepTimes

DRAFTED = "with drafts"
PLAIN_CLOCKED, DRAFTED_CLOCKED = f"{PLAIN}, clocked", f"{DRAFTED}, clocked"
_UNCLOCKED, _CLOCKED = (PLAIN, DRAFTED), (PLAIN_CLOCKED, DRAFTED_CLOCKED)
BETWEEN = "between steps"
_DRAFTING = ("draft", "propose", "confidence")


class OutputsDifferError(RuntimeError):
    """Texts with drafts are not those of plain decoding, so their times say nothing."""


@dataclass
class RoundCost:
    """Times of one run; seconds everywhere.

    Attributes:
        block: Drafts of a whole round, gamma.
        num_prompts: Prompts measured.
        differing: Prompts left out since their texts differ (only where rounding may decide between near-ties), as
            (index, first differing new token).
        seconds: Of whole calls, by way, per repeat.
        new_tokens: Of the same calls.
        plain_steps: Of single plain steps.
        rounds: Of all clocked rounds.
        stats: Merged statistics of the calls with drafts that ran without a clock.
    """

    block: int
    num_prompts: int
    differing: list[tuple[int, int]]
    seconds: dict[str, list[float]]
    new_tokens: dict[str, list[int]]
    plain_steps: list[float] = field(default_factory=list)
    rounds: list[RoundTimes] = field(default_factory=list)
    stats: SpeculationStats = field(default_factory=SpeculationStats)

    @property
    def whole_rounds(self) -> list[RoundTimes]:
        """Rounds that verified a whole block: neither the budget nor an end-of-sequence token cut them."""
        return [times for times in self.rounds if times.verified == self.block]

    @property
    def plain_step(self) -> float:
        """T(1): one token of plain `generate`, whatever it does around the forward included."""
        return median(self.plain_steps)

    @property
    def verification(self) -> float:
        """T(gamma + 1): the target's forward pass over an anchor and a whole block."""
        return median(times.forwards["verify", "target"] for times in self.whole_rounds)

    @property
    def drafting(self) -> float:
        """T_draft: draft, propose and confidence of a block."""
        return median(sum(times.steps[name] for name in _DRAFTING) for times in self.whole_rounds)

    @property
    def host_share(self) -> float:
        """Share of whole rounds outside both models' forward passes."""
        inside = sum(sum(times.forwards.values()) for times in self.whole_rounds)
        return 1 - inside / sum(times.seconds for times in self.whole_rounds)

    @property
    def accepted_length(self) -> float:
        """tau on these prompts."""
        return self.stats.mean_acceptance_length

    @property
    def speedup(self) -> float:
        """Time per token of plain `generate` over that with drafts, whole calls, median repeats."""
        plain, drafted = (
            median(s / n for s, n in zip(self.seconds[way], self.new_tokens[way], strict=True))
            for way in (PLAIN, DRAFTED)
        )
        return plain / drafted

    @property
    def limit(self) -> float:
        """tau x T(1) / (T(gamma + 1) + T_draft): the speed-up if a round were verification and drafting alone."""
        return self.accepted_length * self.plain_step / (self.verification + self.drafting)

    @property
    def efficiency(self) -> float:
        """The speed-up's share of its limit."""
        return self.speedup / self.limit

    def lines(self) -> list[dict[str, Any]]:
        """Per step of a whole round, then what lies between steps: median seconds, share of the rounds' time, and the
        same of the forward passes inside."""
        total = sum(times.seconds for times in self.whole_rounds)

        def line(name: str, values: list[float]) -> dict[str, Any]:
            return {"name": name, "seconds": median(values), "share": sum(values) / total}

        found = []
        for step in STEPS:
            inside = [
                line(model, [times.forwards.get((step, model), 0.0) for times in self.whole_rounds])
                for model in ("target", "drafter")
                if any((step, model) in times.forwards for times in self.whole_rounds)
            ]
            found.append({**line(step, [t.steps.get(step, 0.0) for t in self.whole_rounds]), "forwards": inside})
        rest = [times.seconds - sum(times.steps.values()) for times in self.whole_rounds]
        return [*found, {**line(BETWEEN, rest), "forwards": []}]

    def to_dict(self) -> dict[str, Any]:
        """JSON-able figures."""
        figures = (
            "plain_step", "verification", "drafting", "accepted_length", "host_share", "speedup", "limit",
            "efficiency",
        )  # fmt: skip
        return {
            "block": self.block, "prompts": self.num_prompts,
            "differing": [{"prompt": index, "new_token": place} for index, place in self.differing],
            "rounds": len(self.rounds), "whole_rounds": len(self.whole_rounds),
            "round": median(times.seconds for times in self.whole_rounds), "lines": self.lines(),
            **{name: getattr(self, name) for name in figures},
            "seconds": self.seconds, "new_tokens": self.new_tokens,
        }  # fmt: skip


def measure_round(  # noqa: PLR0913 - what is measured, and how
    target: PreTrainedModel,
    drafter: DSparkDrafter,
    prompts: Sequence[torch.Tensor],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    repeats: int = 3,
    is_scored: bool = True,
    progress: Callable[[str], None] = lambda _: None,
) -> RoundCost:
    """Decode prompts plainly and with drafts, in turns.

    Args:
        target: In the state to be measured (packed or not).
        drafter: Fits it.
        prompts: int64 `[1, P]` each.
        max_new_tokens: Per prompt.
        temperature: Of the timed runs; 0 is greedy. Texts are compared greedily in any case.
        repeats: Timed runs of each prompt, of each way.
        is_scored: Drafts are scored, where the drafter has a confidence head.
        progress: Told what runs next.

    Raises:
        OutputsDifferError: Greedy texts differ in float32, or for every prompt.
        ValueError: No round verified a whole block, or no plain step was seen.
    """
    settings = RoundSettings(is_scored=is_scored and bool(drafter.config.enable_confidence_head))
    progress("comparing texts")
    wanted, differing = _equal_texts(_Calls(target, drafter, settings, max_new_tokens, 0.0), prompts)
    calls = _Calls(target, drafter, settings, max_new_tokens, temperature)
    seconds, new_tokens = {w: [0.0] * repeats for w in _UNCLOCKED}, {w: [0] * repeats for w in _UNCLOCKED}
    cost = RoundCost(drafter.config.num_draft_tokens, len(wanted), differing, seconds, new_tokens)
    places = list(wanted)
    for repeat, number, way in in_turns([*_UNCLOCKED, *_CLOCKED], len(places), repeats):
        place = places[number]
        progress(f"prompt {place + 1}, {way}")
        torch.manual_seed(number)
        call = calls(prompts[place], way)
        if temperature == 0 and call.new_ids != wanted[place]:
            raise OutputsDifferError(f"Prompt {place + 1}, {way}: another run of the same call wrote another text.")
        if way in _UNCLOCKED:
            seconds[way][repeat] += call.seconds
            new_tokens[way][repeat] += len(call.new_ids)
        cost.plain_steps += call.plain_steps
        if isinstance(call.stats, RoundClock):
            cost.rounds += call.stats.rounds
        elif call.stats is not None:
            cost.stats = cost.stats.merge(call.stats)
    if not cost.whole_rounds or not cost.plain_steps:
        raise ValueError(
            f"No round verified all {cost.block} drafts, so there is nothing to measure: texts end too early. Take "
            f"more new tokens than {max_new_tokens}, or other prompts."
        )
    return cost


class _Call(NamedTuple):
    """What one call gave: its new ids, wall seconds, statistics (with drafts), seconds of steps (plain, clocked)."""

    new_ids: list[int]
    seconds: float
    stats: SpeculationStats | None
    plain_steps: list[float]


class _Calls:
    """`generate` in each way."""

    def __init__(
        self, target: PreTrainedModel, drafter: DSparkDrafter, settings: RoundSettings, new: int, temperature: float
    ) -> None:
        self._target: Any = target
        self._arguments = {
            "max_new_tokens": new, "return_dict_in_generate": True, **plain_decoding(target, temperature)
        }  # fmt: skip
        self.is_exact = target.dtype == torch.float32
        self._drafted = {
            way: {"assistant_model": drafter, "speculation": replace(settings, is_clocked=way in _CLOCKED)}
            for way in (DRAFTED, DRAFTED_CLOCKED)
        }

    def __call__(self, prompt: torch.Tensor, way: str) -> _Call:
        ids, streamer = prompt.to(self._target.device), StepTimes()
        more: dict[str, Any] = {"streamer": streamer} if way == PLAIN_CLOCKED else self._drafted.get(way, {})
        call = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **self._arguments, **more}
        output, seconds = timed(lambda: self._target.generate(**call))
        new_ids = output.sequences[0, ids.shape[1] :].tolist()
        return _Call(new_ids, seconds, getattr(output, "speculation", None), streamer.seconds)


def _equal_texts(calls: _Calls, prompts: Sequence[torch.Tensor]) -> tuple[dict[int, list[int]], list[tuple[int, int]]]:
    """Texts by prompt, of those that all ways write alike, and where the others differ; warms up on the way.

    Raises:
        OutputsDifferError: See `measure_round`.
    """
    equal, differing = {}, []
    for index, prompt in enumerate(prompts):
        first, *others = (calls(prompt, way).new_ids for way in (*_UNCLOCKED, *_CLOCKED))
        places = [place for other in others if (place := first_difference(other, first)) is not None]
        if places:
            differing.append((index, min(places)))
        else:
            equal[index] = first
    if differing and (calls.is_exact or not equal):
        found = "; ".join(f"prompt {index + 1} at new token {place + 1}" for index, place in differing)
        raise OutputsDifferError(
            f"Texts with drafts are not those of plain `generate`, so nothing was timed: {found}."
        )
    return equal, differing


__all__ = ["BETWEEN", "OutputsDifferError", "RoundCost", "measure_round"]
