"""Calibration of one drafter at one decoding temperature: fit on some prompts, judge on others.

Rounds of one prompt resemble each other, so prompts are held out, not rounds.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from ..calibration import PositionFit, PositionReliability, fit_positions, position_reliability
from ..calibration.temperature import MIN_ROUNDS
from ..files import write_json
from ..stats import SpeculationStats
from .prompt_sets import prompt_hashes
from .rounds import stack_rounds

_NOTE = "calibrated_on.json"  # in the drafter's folder
_WHAT = "dspark calibrate"
_DIGITS = 4  # behind the point, of a temperature as it is written


@dataclass(frozen=True)
class Calibration:
    """Temperatures of one decoding temperature and what they do.

    Attributes:
        decoding_temperature: 0 is greedy.
        fits: Per draft position, the temperature and how its fit went.
        before, after: Figures on held-out prompts per draft position, raw and calibrated.
        num_fit_rounds, num_held_out_rounds: Rounds of each part.
        mean_acceptance_length: Of the held-out part.
    """

    decoding_temperature: float
    fits: list[PositionFit]
    before: list[PositionReliability]
    after: list[PositionReliability]
    num_fit_rounds: int
    num_held_out_rounds: int
    mean_acceptance_length: float

    @property
    def temperatures(self) -> list[float]:
        """One per draft position."""
        return [fit.temperature for fit in self.fits]

    @property
    def key(self) -> str:
        """Name in `DSparkConfig.confidence_temperatures`."""
        return f"{self.decoding_temperature:.6g}"

    @property
    def fitted(self) -> list[int]:
        """Positions with a temperature of their own, 0-based; the others have the one before them."""
        return [fit.position for fit in self.fits if fit.is_fitted]

    def mean_ece(self, figures: Sequence[PositionReliability]) -> float:
        """ECE over positions, weighted by their rounds as the reference does; NaN without any."""
        total = sum(f.num_rounds for f in figures)
        return sum(f.ece * f.num_rounds for f in figures if f.num_rounds) / total if total else math.nan

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "decoding_temperature": self.decoding_temperature,
            "temperatures": self.temperatures,
            "fit": {"num_rounds": self.num_fit_rounds, "positions": [asdict(fit) for fit in self.fits]},
            "held_out": {
                "num_rounds": self.num_held_out_rounds,
                "mean_acceptance_length": self.mean_acceptance_length,
                "before": [figures.to_dict() for figures in self.before],
                "after": [figures.to_dict() for figures in self.after],
            },
        }


def held_out_places(sizes: Sequence[int], share: float, seed: int) -> list[bool]:
    """Which prompts to hold out: about `share` of each set, chosen by the seed.

    Args:
        sizes: Prompts per set; the result has their sum, set by set.
        share: In (0, 1).
        seed: Of the choice.

    Raises:
        ValueError: The share is out of range, or no prompt is left on one side.
    """
    if not 0 < share < 1:
        raise ValueError(f"The held-out share must lie between 0 and 1, got {share}.")
    chosen: list[bool] = []
    for number, size in enumerate(sizes):
        # Evenly spaced over all sets together, so that small sets are held out in proportion too.
        ends = [math.floor((len(chosen) + i) * share) for i in range(size + 1)]
        is_out = [b > a for a, b in pairwise(ends)]
        random.Random(f"{seed}/{number}").shuffle(is_out)
        chosen += is_out
    if all(chosen) or not any(chosen):
        raise ValueError(
            f"{sum(sizes)} prompts and a held-out share of {share} leave no prompt on one side. Give at least "
            f"{math.ceil(1 / min(share, 1 - share))} prompts, or another share (--held-out)."
        )
    return chosen


def check_enough_prompts(is_held_out: Sequence[bool], max_new_tokens: int, fewest: int = 1) -> None:
    """Refuse before any work what cannot give enough rounds, as every round writes a token.

    Args:
        is_held_out: Per prompt.
        max_new_tokens: Per prompt.
        fewest: Prompts to fit on, at least.

    Raises:
        ValueError: Says how many rounds there can be at most, and what to change.
    """
    fitted = len(is_held_out) - sum(is_held_out)
    most = fitted * (max_new_tokens - 1)
    _check_enough(most, f"rounds at most from {len(is_held_out)} prompts of {max_new_tokens} new tokens")
    if fitted < fewest:
        raise ValueError(
            f"A head is fitted on at least {fewest} prompts that are not held out, got {fitted} of "
            f"{len(is_held_out)}. Give more prompts or hold out a smaller share (--held-out)."
        )


def _check_enough(count: int, what: str) -> None:
    if count < MIN_ROUNDS:
        raise ValueError(
            f"{count} {what} are too few to calibrate with: at least {MIN_ROUNDS} beside the held-out ones are "
            "needed, and thousands for deep positions. Give more prompts or more new tokens (--max-new-tokens), or "
            "hold out a smaller share (--held-out)."
        )


def calibrate_rounds(
    stats: Sequence[SpeculationStats],
    is_held_out: Sequence[bool],
    *,
    temperature: float,
    num_draft_tokens: int,
    refitted: Sequence[torch.Tensor] | None = None,
) -> Calibration:
    """Fit on the prompts that are not held out, judge on those that are.

    Args:
        stats: Per prompt, from [`collect_rounds`].
        is_held_out: Per prompt.
        temperature: The decoding temperature the prompts were answered at.
        num_draft_tokens: Draft positions of the drafter.
        refitted: Per prompt, the logits `[N, g]` of a head fitted again; temperatures are then fitted to these, and
            judged on them, while the figures before are those of the head as it was.

    Raises:
        ValueError: Nothing can be fitted: too few rounds, or all of them end alike.
    """
    parts = [[s for s, out in zip(stats, is_held_out, strict=True) if out is wanted] for wanted in (False, True)]
    fitted, judged = (stack_rounds(part, num_draft_tokens) for part in parts)
    raw = judged
    if refitted is not None:
        fitted, judged = (
            rounds._replace(logits=_joined(refitted, is_held_out, wanted).view_as(rounds.logits))
            for rounds, wanted in ((fitted, False), (judged, True))
        )
    _check_enough(len(fitted.logits), f"rounds at temperature {temperature:g}")
    fits = fit_positions(fitted.logits, fitted.accepted, verified_lengths=fitted.verified)
    if not any(fit.is_fitted for fit in fits):
        raise ValueError(
            f"No temperature could be fitted for decoding at temperature {temperature:g}, so nothing is written: of "
            f"{len(fitted.logits)} rounds at the first position, {fits[0].note}. Give more prompts or more new tokens "
            "(--max-new-tokens), or leave this --temperature out."
        )
    fits = [replace(fit, temperature=round(fit.temperature, _DIGITS)) for fit in fits]
    before, after = (
        position_reliability(part.logits, part.accepted, verified_lengths=part.verified, temperatures=row)
        for part, row in ((raw, None), (judged, [fit.temperature for fit in fits]))
    )
    rounds, accepted = sum(s.num_rounds for s in parts[1]), sum(sum(s.accepted) for s in parts[1])
    return Calibration(
        decoding_temperature=temperature,
        fits=fits,
        before=before,
        after=after,
        num_fit_rounds=len(fitted.logits),
        num_held_out_rounds=len(judged.logits),
        mean_acceptance_length=1 + accepted / rounds if rounds else 1.0,
    )


def note_prompts(
    folder: str | Path, sets: Mapping[str, Sequence[str]], keys: Sequence[str], kept: Sequence[str]
) -> None:
    """Note in a drafter's folder which prompts its temperatures were fitted and judged on.

    Args:
        folder: The drafter's.
        sets: The prompts.
        keys: Names of the lists in `DSparkConfig.confidence_temperatures` that come from them.
        kept: Names of all lists there are; what is noted of others is dropped.

    Raises:
        OSError: It cannot be written.
    """
    path, hashes = Path(folder) / _NOTE, prompt_hashes(sets)
    noted = {key: value for key, value in _noted(path).items() if key in kept} | dict.fromkeys(keys, hashes)
    write_json(path, {"what": _WHAT, "prompt_hashes": noted})


def calibration_prompts(folder: str | Path) -> set[str]:
    """Hashes of the prompts that a drafter in a local folder was calibrated on, as far as is noted there."""
    noted = _noted(Path(folder) / _NOTE).values()
    return {each for sets in noted for hashes in sets.values() for each in hashes}


def _noted(path: Path) -> dict[str, dict[str, list[str]]]:
    """Hashes by decoding temperature and set; of a missing or foreign file nothing."""
    try:
        note = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return note["prompt_hashes"] if isinstance(note, dict) and note.get("what") == _WHAT else {}


def _joined(logits: Sequence[torch.Tensor], is_held_out: Sequence[bool], wanted: bool) -> torch.Tensor:
    """Logits of the prompts on one side, one after another, float64."""
    side = [part.double().flatten() for part, out in zip(logits, is_held_out, strict=True) if out is wanted]
    return torch.cat(side) if side else torch.zeros(0, dtype=torch.float64)


__all__ = [
    "Calibration",
    "calibrate_rounds",
    "calibration_prompts",
    "check_enough_prompts",
    "held_out_places",
    "note_prompts",
]
