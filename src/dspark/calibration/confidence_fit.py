"""The confidence head fitted to what decoding really accepted: logistic regression on the inputs it sees in rounds.

Training shows the head anchors at random places and the overlap of two laws. Rounds begin where the one before broke
off, which is where drafting is hard, and greedy decoding accepts by equality: a head that is right in training reads
too high there, and where most logits are positive no temperature takes a mean below one half (paper 3.2.1 scales
only). So the head's one linear layer is fitted again, held near the trained one by a penalty that prompts left out of
the fit choose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

_PENALTIES = (
    10.0,
    1.0,
    1e-1,
    1e-2,
    1e-3,
    1e-4,
)  # on half the squared distance of standardised weights, in nats per event
MIN_GROUPS = 4  # as many folds
_ITERATIONS = 200
_CONSTANT = 1e-4  # a deviation below this share of the largest value is none
MIN_EVENTS = 500  # fewer say less than the training did


class LinearHead(NamedTuple):
    """`weight . input + bias`: weight float32 `[F]`, bias a number."""

    weight: torch.Tensor
    bias: float

    def logits(self, inputs: torch.Tensor) -> torch.Tensor:
        """float32 `[...]` of inputs `[..., F]`."""
        return inputs.float() @ self.weight + self.bias


@dataclass(frozen=True)
class ConfidenceFit:
    """A head fitted to rounds.

    Attributes:
        head: Fitted on all events.
        folds: Heads fitted without one fold of the groups each; they judge what they have not seen.
        fold_of: int64 `[largest group + 1]`: the fold that leaves the group out.
        penalty: The one chosen; None: no fit was better on groups it had not seen than the given head, which is kept.
        loss_before, loss_after: Nats per event of the given head, and of `folds` on the events they have not seen.
        num_events: Slots fitted on.
    """

    head: LinearHead
    folds: list[LinearHead]
    fold_of: torch.Tensor
    penalty: float | None
    loss_before: float
    loss_after: float
    num_events: int

    def without(self, group: int) -> LinearHead:
        """A head that was not fitted to events of this group, which may have none."""
        return self.folds[int(self.fold_of[group])] if group < len(self.fold_of) else self.head

    def to_dict(self) -> dict[str, float | None]:
        """What the fit was and did, JSON-able; no weights."""
        return {
            "num_events": self.num_events,
            "penalty": self.penalty,
            "log_loss_before": self.loss_before,
            "log_loss_after": self.loss_after,
        }


def fit_confidence_head(
    inputs: torch.Tensor,
    accepted: torch.Tensor,
    groups: torch.Tensor | Sequence[int],
    start: LinearHead,
    *,
    with_bias: bool = True,
) -> ConfidenceFit:
    """Fit a confidence head to slots that verification decided.

    Args:
        inputs: What the head saw, `[n, F]`, of slots that were verified after all before them had been accepted.
        accepted: bool `[n]`.
        groups: int `[n]`, the prompt of each slot: slots of one text resemble each other, so whole prompts are left
            out when penalties are compared.
        start: The trained head, which penalties hold on to.
        with_bias: Whether the head has a bias.

    Raises:
        ValueError: Shapes differ, an input is not finite, there are fewer than `MIN_EVENTS` slots or 4 groups, or all
            were (or none was) accepted.
    """
    inputs, events = inputs.detach().cpu().float(), accepted.detach().cpu().float()
    groups = torch.as_tensor(groups).cpu().long()
    if inputs.dim() != 2 or not len(inputs) == len(events) == len(groups) or inputs.shape[1] != len(start.weight):
        raise ValueError(
            f"`inputs` must be [n, {len(start.weight)}] with n events and groups, got {tuple(inputs.shape)}, "
            f"{len(events)} and {len(groups)}."
        )
    if not bool(inputs.isfinite().all()):
        raise ValueError("Inputs of the confidence head must be finite: run the drafter in float32.")
    names = groups.unique()
    if len(events) < MIN_EVENTS or len(names) < MIN_GROUPS or events.mean() in (0, 1):
        raise ValueError(
            f"A confidence head is fitted on at least {MIN_EVENTS} verified slots of {MIN_GROUPS} prompts, some "
            f"accepted and some not; got {len(events)} of {len(names)}, {int(events.sum())} accepted. Give "
            "more prompts or more new tokens."
        )
    problem = _Problem(inputs, events, start, with_bias=with_bias)
    # Prompts in turns, so that every fold has some of each set where sets follow one another.
    fold_of = torch.zeros(int(names.max()) + 1, dtype=torch.long)
    fold_of[names] = torch.arange(len(names)) % MIN_GROUPS
    parts = [fold_of[groups] != fold for fold in range(MIN_GROUPS)]
    tried = [[problem.fit(part, penalty) for part in parts] for penalty in _PENALTIES]
    losses = [
        sum(problem.loss(head, ~part) * int((~part).sum()) for head, part in zip(heads, parts, strict=True))
        / len(events)
        for heads in tried
    ]
    best = min(range(len(_PENALTIES)), key=losses.__getitem__)
    everything = torch.ones(len(events), dtype=torch.bool)
    before = problem.loss(start, everything)
    gains = losses[best] < before
    return ConfidenceFit(
        head=problem.fit(everything, _PENALTIES[best]) if gains else start,
        folds=tried[best] if gains else [start] * MIN_GROUPS,
        fold_of=fold_of,
        penalty=_PENALTIES[best] if gains else None,
        loss_before=before,
        loss_after=min(losses[best], before),
        num_events=len(events),
    )


class _Problem:
    """Standardised inputs and their events; a head is `start` plus a step in standardised coordinates."""

    def __init__(self, inputs: torch.Tensor, events: torch.Tensor, start: LinearHead, *, with_bias: bool) -> None:
        self.inputs, self.events, self.start, self.with_bias = inputs, events, start, with_bias
        self.mean = inputs.mean(0) if with_bias else torch.zeros(inputs.shape[1])
        moved = inputs - self.mean
        scale = moved.square().mean(0).sqrt()
        # What never moves says nothing, and what rounding leaves of it would be blown up: its weight stays.
        self.scale = torch.where(scale > _CONSTANT * inputs.abs().amax(0), scale, torch.inf)
        self.standard = moved / self.scale
        self.base = start.logits(inputs)

    def fit(self, part: torch.Tensor, penalty: float) -> LinearHead:
        """The head with the least penalised log loss on the events of `part`, bool `[n]`."""
        rows, events, base = self.standard[part], self.events[part], self.base[part]
        step = torch.zeros(rows.shape[1], requires_grad=True)
        shift = torch.zeros((), requires_grad=self.with_bias)
        variables = [step, shift] if self.with_bias else [step]
        optimizer = torch.optim.LBFGS(
            variables, max_iter=_ITERATIONS, tolerance_change=1e-9, line_search_fn="strong_wolfe"
        )

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = torch.nn.functional.binary_cross_entropy_with_logits(base + rows @ step + shift, events)
            loss = loss + penalty / 2 * step.square().sum()
            loss.backward()
            return loss

        with torch.enable_grad():
            optimizer.step(closure)
        change = (step / self.scale).detach()
        moved = float(shift.detach() - change @ self.mean) if self.with_bias else 0.0
        return LinearHead(self.start.weight + change, self.start.bias + moved)

    def loss(self, head: LinearHead, part: torch.Tensor) -> float:
        """Nats per event of `part`, bool `[n]`."""
        logits = head.logits(self.inputs[part])
        return float(torch.nn.functional.binary_cross_entropy_with_logits(logits, self.events[part]))


__all__ = ["MIN_EVENTS", "MIN_GROUPS", "ConfidenceFit", "LinearHead", "fit_confidence_head"]
