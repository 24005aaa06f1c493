"""Anchors, labels and visibility of training blocks.

Catches: blocks that see context by block index instead of position (and so the future), features or labels shifted by
one, a first answer token that is never an anchor, a cross-entropy-only run that demands the target's law, a confidence
loss whose reach into the backbone cannot be chosen, a batch without anchors that leaves parameters without gradients
(devices wait for all of them), targets in another vocabulary than the drafter's.
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


@pytest.mark.parametrize("chunk_size", [None, 4])
def test_batch_without_an_anchor_gives_every_parameter_a_zero_gradient(chunk_size) -> None:
    target = tiny.llama()
    drafter = tiny.drafter_for(target, draft_vocab=list(range(50)))
    drafter.share_with(target)
    drafter.objective = Objective(chunk_size=chunk_size)
    ids, _ = batch(rows=2)
    features = torch.randn(2, 16, drafter.config.context_width)
    out = drafter(ids, features, torch.zeros(2, 16, dtype=torch.bool), torch.randn(2, 16, 32))
    out.loss.backward()
    assert out.loss == 0
    assert out.acceptance.shape == out.supervised.shape
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_law_and_labels_are_in_the_draft_vocabulary(tmp_path) -> None:
    """Against full-width laws gathered by hand; and the same number of other ids is refused."""
    target, vocab = tiny.llama(), list(range(0, tiny.VOCAB - 1, 2))
    drafter = tiny.drafter_for(target, draft_vocab=vocab)
    drafter.share_with(target)
    ids, mask = batch(rows=2)
    ids[:, ::3] = 8
    ids[:, 1::3] = 9
    last = torch.randn(2, 16, 32)
    how = {"anchor_positions": torch.tensor([[3], [5]]), "target_last_hidden_states": last}
    features = torch.randn(2, 16, drafter.config.context_width)
    drafter.objective = Objective(ce=1, l1=1, confidence=0, decay=None, chunk_size=None)
    with torch.no_grad():
        out = drafter(ids, features, mask, **how)
        law = target.lm_head(last).softmax(-1)
    draft = torch.zeros(2, 4, tiny.VOCAB)
    draft[..., vocab] = out.logits[:, 0].softmax(-1)
    rows = torch.arange(2)[:, None]
    places = torch.tensor([[3], [5]]) + torch.arange(4)  # the law of a label is computed one position before it
    l1 = (draft - law[rows, places]).abs().sum(-1)
    labels = ids[rows, places + 1]
    known = torch.isin(labels, torch.tensor(vocab))
    assert known.any()
    assert not known.all()
    ce = -draft.gather(-1, labels[..., None])[..., 0].log().masked_fill(~known, 0.0)
    torch.testing.assert_close(out.l1_loss, l1.mean(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out.ce_loss, ce.sum() / 8, rtol=1e-4, atol=1e-5)
    drafter.draft_token_ids[-1] += 1
    with pytest.raises(ValueError, match="draft_vocab_hash"):
        tiny.trainer(tmp_path, drafter, target, tiny.answers(tmp_path))
