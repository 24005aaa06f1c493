"""The law of what `generate` emits, by enumerating its random choices instead of sampling them: no sampling error.

The loop draws with `torch.multinomial` (first tokens, drafts, bonus tokens) and `torch.rand` (acceptance, recovered
tokens). `Chance` stands in for both: every draw becomes a branch with the probability the code itself gave it, and
`generate` is replayed once per leaf of the tree, many leaves at a time as rows of one batch. An acceptance uniform is
compared by the code under test, `u * a < b`, so it is replaced by an object that turns the comparison into a branch
at `b / a`; a uniform of exactly 0 is a branch of its own where it decides otherwise, of probability 2^-53 (float64).

The loop's own functions run unchanged. Three are wrapped to know whose draw a single-row draw is, and to end a row
once its first `horizon` tokens are there.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import pytest
import torch

from dspark.decoding import loop, prompt, verify
from dspark.ops.rejection import torch as rejection
from tests.reference.law import TextLaw, total_variation

# Runs `generate` on so many copies of one prompt; returns the new tokens, int64 `[rows, n]`.
Run = Callable[[int], torch.Tensor]

_ZERO = 2.0**-53  # probability of a float64 uniform that is exactly 0


class Chance:
    """Stands in for every random source of the loop.

    Args:
        horizon: Tokens of each text that matter; draws behind them are not enumerated.
        batch: Most leaves replayed at once. 1 replays each leaf in a call of its own.
        inclusive: Deliberately wrong: accept by `<=`.
        shared: Deliberately wrong: the uniform that drew a draft also decides its acceptance.
    """

    def __init__(self, horizon: int, *, batch: int = 1024, inclusive: bool = False, shared: bool = False) -> None:
        self.horizon = horizon
        self.batch = batch
        self.compare = operator.le if inclusive else operator.lt
        self.shared = shared
        self.leaves = 0
        self.verified: Counter[int] = Counter()  # rounds by scheduled drafts
        self.accepted: Counter[int] = Counter()  # and by accepted ones
        self._run: Any = None
        self._focus: int | None = None

    def law(self, run: Run) -> TextLaw:
        """Law of the first `horizon` tokens."""
        law: TextLaw = defaultdict(float)
        pending: list[list[int]] = [[]]
        while pending:
            self._paths, pending = pending[: self.batch], pending[self.batch :]
            rows = len(self._paths)
            self._cursors, self._masses, self._siblings = [0] * rows, [1.0] * rows, []
            self._start_round(range(rows))
            self._run = self._focus = None
            with self._installed():
                texts = run(rows)
            for text, mass in zip(texts[:, : self.horizon].tolist(), self._masses, strict=True):
                law[tuple(text)] += mass
            self.leaves += rows
            pending = self._siblings + pending
        return dict(law)

    def choose(self, row: int, probs: list[float]) -> int:
        """The row's next branch; those beside it are left for later replays."""
        path, cursor = self._paths[row], self._cursors[row]
        if cursor == len(path):
            first, *others = [i for i, p in enumerate(probs) if p > 0]
            self._siblings += [[*path, other] for other in others]
            path.append(first)
        self._cursors[row] += 1
        self._masses[row] *= probs[path[cursor]]
        return path[cursor]

    def stay(self, row: int, slot: int, factor: float, bound: float) -> float:
        """Probability that a uniform u of this slot satisfies `u * factor < bound`."""
        if factor == 0:
            return float(self.compare(0.0, bound))
        low, high = self._intervals[row][self.progress[row] + slot] if self.shared else (0.0, 1.0)
        share = (bound / factor - low) / (high - low)
        return min(share, 1.0) if share > 0 else _ZERO * self.compare(0.0, bound)

    def missing(self, row: int) -> int:
        """Tokens of the row's first `horizon` that are not decided yet."""
        if self._run is None:
            return self.horizon
        return self.horizon - (self._run.text.lengths[row] - self._run.text.prompt_length) - self.progress[row]

    def rows(self, count: int) -> list[int]:
        """Original rows of a draw for `count` rows."""
        if self._focus is not None:
            rows = [self._focus]
        else:
            rows = list(range(count)) if self._run is None else list(self._run.rows)
        assert len(rows) == count, "every row needs draws of its own"
        return rows

    def _start_round(self, rows: Any) -> None:
        self.progress = dict.fromkeys(rows, 0)  # drafts of this round accepted so far
        self.lengths: list[int] = []
        self._intervals: dict[int, list[tuple[float, float]]] = {row: [] for row in rows}

    # --- the sources ----------------------------------------------------------------------------------------------

    def _multinomial(self, probs: torch.Tensor, num_samples: int) -> torch.Tensor:
        assert num_samples == 1
        picks = []
        for row, law in zip(self.rows(len(probs)), _normalised(probs), strict=True):
            # Drafts of a block (no row is in focus) are all enumerated: a wrong cut may look at any of them.
            is_behind = self._focus is not None and self.missing(row) <= 0
            picks.append(law.index(max(law)) if is_behind else self.choose(row, law))
            low = sum(law[: picks[-1]])
            self._intervals[row].append((low, low + law[picks[-1]]))
        return torch.tensor(picks)[:, None]

    def _rand(self, rows: int, columns: int, **kwargs: Any) -> _Uniforms:
        assert kwargs.get("generator") is None
        return _Uniforms(self, self.rows(rows), columns)

    def _draw_like(self, draw: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def drawing(weights: torch.Tensor, rows: list[int]) -> torch.Tensor:
            picks, uniforms = [], []
            for row, law in zip(rows, _normalised(weights), strict=True):
                picks.append(law.index(max(law)) if self.missing(row) <= 0 else self.choose(row, law))
                uniforms.append(sum(law[: picks[-1]]) + law[picks[-1]] / 2)
            drawn = draw(weights, torch.tensor(uniforms, dtype=torch.float64))
            assert drawn.tolist() == picks, "the draw does not invert the cumulative weights"
            return drawn

        return drawing

    # --- wrapped functions of the loop ----------------------------------------------------------------------------

    @contextmanager
    def _installed(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "multinomial", self._multinomial)
            patch.setattr(torch, "rand", self._rand)
            patch.setattr(rejection, "draw", self._draw_like(rejection.draw))
            patch.setattr(verify, "rejection_sample", self._noting_lengths(verify.rejection_sample))
            patch.setattr(loop, "decode_round", self._ending(loop.decode_round))
            patch.setattr(prompt, "_first_token", self._focused(prompt._first_token, lambda run, row: row))
            by_slot = self._focused(verify._verify_slot_by_slot, lambda run, _, drafts, b: run.rows[b])
            patch.setattr(verify, "_verify_slot_by_slot", by_slot)
            yield

    def _focused(self, function: Callable[..., Any], row_of: Callable[..., int]) -> Callable[..., Any]:
        def focused(run: Any, *args: Any) -> Any:
            self._run, self._focus = run, row_of(run, *args[:-1])
            try:
                return function(run, *args)
            finally:
                self._focus = None

        return focused

    def _ending(self, decode_round: Callable[[Any], None]) -> Callable[[Any], None]:
        def ending(run: Any) -> None:
            self._run = run
            self._start_round(run.rows)
            loop.drop_finished(run, [self.missing(row) <= 0 for row in run.rows])
            if run.rows:
                seen = len(run.stats.verified)
                decode_round(run)
                self.verified.update(run.stats.verified[seen:])
                self.accepted.update(run.stats.accepted[seen:])

        return ending

    def _noting_lengths(self, rejection_sample: Callable[..., Any]) -> Callable[..., Any]:
        def noting(ids: torch.Tensor, draft: Any, target: Any, lengths: torch.Tensor, **kwargs: Any) -> Any:
            self.lengths = lengths.tolist()
            return rejection_sample(ids, draft, target, lengths, **kwargs)

        return noting


def emitted_law(model: Any, assistant: Any, ids: torch.Tensor, chance: Chance, **kwargs: Any) -> TextLaw:
    """Law of the text behind prompt `ids [1, P]` that `generate` samples; plain decoding when `assistant` is None.

    Ended texts are padded. Functions as `assistant` and `logits_processor` make new ones for every replay.
    """
    pad = model.generation_config.pad_token_id
    call = {"assistant_model": assistant, **kwargs}
    makers = {name: call.pop(name) for name, value in dict(call).items() if isinstance(value, FunctionType)}

    def run(rows: int) -> torch.Tensor:
        made = {name: make() for name, make in makers.items()}
        texts = model.generate(ids.expand(rows, -1), do_sample=True, **call, **made)
        new = texts[:, ids.shape[1] :]
        return torch.nn.functional.pad(new, (0, max(chance.horizon - new.shape[1], 0)), value=pad)

    return chance.law(run)


def distance(got: TextLaw, want: TextLaw) -> float:
    """Total variation; 1 when a text came out that cannot be, however rarely."""
    is_possible = all(want.get(text, 0) > 0 for text in got)
    return float(total_variation(got, want)) if is_possible else 1.0


class _Uniforms:
    """`[B, K + 1]` uniforms: the last column drives the next token (see `draw`), the others decide acceptance."""

    def __init__(self, chance: Chance, rows: list[int], columns: int, factor: torch.Tensor | None = None) -> None:
        self.chance = chance
        self.shape = (len(rows), columns)
        self._rows = rows
        self._factor = factor

    def __getitem__(self, key: tuple[slice, slice | int]) -> Any:
        assert key[0] == slice(None)
        if key[1] == -1:
            return self._rows
        assert key[1] == slice(None, -1)
        return self

    def __mul__(self, factor: torch.Tensor) -> _Uniforms:
        return _Uniforms(self.chance, self._rows, self.shape[1], factor)

    def __lt__(self, bounds: torch.Tensor) -> torch.Tensor:
        assert self._factor is not None
        factors = self._factor.double().expand(bounds.shape).tolist()
        outcome = torch.zeros(bounds.shape, dtype=torch.bool)
        for b, row in enumerate(self._rows):
            slots = min(self.chance.lengths[b], max(self.chance.missing(row), 0))  # later ones decide nothing
            pairs = zip(factors[b][:slots], bounds[b].double().tolist(), strict=False)
            stays = [self.chance.stay(row, k, factor, bound) for k, (factor, bound) in enumerate(pairs)]
            accepted = self.chance.choose(row, _leading(stays)) if slots else 0
            outcome[b, :accepted] = True
            self.chance.progress[row] += accepted
        return outcome


def _leading(stays: list[float]) -> list[float]:
    """Law of the number of accepted drafts."""
    law, reached = [], 1.0
    for stay in [*stays, 0.0]:
        law.append(reached * (1 - stay))
        reached *= stay
    return law


def _normalised(weights: torch.Tensor) -> list[list[float]]:
    weights = weights.double()
    return (weights / weights.sum(-1, keepdim=True)).tolist()


__all__ = ["Chance", "Run", "distance", "emitted_law"]
