"""Replayed rounds are the decoding loop's rounds.

Catches: an anchor or context position off by one, a budget or an end-of-sequence token counted otherwise, hidden
states of other layers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dspark import DSparkDrafter, SpeculationConfig
from dspark.evaluation.replay import replay, write_text
from tests.decoding.pair import VOCAB, new_target
from tests.scripted import drafter_config


def pair(**fields: Any) -> tuple[Any, Any]:
    """A target, and a drafter biased to the target's favourites so that some drafts are accepted."""
    target = new_target()
    torch.manual_seed(1)
    drafter = DSparkDrafter(drafter_config(target, markov_rank=VOCAB, **fields)).eval()
    ids = torch.arange(VOCAB)[:, None]
    with torch.no_grad():
        bigrams = target(ids).logits[:, -1]  # after each token alone
        drafter.markov_head.markov_w1.weight.copy_(torch.eye(VOCAB))
        drafter.markov_head.markov_w2.weight.copy_(3 * bigrams.T)
    return target, drafter


@pytest.mark.parametrize("fields", [{}, {"sample_from_anchor": False}, {"block_size": 3}], ids=str)
@pytest.mark.parametrize("new", [1, 2, 7, 40])
@pytest.mark.parametrize("threshold", [0.0, 0.5])
def test_statistics_are_those_of_generate(fields: dict[str, Any], new: int, threshold: float) -> None:
    target, drafter = pair(**fields)
    found = []
    for seed in range(3):
        ids = torch.randint(1, VOCAB, (1, 6), generator=torch.Generator().manual_seed(seed))
        settings = SpeculationConfig(assistant_confidence_threshold=threshold, record_confidence=True)
        out = target.generate(
            ids, assistant_model=drafter, max_new_tokens=new, return_dict_in_generate=True, speculation=settings
        )
        text = write_text(target, ids, drafter.config.target_layer_ids, max_new_tokens=new)
        assert text.ids.tolist() == out.sequences[0].tolist()
        stats = replay(drafter, text, target, threshold=threshold)
        for name in ("drafted", "verified", "accepted", "num_new_tokens", "num_target_passes"):
            assert getattr(stats, name) == getattr(out.speculation, name), name
        torch.testing.assert_close(
            torch.tensor(stats.confidence_logits), torch.tensor(out.speculation.confidence_logits)
        )
        found += stats.accepted
    assert new < 40 or len(set(found)) > 1  # or nothing was compared


def test_an_end_inside_a_block() -> None:
    target, drafter = pair()
    ids = torch.tensor([[5, 9, 3]])
    whole = target.generate(ids, assistant_model=drafter, max_new_tokens=40, return_dict_in_generate=True)
    # The last token of the first round that accepted something ends the text in the next run.
    emitted, place = [1 + a for a in whole.speculation.accepted], 1
    for count in emitted:
        if count > 1:
            break
        place += count
    end = int(whole.sequences[0, 3 + place])  # an accepted draft
    target.generation_config.eos_token_id = end
    out = target.generate(ids, assistant_model=drafter, max_new_tokens=40, return_dict_in_generate=True)
    text = write_text(target, ids, drafter.config.target_layer_ids, max_new_tokens=40)
    assert len(text.ids) < 43
    stats = replay(drafter, text, target)
    assert (stats.verified, stats.accepted) == (out.speculation.verified, out.speculation.accepted)


def test_layers_are_read_in_the_order_asked() -> None:
    target, _ = pair()
    text = write_text(target, torch.tensor([[5, 9, 3]]), [2, 0, -1], max_new_tokens=4)
    states = target(text.ids[None], output_hidden_states=True).hidden_states
    assert text.layer_ids == (-1, 0, 2)
    torch.testing.assert_close(text.read([0, -1]), torch.cat([states[1][0], states[0][0]], -1))
