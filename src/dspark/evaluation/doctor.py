"""Why a drafter's accepted length is low: one thing at a time is changed, and what raises it is the likely cause.

The drafter decodes each prompt once; every suspect is then judged by replaying the rounds on that text
(`replay.py`), so a suspect costs drafting only. What cannot be judged that way (chat template, thinking switch, dtype
of the target) changes the text and gets answers of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import reduce
from statistics import stdev
from typing import Any

import torch
from transformers import PreTrainedModel

from ..modeling_dspark import DSparkDrafter
from ..pairing import Finding, check_pair
from ..plain_decoding import plain_decoding
from ..speculation import SpeculationConfig
from ..stats import SpeculationStats
from ..target import text_config, unwrap
from .replay import WrittenText, read_text, replay
from .suspects import changes

_GAIN = 0.10  # of the tokens beyond 1 per round: below it a suspect is noise
_NOTICED = 0.1  # tokens per round
_MUCH_LESS = 0.85  # of the reported length
_FEWEST_ROUNDS = 16  # below it a standard error says nothing, and one of ten suspects always looks good


@dataclass
class Suspect:
    """One thing that may be wrong, and what changing it did.

    Attributes:
        name: What was changed.
        accepted_length: Tokens per round with the change.
        gain: Difference from the drafter as it is.
        noise: Standard error of that difference.
        advice: What to do if this is the cause.
    """

    name: str
    accepted_length: float
    gain: float
    noise: float
    advice: str


@dataclass
class Diagnosis:
    """What `diagnose` found.

    Attributes:
        accepted_length: Measured by `generate`.
        replayed_length: Of the same texts by replay; another figure points at the decoding loop or a cache.
        conditional_acceptance: Per position.
        rounds: Rounds behind these figures.
        findings: Of the pairing check.
        suspects: Largest gain first.
        expected_length: Accepted length the drafter is known for, from its report; None: not known.
    """

    accepted_length: float
    replayed_length: float
    conditional_acceptance: list[float]
    rounds: int
    findings: list[Finding] = field(default_factory=list)
    suspects: list[Suspect] = field(default_factory=list)
    expected_length: float | None = None

    @property
    def cause(self) -> Suspect | None:
        """The suspect that explains most, if any explains enough to matter and there are rounds enough to say so."""
        if self.rounds < _FEWEST_ROUNDS:
            return None
        beyond = max(self.replayed_length - 1, 0.0)
        causes = [s for s in self.suspects if s.gain >= max(_NOTICED, _GAIN * beyond, 2 * s.noise)]
        return causes[0] if causes else None

    @property
    def is_healthy(self) -> bool:
        """Whether nothing was found."""
        return self._verdict()[0]

    @property
    def verdict(self) -> str:
        """The likely cause, in words."""
        return self._verdict()[1]

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {"verdict": self.verdict, "is_healthy": self.is_healthy, **asdict(self)}

    def _verdict(self) -> tuple[bool, str]:
        length, expected, best = self.accepted_length, self.expected_length, self.cause
        if abs(self.replayed_length - length) > _NOTICED:
            return False, (
                f"Decoding accepts {length:.2f} tokens per round where the same drafts on the same text would give "
                f"{self.replayed_length:.2f}: look at the target's cache and attention settings."
            )
        if best is not None:
            return False, (
                f"Likely cause: {best.name}. With it changed the accepted length is {best.accepted_length:.2f}, not "
                f"{length:.2f}: {best.advice}."
            )
        if length < 1 + _NOTICED:
            return False, (
                f"Nearly nothing is accepted ({length:.2f} tokens per round) and no setting explains it: the drafter "
                "was trained for another target, or hardly at all."
            )
        if expected is not None and length < _MUCH_LESS * expected:
            return False, (
                f"The accepted length is {length:.2f}, the drafter's own report says {expected:.2f}, and no setting "
                "explains it: these prompts are unlike those of the report, or the target's weights are not those it "
                "was trained with. Fine-tune the drafter on the target's answers to such prompts."
            )
        if self.rounds < _FEWEST_ROUNDS:
            return True, (
                f"{length:.2f} tokens per round, over {self.rounds} rounds only: too few to judge a setting by "
                f"({_FEWEST_ROUNDS} at least). Give more prompts or longer answers."
            )
        return True, (
            f"No fault found: {length:.2f} tokens per round is what this drafter gives here. A setting is "
            f"named from {_NOTICED:.2f} tokens and twice its own noise on; gains below are chance."
        )


def diagnose(
    target: PreTrainedModel,
    drafter: DSparkDrafter,
    prompts: Sequence[torch.Tensor],
    *,
    other_forms: Mapping[str, Sequence[torch.Tensor]] | None = None,
    tokenizer: Any = None,
    max_new_tokens: int = 96,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Diagnosis:
    """Measure the accepted length on `prompts` and look for what keeps it low.

    Args:
        target: The target.
        drafter: The drafter.
        prompts: int64 `[1, P]` each.
        other_forms: The same prompts in other forms (without the chat template, with thinking switched), by name.
        tokenizer: For the pairing check.
        max_new_tokens: Longest answer.
        on_progress: Called with what is being done.

    Raises:
        ValueError: There are no prompts, or the pair cannot run at all (`pairing.require_pair`'s message).
    """
    if not prompts:
        raise ValueError("There is no prompt to measure on.")
    findings = check_pair(target, drafter, tokenizer=tokenizer)
    if errors := [finding for finding in findings if finding.severity == "error"]:
        listed = "\n".join(f"- {finding.field}: {finding.message}" for finding in errors)
        raise ValueError(f"The pair cannot run, so there is no accepted length to explain:\n{listed}")
    on_progress("decoding")
    layers = _layers_to_read(target, drafter)
    measured, texts = SpeculationStats(), []
    for ids in prompts:
        written, stats = _decode(target, drafter, ids, max_new_tokens)
        measured = measured.merge(stats)
        texts.append(read_text(target, written, ids.shape[1], layers, max_new_tokens=max_new_tokens))
    base = _replayed(drafter, texts, target)
    result = Diagnosis(
        measured.mean_acceptance_length,
        base.mean_acceptance_length,
        measured.conditional_acceptance(),
        measured.num_rounds,
        findings,
    )
    for change in changes(target, drafter, tokenizer):
        on_progress(change.name)
        result.suspects.append(_suspect(change.name, _replayed(change.drafter(), texts, target), base, change.advice))
    for name, form in (other_forms or {}).items():
        on_progress(name)
        stats = SpeculationStats()
        for ids in form:
            stats = stats.merge(_decode(target, drafter, ids, max_new_tokens)[1])
        advice = "the drafter was trained on prompts of that form: format yours likewise"
        result.suspects.append(_suspect(name, stats, measured, advice))
    result.suspects.sort(key=lambda suspect: -suspect.gain)
    return result


def _decode(
    target: PreTrainedModel, drafter: DSparkDrafter, ids: torch.Tensor, count: int
) -> tuple[torch.Tensor, SpeculationStats]:
    """The greedy text `[1, T]`, prompt included, and the rounds that wrote it, every draft verified."""
    generate: Any = target.generate
    output = generate(
        ids, assistant_model=drafter, speculation=SpeculationConfig(), max_new_tokens=count,
        return_dict_in_generate=True, **plain_decoding(target, 0.0),
    )  # fmt: skip
    return output.sequences, output.speculation


def _replayed(drafter: DSparkDrafter, texts: Sequence[WrittenText], target: PreTrainedModel) -> SpeculationStats:
    return reduce(SpeculationStats.merge, (replay(drafter, text, target) for text in texts), SpeculationStats())


def _suspect(name: str, changed: SpeculationStats, base: SpeculationStats, advice: str) -> Suspect:
    found, before = changed.mean_acceptance_length, base.mean_acceptance_length
    noise = sum(_error_of_mean(stats.accepted) ** 2 for stats in (changed, base)) ** 0.5
    return Suspect(name, found, found - before, noise, advice)


def _error_of_mean(values: Sequence[int]) -> float:
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def _layers_to_read(target: PreTrainedModel, drafter: DSparkDrafter) -> set[int]:
    count = text_config(unwrap(target)).num_hidden_layers
    taps = drafter.config.target_layer_ids or ()
    return {layer + offset for layer in taps for offset in (-1, 0, 1) if -1 <= layer + offset < count - 1}


__all__ = ["Diagnosis", "Suspect", "diagnose"]
