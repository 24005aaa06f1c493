"""Whole generations of the reference, round by round, through `generate(assistant_model=...)`.

Catches: a draft that depends on how the round before ended, a wrong bonus position, a threshold off by one slot, stops
seen late. The reference keeps other books in three places, which `expected_rounds` translates: it drafts and verifies
full blocks past the length limit, it counts an overshooting round, and it verifies what follows a drafted stop token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from dspark import DSparkDrafter

from . import common

NAMES = common.names("traces")


class Round(NamedTuple):
    """What one round of ours should do: its block (None: not drafted), drafts verified, drafts accepted."""

    block: list[int] | None
    verified: int
    accepted: int
    confidence: list[float]


def cases(name: str) -> Iterator[tuple[str, list[int], dict[str, Any], list[int]]]:
    """Label, prompt, the reference's run, and the new ids of plain greedy decoding."""
    trace = common.read("traces", name)
    prompts = [case["prompt_ids"] for case in trace["prompts"]]
    for i, case in enumerate(trace["prompts"]):
        for run in case["runs"]:
            yield f"prompt {i}, threshold {run['confidence_threshold']}", prompts[i], run, case["plain_greedy_new_ids"]
    for run in trace["short_budget"]:
        yield f"{run['max_new_tokens']} tokens", prompts[2], run, run["plain_greedy_new_ids"]
    for run in trace["stop_tokens"]:
        prompt = run["prompt_ids"] if run.get("prompt_ids") else prompts[run["prompt_index"]]
        yield run["category"], prompt, run, run["plain_greedy_new_ids"]


def expected_rounds(run: dict[str, Any]) -> list[Round]:
    """The reference's rounds in our books."""
    stops = run["stop_token_ids"] or []
    rounds = []
    emitted = 1  # the first token comes from the prompt's own pass
    books = (run[key] for key in ("draft_blocks", "proposal_lengths", "accepted_draft_lengths", "confidence_probs"))
    for block, proposed, accepted, confidence in zip(*books, strict=True):
        left = run["max_new_tokens"] - emitted
        if left == 0:
            break
        verified = min(proposed, left - 1)
        stop = next((k for k in range(verified) if block[k] in stops), None)
        verified = verified if stop is None else min(verified, stop + 1)
        accepted = min(accepted, verified)
        rounds.append(Round(block if left > 1 else None, verified, accepted, confidence))
        emitted += accepted + 1
    return rounds


class Blocks:
    """Blocks a drafter proposes during a call, and their confidences, whether the call looks at them or not."""

    def __init__(self, drafter: DSparkDrafter, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tokens: list[list[int]] = []
        self.confidence: list[list[float]] = []
        walk_block = drafter.walk_block

        def recording(block: Any, *args: Any) -> Any:
            walk = walk_block(block, *args)
            self.tokens += walk.token_ids.tolist()
            logits = drafter.confidence_logits(block.hidden, walk.previous_ids)
            self.confidence += [] if logits is None else logits.sigmoid().tolist()
            return walk

        monkeypatch.setattr(drafter, "walk_block", recording)


@pytest.mark.parametrize("name", NAMES)
def test_generation_reproduces_every_round_of_the_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = common.target(common.read("traces", name)["target"])
    drafter = common.drafter(name)
    for label, prompt, run, plain in cases(name):
        with monkeypatch.context() as patch:
            blocks = Blocks(drafter, patch)
            out = target.generate(
                torch.tensor([prompt]),
                do_sample=False,
                assistant_model=drafter,
                max_new_tokens=run["max_new_tokens"],
                eos_token_id=run["stop_token_ids"],  # None also switches off the target's own
                assistant_confidence_threshold=run["confidence_threshold"],
            )
        new_ids = out[0, len(prompt) :].tolist()
        assert new_ids == run["new_ids"] == plain, label
        rounds, stats = expected_rounds(run), drafter.last_stats
        assert stats.verified == [r.verified for r in rounds], label
        assert stats.accepted == [r.accepted for r in rounds], label
        assert blocks.tokens == [r.block for r in rounds if r.block is not None], label
        if len(new_ids) < run["max_new_tokens"]:  # a text that ends by itself needs no translation of what it accepted
            assert stats.accepted == run["accepted_draft_lengths"], label
        if blocks.confidence:
            confidence = [r.confidence for r in rounds if r.block is not None]
            torch.testing.assert_close(torch.tensor(blocks.confidence), torch.tensor(confidence), atol=1e-4, rtol=0)
