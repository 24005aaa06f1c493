"""Anchors, labels and visibility of training blocks.

Catches: blocks that see context by block index instead of position (and so the future), features or labels shifted by
one, a first answer token that is never an anchor, a cross-entropy-only run that demands the target's law, a confidence
loss whose reach into the backbone cannot be chosen.
"""

from __future__ import annotations

import pytest
import torch

from dspark.objective import Objective, build_blocks, sample_anchors

from . import tiny


def batch(length: int = 16, rows: int = 1):
    ids = torch.randint(3, tiny.VOCAB - 1, (rows, length))
    mask = torch.ones(rows, length, dtype=torch.bool)
    return ids, mask


def test_blocks_do_not_see_context_from_their_anchor_on() -> None:
    target = tiny.qwen3()
    drafter = tiny.drafter_for(target, block_size=7)
    drafter.share_with(target)
    drafter.objective = Objective(ce=1, l1=0, confidence=0)
    ids, mask = batch()
    width = drafter.config.context_width
    for block, anchor in enumerate((5, 7)):
        features = torch.randn(1, 16, width, requires_grad=True)
        keep = torch.tensor([[block == 0, block == 1]])
        out = drafter(ids, features, mask, anchor_positions=torch.tensor([[5, 7]]), anchor_keep_mask=keep)
        assert bool(out.supervised[0, block].all())
        out.loss.backward()
        reach = features.grad[0].abs().sum(-1)
        assert (reach[anchor:] == 0).all()
        assert (reach[:anchor] > 0).all()


def test_hand_made_triples() -> None:
    """Six tokens 10..15; anchor 2 holds token 12, predicts 13, 14, 15 and reads features of positions 0 and 1."""
    ids = torch.arange(10, 16)[None]
    mask = torch.tensor([[False, False, True, True, True, True]])
    blocks = build_blocks(ids, mask, torch.tensor([[2]]), torch.tensor([[True]]), 4)
    assert blocks.labels[0, 0].tolist() == [13, 14, 15, 15]
    assert blocks.previous_ids[0, 0].tolist() == [12, 13, 14, 15]
    assert blocks.supervised[0, 0].tolist() == [True, True, True, False]
    target = tiny.llama()
    drafter = tiny.drafter_for(target)
    drafter.share_with(target)
    drafter.objective = Objective(chunk_size=None)
    # Features are their position's own: only 0 and 1 move the logits of the block at anchor 2.
    for position in range(6):
        plain, moved = torch.zeros(2, 1, 6, drafter.config.context_width)
        moved[0, position] = 1.0
        how = {"anchor_positions": torch.tensor([[2]]), "target_last_hidden_states": torch.zeros(1, 6, 32)}
        logits = [drafter(ids, features, mask, **how).logits for features in (plain, moved)]
        assert torch.equal(*logits) == (position >= 2)


def test_anchors_are_supervised_and_have_a_supervised_next_token() -> None:
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
    positions, keep = sample_anchors(mask, 9)
    assert positions[keep].tolist() == [3, 4, 5]
    positions, keep = sample_anchors(torch.tensor([[0, 1, 0, 1, 1]]), 9)
    assert positions[keep].tolist() == [3]
    _, keep = sample_anchors(torch.zeros(1, 5), 9)
    assert not keep.any()


def test_fewer_anchors_than_asked_are_all_taken_once() -> None:
    mask = torch.ones(1, 12)
    drawn = torch.stack([sample_anchors(mask, 4)[0][0] for _ in range(200)])
    assert all(len(set(row.tolist())) == 4 for row in drawn)
    assert set(drawn.flatten().tolist()) == set(range(11))


def test_cross_entropy_alone_needs_no_law_of_the_target() -> None:
    target = tiny.llama()
    drafter = tiny.drafter_for(target)
    drafter.share_with(target)
    ids, mask = batch()
    features = torch.randn(1, 16, drafter.config.context_width)
    drafter.objective = Objective(ce=1, l1=0, confidence=0)
    out = drafter(ids, features, mask)
    assert out.loss == out.ce_loss > 0
    drafter.objective = Objective(ce=0, l1=1, confidence=0)
    with pytest.raises(ValueError, match="target_last_hidden_states"):
        drafter(ids, features, mask)


@pytest.mark.parametrize("detach", [True, False])
def test_confidence_loss_reaches_the_backbone_unless_detached(detach: bool) -> None:
    target = tiny.llama()
    drafter = tiny.drafter_for(target)
    drafter.share_with(target)
    drafter.objective = Objective(ce=0, l1=0, confidence=1, detach_confidence=detach)
    ids, mask = batch()
    out = drafter(ids, torch.randn(1, 16, drafter.config.context_width), mask, torch.randn(1, 16, 32))
    out.loss.backward()
    assert (drafter.fc.weight.grad is None) == detach
    assert drafter.confidence_head.proj.weight.grad.abs().sum() > 0
