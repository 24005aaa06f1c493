"""Step times of a real pair: the target's forward by token count and context, and what the drafter's side takes.

The target is timed on forwards like those of verification: a few tokens behind a filled cache, which is then cut back.
The drafter's side is the time of its steps in real rounds, so whatever the loop does is in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from ..compat import cache_name
from ..decoding.target_cache import CacheRollback
from ..modeling_dspark import DSparkDrafter
from ..plain_decoding import plain_decoding
from ..scheduling import CurveKey, ThroughputCurve
from ..speculation import SpeculationConfig
from ..target import text_config

BEFORE_VERIFYING = ("context", "draft", "propose", "confidence", "schedule")
_ROUNDS = 3  # rounds a timed call of the drafter's side must have at least, whatever is accepted


def profile_pair(  # noqa: PLR0913 - what is measured, and how
    target: PreTrainedModel,
    drafter: DSparkDrafter,
    *,
    token_counts: Sequence[int],
    contexts: Sequence[int],
    rows: Sequence[int] = (1,),
    repeats: int = 5,
    key: CurveKey | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> ThroughputCurve:
    """Measure a pair.

    Args:
        target: In the state it will decode in (packed or not).
        drafter: Fits it.
        token_counts: Tokens in the target's forward over all rows, multiples of the fewest rows.
        contexts: Tokens already in each row's cache, at least 1.
        rows: Rows of the batch: the target is timed with the fewest of them, the drafter's side with each.
        repeats: Timings per shape.
        key: Kept with the curve.
        on_progress: Told what is measured.

    Raises:
        ValueError: A count that the fewest rows do not divide, or a context that leaves no room in the target's
            positions.
    """
    fewest = min(rows, default=0)
    _check(target, token_counts, contexts, fewest)
    steps = _TargetSteps(target, fewest, contexts)
    on_progress("the target's forward")
    curve = ThroughputCurve.profile(steps.run, token_counts, contexts=contexts, repeats=repeats, key=key)
    for count in sorted(set(rows)):
        on_progress(f"the drafter's side, {count} row(s)")
        for seconds in _draft_seconds(target, drafter, count, min(contexts), repeats):
            curve.learn_draft(count, drafter.config.num_draft_tokens, seconds)
    return curve


class _TargetSteps:
    """Forwards of some tokens behind a filled cache, one cache per context length."""

    def __init__(self, target: PreTrainedModel, rows: int, contexts: Sequence[int]) -> None:
        self.target = target
        self.rows = rows
        self._rollbacks = {context: self._filled(context) for context in set(contexts)}

    def run(self, tokens: int, context: int) -> None:
        """One forward of `tokens` tokens over all rows, then the cache as before."""
        width = tokens // self.rows
        rollback = self._rollbacks[context]
        self._forward(width, rollback.cache)
        rollback.after_pass([0] * width, width)
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)

    def _filled(self, context: int) -> CacheRollback:
        cache = DynamicCache(config=text_config(self.target))
        self._forward(context, cache)
        return CacheRollback(cache)

    @torch.no_grad()
    def _forward(self, width: int, cache: DynamicCache) -> None:
        ids = _any_ids(self.target, self.rows, width)
        self.target(input_ids=ids, use_cache=True, return_dict=True, **{cache_name(self.target): cache})


def _draft_seconds(
    target: PreTrainedModel, drafter: DSparkDrafter, rows: int, context: int, repeats: int
) -> list[float]:
    """Seconds per round of the steps before verification, one figure per call; a first call is left out."""
    ids = _any_ids(target, rows, context)
    call: dict[str, Any] = {**plain_decoding(target, 0, ends=()), "attention_mask": torch.ones_like(ids)}
    call["max_new_tokens"] = call["min_new_tokens"] = _ROUNDS * (1 + drafter.config.num_draft_tokens)
    before = drafter.speculation
    # Scores are computed, as scheduling needs them, and nothing is cut by them.
    scored = drafter.config.enable_confidence_head
    drafter.speculation = replace(SpeculationConfig(policy="fixed"), record_confidence=bool(scored))
    found = []
    try:
        for _ in range(repeats + 1):
            target.generate(ids, assistant_model=drafter, **call)
            stats = drafter.last_stats
            rounds = max(stats.num_target_passes - 1, 1)
            found.append(sum(stats.step_seconds[name] for name in BEFORE_VERIFYING) / rounds)
    finally:
        drafter.speculation = before
    return found[1:]


def _any_ids(target: PreTrainedModel, rows: int, width: int) -> torch.Tensor:
    """The same ids each time; which ones makes no difference to a forward's time."""
    generator = torch.Generator().manual_seed(0)
    size = int(text_config(target).vocab_size)
    return torch.randint(size, (rows, width), generator=generator).to(target.device)


def _check(target: PreTrainedModel, token_counts: Sequence[int], contexts: Sequence[int], rows: int) -> None:
    if rows < 1 or not token_counts or any(count < rows or count % rows for count in token_counts):
        raise ValueError(
            f"Token counts must be multiples of the rows ({rows}), since every row runs as many, got "
            f"{list(token_counts)}."
        )
    longest = getattr(text_config(target), "max_position_embeddings", None)
    most = max(token_counts) // rows
    if not contexts or min(contexts) < 1 or (longest is not None and max(contexts) + most > longest):
        raise ValueError(
            f"Contexts must be at least 1 and leave room for {most} tokens in the target's {longest} positions, got "
            f"{list(contexts)}."
        )


__all__ = ["profile_pair"]
