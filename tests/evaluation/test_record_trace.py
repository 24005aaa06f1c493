"""A recorded trace holds what the drafter's rounds would be at every place of a text.

Catches: a place off by one, drafts credited behind the text's end, confidences of other places or left uncalibrated,
texts without a round that shift the others.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dspark.evaluation.record_trace import record_trace
from dspark.evaluation.replay import WrittenText, replay, write_text
from dspark.simulation import AcceptanceTrace
from tests.decoding.pair import VOCAB
from tests.evaluation.test_replay import pair
from tests.properties.tiny import close_pair

NEW = 40


def written(target: Any, drafter: Any, vocab: int, count: int = 3, new: int = NEW) -> list[WrittenText]:
    texts = []
    for seed in range(count):
        ids = torch.randint(1, vocab - 1, (1, 4 + seed), generator=torch.Generator().manual_seed(seed))
        texts.append(write_text(target, ids, drafter.config.target_layer_ids, max_new_tokens=new))
    return texts


def walked(trace: AcceptanceTrace, text: int) -> tuple[list[int], list[int]]:
    """Places where rounds start, and what each accepts when all drafts are verified."""
    place, end = trace.starts[text : text + 2].tolist()
    places, accepted = [], []
    while place < end:
        places.append(place)
        accepted.append(min(int(trace.accepted[place]), end - place - 1))
        place += accepted[-1] + 1
    return places, accepted


def test_walking_it_gives_the_rounds_of_a_drafter_that_is_right_often() -> None:
    target, drafter = close_pair()
    texts = written(target, drafter, 12)
    trace = record_trace("made", drafter, target, texts)
    rounds = [replay(drafter, text, target) for text in texts]
    assert [walked(trace, n)[1] for n in range(3)] == [stats.accepted for stats in rounds]
    merged = rounds[0].merge(rounds[1]).merge(rounds[2])
    assert trace.accepted_length() == pytest.approx(merged.mean_acceptance_length)
    assert trace.accepted_length() > 2
    assert trace.domain == "made"
    assert trace.prompt_lengths.tolist() == [4, 5, 6]
    assert np.diff(trace.starts).tolist() == [NEW - 1] * 3


@pytest.mark.parametrize(
    "fields",
    [{}, {"sample_from_anchor": False}, {"block_size": 3}, {"confidence_temperatures": [2.0, 0.5, 1.5, *[1.0] * 4]}],
    ids=str,
)
def test_confidences_are_those_of_the_rounds(fields: dict[str, Any]) -> None:
    target, drafter = pair(**fields)
    texts = written(target, drafter, VOCAB)
    trace = record_trace("made", drafter, target, texts)
    temperatures = torch.tensor(fields.get("confidence_temperatures", [1.0] * drafter.config.num_draft_tokens))
    for n, text in enumerate(texts):
        stats = replay(drafter, text, target)
        places, accepted = walked(trace, n)
        assert accepted == stats.accepted
        drafted = [place for place, count in zip(places, stats.drafted, strict=True) if count]
        logits = torch.tensor(stats.confidence_logits)
        torch.testing.assert_close(torch.from_numpy(trace.own[drafted]), logits.sigmoid())
        survival = (logits / temperatures).sigmoid().cumprod(-1)
        torch.testing.assert_close(torch.from_numpy(trace.survival[drafted]), survival)


def test_nothing_is_accepted_behind_a_text_s_end() -> None:
    target, drafter = close_pair()
    trace = record_trace("made", drafter, target, written(target, drafter, 12))
    left = trace.starts[1:].repeat(NEW - 1) - np.arange(len(trace.accepted))  # tokens behind each anchor
    assert (trace.accepted <= left).all()


def test_texts_without_a_round_are_left_out() -> None:
    target, drafter = close_pair()
    short, long = written(target, drafter, 12, 1, new=1), written(target, drafter, 12, 2)
    both = record_trace("made", drafter, target, [*short, *long])
    alone = record_trace("made", drafter, target, long)
    assert both.starts.tolist() == alone.starts.tolist()
    assert both.accepted.tolist() == alone.accepted.tolist()
    with pytest.raises(ValueError, match="No text of 'made' has two new tokens"):
        record_trace("made", drafter, target, short)


def test_a_drafter_without_a_confidence_head_is_refused() -> None:
    target, drafter = pair(enable_confidence_head=False)
    with pytest.raises(ValueError, match="no confidence head"):
        record_trace("made", drafter, target, written(target, drafter, VOCAB, 1))
