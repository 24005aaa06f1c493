"""Step times of a real pair: the target's side of a round by tokens and context, the drafter's by rows and slots.

All of it is timed in real rounds, so what a schedule is told is what a round costs: several rows take another form of
the pass than one row of as many tokens, and whatever the loop does around the forwards is in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import Any

import torch
from transformers import PreTrainedModel

from ..modeling_dspark import DSparkDrafter
from ..plain_decoding import plain_decoding
from ..scheduling import CurveKey, RoundObservation, ThroughputCurve, VerifyPolicy
from ..speculation import Policy, SpeculationConfig
from ..target import text_config


def profile_pair(  # noqa: PLR0913 - what is measured, and how
    target: PreTrainedModel,
    drafter: DSparkDrafter,
    *,
    rows: Sequence[int] = (1,),
    slots: Sequence[int] | None = None,
    contexts: Sequence[int] = (128,),
    repeats: int = 3,
    key: CurveKey | None = None,
    curve: ThroughputCurve | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> ThroughputCurve:
    """Measure a pair in rounds whose blocks take all widths in turn, every draft verified.

    A count of tokens that several shapes give (8: one row of 7 drafts, 8 rows of none) is also kept by rows.

    Args:
        target: In the state it will decode in (packed or not).
        drafter: Fits it.
        rows: Rows of the batches.
        slots: Drafts per row, 0 (a round without drafts) to the drafter's most; None: `default_slots`.
        contexts: Tokens in each row's cache, at least 1.
        repeats: Timings per shape, after one that is left out; all of the fewest rows run once before, unmeasured.
        key: Kept with the curve.
        curve: One to add to; None: a new one.
        on_progress: Told what is measured next: the warm-up, then each number of rows at each context.

    Raises:
        ValueError: A count out of its range, or a context that leaves no room in the target's positions.
    """
    slots = default_slots(drafter) if slots is None else slots
    _check(target, drafter, rows, slots, contexts, repeats)
    curve = ThroughputCurve(key) if curve is None else curve
    widths = sorted(set(slots))
    on_progress("warming up")
    _rounds(target, drafter, min(rows), min(contexts), widths, repeats)
    for context in sorted(set(contexts)):
        seen: list[list[RoundObservation]] = []
        for count in sorted(set(rows)):
            on_progress(f"{count} {'row' if count == 1 else 'rows'} of {context} tokens")
            seen += _rounds(target, drafter, count, context, widths, repeats)
        # Shapes by turns, since of each count of tokens a curve keeps the last samples only.
        for one in filter(None, chain(*zip_longest(*seen))):
            curve.learn(one.tokens, one.verify_seconds, context, rows=one.rows)
            curve.learn_draft(one.rows, one.slots, one.draft_seconds)
    return curve


def default_slots(drafter: DSparkDrafter) -> list[int]:
    """None, one, half and all of a block."""
    most = drafter.config.num_draft_tokens
    return sorted({0, 1, most // 2, most})


class _Seen(Exception):  # noqa: N818 - no error: what was to be timed has been, and nobody wants the text
    """Ends a call."""


class _InTurn(VerifyPolicy):
    """Blocks of each width in turn, every draft verified, until each was seen often enough; then the call ends.

    Args:
        widths: Slots per row.
        repeats: Rounds kept per width; one more, the first, is not.
        is_scored: Scores are computed, as scheduling needs them, and nothing is cut by them.
    """

    def __init__(self, widths: Sequence[int], repeats: int, *, is_scored: bool = True) -> None:
        self.repeats = repeats
        self.needs_confidence = is_scored
        self.seen: dict[int, list[RoundObservation]] = {width: [] for width in widths}

    def slots(self, rows: int, most: int, remaining: Any = None) -> int:  # noqa: ARG002
        """The width seen least."""
        return min(self.seen, key=lambda width: len(self.seen[width]))

    def observe(self, observation: RoundObservation) -> None:
        """Keep the round, unless a draft of an end-of-sequence token has cut it."""
        is_whole = observation.tokens == observation.rows * (1 + observation.slots)
        if is_whole and observation.slots in self.seen:  # a recurrent target has rounds without drafts of its own
            self.seen[observation.slots].append(observation)
        if all(len(rounds) > self.repeats for rounds in self.seen.values()):
            raise _Seen


@dataclass(frozen=True)
class _Settings(SpeculationConfig):
    """Settings whose policy is given; by its name it may choose widths."""

    policy: Policy = "auto"
    given: VerifyPolicy = field(default_factory=VerifyPolicy)

    @property
    def is_learnt(self) -> bool:
        """No: nothing of it is for later calls."""
        return False

    def new_policy(self) -> VerifyPolicy:
        """The given one."""
        return self.given


def _rounds(
    target: PreTrainedModel, drafter: DSparkDrafter, rows: int, context: int, widths: Sequence[int], repeats: int
) -> list[list[RoundObservation]]:
    """Observed rounds per width."""
    policy = _InTurn(widths, repeats, is_scored=bool(drafter.config.enable_confidence_head))
    generator = torch.Generator().manual_seed(0)  # which ids makes no difference to a forward's time
    size = int(text_config(target).vocab_size)
    ids = torch.randint(size, (rows, context), generator=generator).to(target.device)
    call: dict[str, Any] = {**plain_decoding(target, 0, ends=()), "attention_mask": torch.ones_like(ids)}
    call["max_new_tokens"] = _longest(widths, repeats)
    with suppress(_Seen):
        target.generate(ids, assistant_model=drafter, speculation=_Settings(given=policy), **call)
    return [rounds[1 : repeats + 1] for rounds in policy.seen.values()]


def _longest(widths: Sequence[int], repeats: int) -> int:
    """Tokens a row gets at most until all was seen: everything accepted, and room for one more block."""
    return (repeats + 2) * sum(1 + width for width in widths) + 1


def _check(
    target: PreTrainedModel,
    drafter: DSparkDrafter,
    rows: Sequence[int],
    slots: Sequence[int],
    contexts: Sequence[int],
    repeats: int,
) -> None:
    most = drafter.config.num_draft_tokens
    if not rows or min(rows) < 1 or repeats < 1:
        raise ValueError(f"Rows and repeats must be at least 1, got rows {list(rows)} and {repeats} repeats.")
    if not slots or min(slots) < 0 or max(slots) > most:
        raise ValueError(f"Slots must be from 0 to the drafter's {most}, got {list(slots)}.")
    longest = getattr(text_config(target), "max_position_embeddings", None)
    room = _longest(sorted(set(slots)), repeats)
    if not contexts or min(contexts) < 1 or (longest is not None and max(contexts) + room > longest):
        raise ValueError(
            f"Contexts must be at least 1 and leave room for {room} tokens in the target's {longest} positions, got "
            f"{list(contexts)}."
        )


__all__ = ["default_slots", "profile_pair"]
