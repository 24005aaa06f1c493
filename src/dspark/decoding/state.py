"""What travels between the steps of a round, and what lives as long as one `generate` call.

Shape letters: `B` live rows, `g` drafts of a block, `V` target vocabulary, `Vd` width of the drafter's logits, `q`
slots of a verification pass. Token ids that Python decides on are lists of integers: a round reads them from the
device once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..context_cache import ContextCache
from ..modeling_dspark import DSparkDrafter, SharedModules
from ..scheduling import VerifyPolicy
from ..speculation import SpeculationConfig
from ..stats import SpeculationStats
from .request import Request
from .session import TargetSession


class DraftVocabulary(NamedTuple):
    """Which columns of the drafter's logits may be drafted: those whose token the target's logits have a row for.

    Attributes:
        forbidden: bool `[Vd]`, columns to mask before a draw; None when there is none.
        kept: int64, indices of the other columns; None when all are kept.
        target_ids: int64 `[kept]`, their target ids; None when column j is token j up to the target's last row.
    """

    forbidden: torch.Tensor | None
    kept: torch.Tensor | None
    target_ids: torch.Tensor | None

    @classmethod
    def of(cls, drafter: DSparkDrafter, rows: int, device: torch.device) -> DraftVocabulary:
        """Of a drafter and a target with `rows` rows of logits; the law's tensors live on `device`."""
        ids = drafter.draft_token_ids
        width = drafter.config.num_logits or rows
        columns = torch.arange(width, device=drafter.device) if ids is None else ids
        forbidden = columns >= rows
        if not bool(forbidden.any()):
            whole = ids is None and width == rows
            return cls(None, None, None if whole else columns.to(device))
        kept = (~forbidden).nonzero()[:, 0]
        return cls(forbidden, kept, None if ids is None else ids[kept].to(device))


@dataclass
class Proposal:
    """Drafted tokens and the law they were drawn from (step 3).

    Attributes:
        token_ids: int64 `[B, g]`, target ids.
        previous_ids: int64 `[B, g]`, the token before each slot.
        draft_probs: float32 `[B, g, kept columns]`, the exact law of each draw after bias, processors and temperature;
            None for greedy drafts, whose law is one-hot.
        logits: `[B, g, Vd]` behind the sequential head, before any processor; kept only for a trace.
    """

    token_ids: torch.Tensor
    previous_ids: torch.Tensor
    draft_probs: torch.Tensor | None
    logits: torch.Tensor | None = None


@dataclass
class RowVerdict:
    """What verification decided for one row (step 6).

    Attributes:
        emitted: Accepted drafts and the token after them, up to where the row stops.
        num_accepted: Accepted drafts, before any cut by a stop rule.
        is_stopped: Whether a stop rule held at the last emitted token; None: not looked at yet.
        scores: float32 `[n, V]`, processed scores per token, at least one per emitted one; None when nobody asked.
        logits: float32 `[n, V]`, raw logits likewise.
    """

    emitted: list[int]
    num_accepted: int
    is_stopped: bool | None = None
    scores: torch.Tensor | None = None
    logits: torch.Tensor | None = None


@dataclass
class Text:
    """The text of all rows, prompt included.

    Attributes:
        ids: int64 buffer `[B0, capacity]` over all original rows; slots past a row's length are scratch.
        lengths: Tokens per original row.
        prompt_length: Width of the prompt, left padding included.
    """

    ids: torch.Tensor
    lengths: list[int]
    prompt_length: int

    def write(self, row: int, tokens: list[int], *, at: int | None = None) -> None:
        """Put `tokens` behind a row's text (or at slot `at`) without counting them; grows the buffer as needed."""
        start = self.lengths[row] if at is None else at
        if not tokens:
            return
        needed = start + len(tokens)
        if needed > self.ids.shape[1]:
            grown = self.ids.new_zeros(self.ids.shape[0], max(needed, 2 * self.ids.shape[1]))
            grown[:, : self.ids.shape[1]] = self.ids
            self.ids = grown
        self.ids[row, start:needed] = torch.tensor(tokens, device=self.ids.device)

    def prefix(self, row: int, length: int | None = None) -> torch.Tensor:
        """The first `length` tokens of a row (None: all of it), int64 `[1, n]`."""
        return self.ids[row : row + 1, : self.lengths[row] if length is None else length]


class PendingStates(NamedTuple):
    """Hidden states `[B, S, m*D_t]` of a pass and how many of each row's are of its text."""

    states: torch.Tensor
    counts: list[int]


