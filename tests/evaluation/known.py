"""Evaluations whose counts are known: prompts of different lengths, an oracle for all of them, its rounds by hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

from dspark import DSparkDrafter
from dspark.evaluation.evaluator import evaluate, part_of
from dspark.evaluation.prompt_sets import Prompting
from dspark.evaluation.provenance import provenance
from dspark.evaluation.results import Results, ResultsLog
from dspark.evaluation.settings import EvaluationSettings
from tests.decoding.pair import BLOCK, plain, prompt, target
from tests.decoding.words import tokenizer
from tests.scripted import Oracle

NEW = 24
GREEDY = EvaluationSettings(temperatures=(0.0,), max_new_tokens=NEW, speed=False)
# The oracle knows texts by position only, so prompts and answers take up positions of their own.
PROMPTS = {"first": [prompt(6, 0), prompt(40, 1)], "second": [prompt(80, 2)]}


def oracle(wrong: Any = (3,), **overrides: Any) -> Oracle:
    """Right on all `PROMPTS`, but for one slot per round."""
    text = _text()
    torch.manual_seed(3)
    drafter = Oracle(target(), [text], wrong=wrong, **overrides).eval()
    with torch.no_grad():  # confidence that says something else in every slot
        drafter.confidence_head.proj.weight.mul_(30)
    return drafter


@lru_cache
def _text() -> list[int]:
    """The token at each position, of whichever answer has that position."""
    text = [0] * 120
    for ids in (ids for group in PROMPTS.values() for ids in group):
        whole = plain(target(), ids, max_new_tokens=NEW)[0].tolist()
        text[ids.shape[1] : len(whole)] = whole[ids.shape[1] :]
    return text


def rounds(wrong: Iterator[int | None], new_tokens: int = NEW) -> list[tuple[int, int, int]]:
    """Drafted, verified and accepted per round of one answer: the first token is the prompt's pass's."""
    left, found = new_tokens - 1, []
    while left > 0:
        limit = min(BLOCK, left - 1)  # the token behind the drafts is always the target's own
        slot = next(wrong) if limit else None
        accepted = limit if slot is None else min(slot, limit)
        found.append((BLOCK if limit else 0, limit, accepted))
        left -= accepted + 1
    return found


def all_rounds(wrong: Any = (3,), prompts: int = 3) -> list[tuple[int, int, int]]:
    """`rounds` of several answers, one after the other."""
    slots = cycle(wrong)
    return [entry for _ in range(prompts) for entry in rounds(slots)]


def configuration(
    drafters: Mapping[str, DSparkDrafter], settings: EvaluationSettings, **kwargs: Any
) -> dict[str, Any]:
    """As the command line takes it."""
    options = {"target_name": "tiny", "prompting": Prompting(), "packed": False, **kwargs}
    return provenance(target(), tokenizer(), drafters, settings, **options)


def run(
    drafters: Mapping[str, DSparkDrafter],
    settings: EvaluationSettings = GREEDY,
    folder: Path | None = None,
    *,
    part: tuple[int, int] = (1, 1),
    prompts: Mapping[str, list[torch.Tensor]] | None = None,
    **kwargs: Any,
) -> Results:
    """Evaluate on the shared target."""
    log = ResultsLog(folder, configuration(drafters, settings), "2026-01-02")
    return evaluate(target(), drafters, part_of(prompts or PROMPTS, *part), settings, log, **kwargs)


_TIMED = ("host_share", "speed", "speedup")


def without_times(node: Any) -> Any:
    """A report without what a clock said."""
    if isinstance(node, dict):
        return {k: without_times(v) for k, v in node.items() if "seconds" not in k and k not in _TIMED}
    return [without_times(v) for v in node] if isinstance(node, list) else node


__all__ = ["GREEDY", "NEW", "PROMPTS", "all_rounds", "configuration", "oracle", "rounds", "run", "without_times"]
