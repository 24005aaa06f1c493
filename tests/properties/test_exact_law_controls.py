"""Deliberately wrong rules in the real loop: the check of `test_exact_law.py` must fail on every one of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from dspark.decoding import loop
from dspark.decoding.confidence import Confidence
from dspark.decoding.processors import Processors
from dspark.ops.rejection import torch as rejection
from tests.conftest import golden_root

from .enumeration import Chance, emitted_law
from .test_exact_law import HISTORY, PROMPT, ROW_WISE, TOLERANCE, Case, deviation
from .tiny import constant_pair

MARGIN = 5e-3  # thousands of times the tolerance
# Changes a copy of what the real `schedule` returns: (run, proposal, confidence, drafts) -> drafts.
Cut = Callable[[Any, Any, Any, list[list[int]]], list[list[int]]]


def law_before_the_warpers(patch: pytest.MonkeyPatch) -> None:
    propose, process = loop.propose, Processors.process_draft
    raw: list[torch.Tensor] = []

    def noting(self: Any, prefix_ids: Any, logits: torch.Tensor, *args: Any) -> torch.Tensor:
        raw.append(logits.softmax(-1))
        return process(self, prefix_ids, logits, *args)

    def wrong(run: Any, block: Any) -> Any:
        raw.clear()
        return replace(propose(run, block), draft_probs=torch.stack(raw, dim=1))

    patch.setattr(Processors, "process_draft", noting)
    patch.setattr(loop, "propose", wrong)


def softmax_of_greedy_drafts(patch: pytest.MonkeyPatch) -> None:
    """Drafts are the largest tokens, but their law is said to be the softmax."""
    propose = loop.propose

    def wrong(run: Any, block: Any) -> Any:
        with pytest.MonkeyPatch.context() as greedy:
            greedy.setattr(torch, "multinomial", lambda probs, _: probs.argmax(-1, keepdim=True))
            return propose(run, block)

    patch.setattr(loop, "propose", wrong)


def cut_by(cut: Cut) -> Callable[[pytest.MonkeyPatch], None]:
    schedule = loop.schedule

    def wrong(run: Any, proposal: Any, confidence: Any, limits: list[int]) -> list[list[int]]:
        return cut(run, proposal, confidence, schedule(run, proposal, confidence, limits))

    return lambda patch: patch.setattr(loop, "schedule", wrong)


def drop_from_unlikely_drafts(run: Any, proposal: Any, confidence: Any, drafts: list[list[int]]) -> list[list[int]]:
    """Slot k goes because of the token drawn at k."""
    probs = proposal.draft_probs.gather(-1, proposal.token_ids[..., None])[..., 0]
    lengths = (probs >= 0.5).int().cumprod(-1).sum(-1).tolist()
    return [row[:length] for row, length in zip(drafts, lengths, strict=True)]


def drop_before_doubtful_slots(run: Any, proposal: Any, confidence: Any, drafts: list[list[int]]) -> list[list[int]]:
    """Slot k goes because of the confidence of slot k + 1, which has seen the token drawn at k."""
    later = Confidence(confidence.logits, confidence.own.roll(-1, 1), confidence.survival.roll(-1, 1))
    lengths = (later.own[:, :-1] >= 0.5).int().cumprod(-1).sum(-1).tolist()
    return [row[:length] for row, length in zip(drafts, lengths, strict=True)]


def cut_after_verification(patch: pytest.MonkeyPatch) -> None:
    """Verified text is shortened by what it says."""
    verify = loop.verify

    def wrong(*args: Any) -> Any:
        verdicts = verify(*args)
        for verdict in verdicts:
            if len(verdict.emitted) > 1 and verdict.emitted[-1] == 1:
                verdict.emitted, verdict.is_stopped = verdict.emitted[:-1], False
        return verdicts

    patch.setattr(loop, "verify", wrong)


def redraw_from_target(patch: pytest.MonkeyPatch) -> None:
    """A refusal is followed by a draw from the target's law: nothing is subtracted."""
    patch.setattr(rejection, "_residual", lambda target_row, *_: target_row)


def residual_not_normalised(patch: pytest.MonkeyPatch) -> None:
    """An inverse-CDF draw then leaves the missing mass on the last token."""
    residual = rejection._residual

    def wrong(*args: Any) -> torch.Tensor:
        weights = residual(*args)
        weights[:, -1] += 1 - weights.sum(-1)
        return weights

    patch.setattr(rejection, "_residual", wrong)


def prefix_of_the_round(patch: pytest.MonkeyPatch) -> None:
    """Processors see the text as it was before the block, in every slot."""
    process = Processors.process_target

    def wrong(self: Any, row: int, prefix_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return process(self, row, prefix_ids[:, : PROMPT.shape[1] + 1], logits)

    patch.setattr(Processors, "process_target", wrong)


def nothing(patch: pytest.MonkeyPatch) -> None:
    pass


TOP_K = ROW_WISE["top-k"]
PENALTY = HISTORY["repetition penalty"]
WRONG: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Case, dict[str, bool]]] = {
    "law before the warpers": (law_before_the_warpers, ROW_WISE["temperature 1.5"], {}),
    "law before the penalty": (law_before_the_warpers, PENALTY, {}),
    "softmax of greedy drafts": (softmax_of_greedy_drafts, Case(), {}),
    "cut by the drawn token": (cut_by(drop_from_unlikely_drafts), Case(), {}),
    "cut by a later confidence": (
        cut_by(drop_before_doubtful_slots), Case({"assistant_confidence_threshold": 1e-9}), {}
    ),
    "cut after verification": (cut_after_verification, Case(), {}),
    "refusal redrawn from the target": (redraw_from_target, Case(), {}),
    "residual not normalised": (residual_not_normalised, Case(), {}),
    "residual not normalised, slot by slot": (residual_not_normalised, PENALTY, {}),
    "accept at p=0": (nothing, TOP_K, {"inclusive": True}),
    "one uniform for draw and acceptance": (nothing, Case(), {"shared": True}),
    "one uniform for draw and acceptance, slot by slot": (nothing, PENALTY, {"shared": True}),
    "processors on the round's prefix": (prefix_of_the_round, HISTORY["no repeated n-gram"], {}),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_rules_are_caught(name, monkeypatch):
    install, case, flags = WRONG[name]
    install(monkeypatch)
    assert deviation(case, Chance(case.horizon, **flags)) > MARGIN


@pytest.mark.parametrize("rule", ["early_stop", "global_search"])
def test_appendix_a(rule, monkeypatch):
    """The paper's own example: a schedule that looks at the first draft gives 0.85 / 0.15 instead of 0.7 / 0.3."""
    example = json.loads((golden_root() / "algorithms" / "appendix_a.json").read_text())
    model, assistant = constant_pair([example["target"][x] for x in "AB"], [example["draft"][x] for x in "AB"], 2)
    lengths = [example[rule]["lengths_by_x1"][x] for x in "AB"]
    cut_by(lambda run, proposal, confidence, drafts: [row[: lengths[row[0]]] for row in drafts])(monkeypatch)
    law = emitted_law(model, assistant, torch.tensor([[1]]), Chance(2), max_new_tokens=6)
    # The first token is the prompt pass's own; the second is the first of a round.
    seen = [sum(mass for text, mass in law.items() if text[1] == token) for token in range(2)]
    assert seen == pytest.approx([example[rule]["first_token_distribution"][x] for x in "AB"], abs=TOLERANCE)