class Group(NamedTuple):
    """Live rows that are decided together.

    Attributes:
        request: Theirs, or one that asks for the same.
        at: Their places among the live rows; `slice(None)`: all of them.
        rows: Their original indices.
    """

    request: Request
    at: list[int] | slice
    rows: list[int]

    @property
    def owner(self) -> Request | None:
        """Whose code decides the group; None where rows of several requests only want the largest logits."""
        return None if self.request.is_plain_greedy else self.request

    def pick(self, items: list[Any]) -> list[Any]:
        """Of one item per live row, those of the group."""
        return items[self.at] if isinstance(self.at, slice) else [items[b] for b in self.at]


@dataclass
class DecodingRun:
    """Texts decoded together: models, settings and the state the steps work on.

    Attributes:
        drafter, shared: The drafter and what it borrows.
        vocabulary: What it may draft.
        session: The target with its cache.
        settings: Speculation settings.
        policy: Decides how many slots are drafted and verified.
        text: All rows' text.
        stats: Counts and times of all rows.
        requests: Original row to what it asks for.
        rows: Original index of each live row; the first dimension of every `[B, ...]` tensor follows it.
        anchors: Last committed token of each live row.
        context: Draft cache of the live rows.
        pending: Target hidden states the draft cache has not taken yet, one entry per round since it last did.
        outputs: The target's output of the present round.
        is_open: Whether rows may join later.
    """

    drafter: DSparkDrafter
    shared: SharedModules
    vocabulary: DraftVocabulary
    session: TargetSession
    settings: SpeculationConfig
    policy: VerifyPolicy
    text: Text
    stats: SpeculationStats
    requests: dict[int, Request] = field(default_factory=dict)
    rows: list[int] = field(default_factory=list)
    anchors: list[int] = field(default_factory=list)
    context: ContextCache | None = None
    pending: list[PendingStates] = field(default_factory=list)
    outputs: Any = None
    is_open: bool = False

    @property
    def device(self) -> torch.device:
        """Where token ids and target scores live."""
        return self.text.ids.device

    def groups(self) -> list[Group]:
        """The live rows by request; those that only want the largest logits are one group."""
        found: dict[int, tuple[Request, list[int]]] = {}
        for b, row in enumerate(self.rows):
            request = self.requests[row]
            key = 0 if request.is_plain_greedy else id(request)
            found.setdefault(key, (request, []))[1].append(b)
        if len(found) == 1:
            return [Group(self.requests[self.rows[0]], slice(None), self.rows)]
        return [Group(request, at, [self.rows[b] for b in at]) for request, at in found.values()]

    @contextmanager
    def guard(self, request: Request | None) -> Iterator[None]:
        """Runs code of a request; where that is isolated, its exception ends it alone. None: nobody's code."""
        try:
            yield
        except Exception as error:
            if request is None or not request.is_isolated:
                raise
            request.error = error

    @property
    def confidence_temperatures(self) -> torch.Tensor | None:
        """Calibration of the live rows, float32 `[g]` or `[B, g]` beside the drafter; None where none has one."""
        rows = [self.requests[row].confidence_temperatures for row in self.rows]
        if all(row is rows[0] for row in rows):
            return rows[0]
        known = next(row for row in rows if row is not None)
        return torch.stack([torch.ones_like(known) if row is None else row for row in rows])

    def most_slots(self, limits: list[int]) -> int:
        """Widest block to draft: whole ones, but no wider than can be verified where the policy chooses widths."""
        most = self.drafter.config.num_draft_tokens
        return min(most, max(limits)) if self.settings.policy == "auto" else most

    def remaining(self) -> dict[int, int] | None:
        """Tokens each live row may still get, by original row; None: rows may join, or a row has no end."""
        found = {row: self.requests[row].stop_rules.budget(self.text.lengths[row]) for row in self.rows}
        ends = {row: left for row, left in found.items() if left is not None}
        return None if self.is_open or len(ends) < len(found) else ends

    def max_drafts(self) -> list[int]:
        """Most drafts worth verifying per live row: block, user's cap, and the tokens the row may still get."""
        if self.session.wants_plain_pass:
            return [0] * len(self.rows)
        block = self.drafter.config.num_draft_tokens
        cap = block if self.settings.num_assistant_tokens is None else min(block, self.settings.num_assistant_tokens)
        limits = []
        for row in self.rows:
            budget = self.requests[row].stop_rules.budget(self.text.lengths[row])
            # One token of the budget comes from the target itself after the accepted drafts.
            limits.append(cap if budget is None else max(min(cap, budget - 1), 0))
        room = self.session.position_room()
        return limits if room is None else [max(min(limit, room), 0) for limit in limits]


__all__ = ["DecodingRun", "DraftVocabulary", "Group", "PendingStates", "Proposal", "RowVerdict", "Text"]
