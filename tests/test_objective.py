"""The training objective and its blocks, against loops and by-hand numbers.

Catches: blocks that see context by block index and so the future, a shift by one of labels or features, a first answer
token that is never an anchor, a halved L1, missing mass of a reduced vocabulary that is forgotten, a denominator that
counts unsupervised positions, NaN from an empty batch, a confidence gradient that reaches too far or not far enough.
"""

from __future__ import annotations

import math

import pytest
import torch

from dspark.objective import (
    Objective,
    TargetLaw,
    block_attention_mask,
    block_loss,
    build_blocks,
    l1_distance,
    position_weights,
    sample_anchors,
)

from . import small

K = 4


# --- anchors and blocks ---------------------------------------------------------------------------------------------


def allowed_anchors(row: list[int]) -> list[int]:
    return [i for i in range(len(row) - 1) if row[i] and row[i + 1]]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("wanted", [1, 3, 100])
def test_anchors_are_drawn_among_the_allowed_ones(seed, wanted) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.rand(6, 17, generator=generator) < torch.linspace(0, 1, 6)[:, None]).int()
    positions, keep = sample_anchors(mask, wanted, generator=generator)
    assert positions.dtype is torch.int64
    assert positions.shape == keep.shape
    most = 0
    for row, drawn, kept in zip(mask.tolist(), positions, keep, strict=True):
        allowed = allowed_anchors(row)
        real = drawn[kept].tolist()
        assert len(real) == min(wanted, len(allowed))
        assert real == sorted(set(real))
        assert set(real) <= set(allowed)
        assert (drawn[~kept] == 0).all()
        assert kept.tolist() == sorted(kept.tolist(), reverse=True)  # dummies at the end
        most = max(most, len(real))
    assert positions.shape[1] == max(most, 1)


def test_anchors_follow_their_generator() -> None:
    mask = torch.ones(3, 30)
    first, again, other = (
        sample_anchors(mask, 5, generator=torch.Generator().manual_seed(s))[0] for s in (1, 1, 2)
    )  # fmt: skip
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    sample_anchors(mask, 5, generator=torch.Generator().manual_seed(1))
    assert torch.equal(torch.get_rng_state(), state)


def test_every_allowed_anchor_is_as_likely() -> None:
    mask = torch.ones(1, 9).repeat(4000, 1)
    positions, _ = sample_anchors(mask, 2, generator=torch.Generator().manual_seed(0))
    counts = positions.flatten().bincount(minlength=8)
    expected = 8000 / 8
    assert float(((counts - expected) ** 2 / expected).sum()) < 24.3  # chi-square, 7 degrees, p = 1e-3


def test_literal_mask() -> None:
    """0001111: the first answer token is an anchor, the last is not, as its next token does not exist."""
    positions, keep = sample_anchors(torch.tensor([[0, 0, 0, 1, 1, 1, 1]]), 9)
    assert positions[keep].tolist() == [3, 4, 5]


@pytest.mark.parametrize("seed", range(4))
def test_blocks_equal_a_loop(seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(100, (3, 11), generator=generator)
    mask = torch.rand(3, 11, generator=generator) < 0.8
    anchors, keep = sample_anchors(mask, 4, generator=generator)
    blocks = build_blocks(ids, mask, anchors, keep, K)
    for b in range(3):
        for a in range(anchors.shape[1]):
            runs = bool(keep[b, a])
            for k in range(K):
                position = int(anchors[b, a]) + 1 + k
                runs = runs and position < 11 and bool(mask[b, min(position, 10)])
                assert bool(blocks.supervised[b, a, k]) == runs
                if runs:
                    assert blocks.label_positions[b, a, k] == position
                    assert blocks.labels[b, a, k] == ids[b, position]
                    assert blocks.previous_ids[b, a, k] == ids[b, position - 1]


@pytest.mark.parametrize("seed", range(4))
def test_attention_mask_equals_a_loop(seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(2, 9, generator=generator) < 0.8
    anchors, keep = sample_anchors(mask, 3, generator=generator)
    got = block_attention_mask(anchors, keep, context_length=9, block_size=K)
    total = anchors.shape[1] * K
    assert got.shape == (2, 1, total, 9 + total)
    for b in range(2):
        for query in range(total):
            block = query // K
            for key in range(9 + total):
                if key < 9:
                    expected = bool(keep[b, block]) and key < int(anchors[b, block])
                else:
                    expected = (key - 9) // K == block
                assert bool(got[b, 0, query, key]) == expected


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma4"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_block_does_not_see_context_from_its_anchor_on(family, attention) -> None:
    """Dense anchors 5 and 7: block 2's loss has exactly zero gradient in features at 7 and later."""
    model = small.drafter(family)
    model.set_attn_implementation(attention)
    model.share_with(small.target(family))
    ids, mask = torch.randint(small.VOCAB, (1, 14)), torch.ones(1, 14)
    anchors = torch.tensor([[5, 7]])
    for block, anchor in enumerate((5, 7)):
        features = small.states(1, 14).requires_grad_()
        keep = torch.arange(2)[None] == block
        out = model(
            ids, features, mask, torch.randn(1, 14, small.WIDTH), anchor_positions=anchors, anchor_keep_mask=keep
        )
        out.loss.backward()
        reach = features.grad[0].abs().sum(-1)
        assert (reach[anchor:] == 0).all()
        assert (reach[:anchor] > 0).all()


@pytest.mark.parametrize("from_anchor", [True, False])
def test_hand_made_triples(from_anchor) -> None:
    """Six tokens 10..15, anchor 2: slot k's label, the token before it, and the features its logits read (0 and 1)."""
    ids, mask = torch.arange(10, 16)[None], torch.tensor([[0, 0, 1, 1, 1, 1]])
    drafts = K if from_anchor else K - 1
    blocks = build_blocks(ids, mask, torch.tensor([[2]]), torch.tensor([[True]]), drafts)
    assert blocks.labels[0, 0].tolist() == [13, 14, 15, 15][:drafts]
    assert blocks.previous_ids[0, 0].tolist() == [12, 13, 14, 15][:drafts]
    assert blocks.supervised[0, 0].tolist() == [True, True, True, False][:drafts]
    model = small.drafter(sample_from_anchor=from_anchor)
    model.share_with(small.target())
    model.objective = Objective(chunk_size=None)
    how = {"anchor_positions": torch.tensor([[2]]), "target_last_hidden_states": torch.zeros(1, 6, small.WIDTH)}
    plain = small.states(1, 6)
    for position in range(6):
        moved = plain.clone()
        moved[0, position] += 1
        pair = [model(ids, features, mask, **how).logits for features in (plain, moved)]
        assert torch.equal(*pair) == (position >= 2)
    # The law of the token at a label's position is the target's at the position before it.
    last = torch.zeros(1, 6, small.WIDTH)
    last[0, 2] = 1.0
    how["target_last_hidden_states"] = last
    moved = model(ids, plain, mask, **how).acceptance[0, 0]
    how["target_last_hidden_states"] = torch.zeros_like(last)
    still = model(ids, plain, mask, **how).acceptance[0, 0]
    assert (moved != still).tolist() == [True, *[False] * (drafts - 1)]


# --- the loss -------------------------------------------------------------------------------------------------------


def random_block(vocab: int = 9, shape: tuple[int, ...] = (2, 3, K)):
    logits = torch.randn(*shape, vocab, dtype=torch.float64).float()
    labels = torch.randint(-1, vocab, shape)
    supervised = torch.rand(shape) < 0.7
    confidence = torch.randn(shape)
    law = TargetLaw(torch.randn(*shape, vocab + 3).softmax(-1)[..., :vocab])  # some mass lies outside
    return logits, labels, supervised, confidence, law


@pytest.mark.parametrize("decay", [4.0, 0.5, None])
def test_loss_equals_a_loop(decay) -> None:
    logits, labels, supervised, confidence, law = random_block()
    objective = Objective(ce=0.3, l1=0.7, confidence=0.5, decay=decay)
    got = block_loss(logits, labels, supervised, objective=objective, target=law, confidence_logits=confidence)
    sums = {"ce": 0.0, "l1": 0.0, "confidence": 0.0, "weight": 0.0}
    for index in supervised.nonzero().tolist():
        *at, k = index
        at = (*at, k)
        weight = 1.0 if decay is None else math.exp(-k / decay)
        draft, target = logits[at].double().softmax(-1), law.probs[at].double()
        distance = float((draft - target).abs().sum() + 1 - target.sum())
        acceptance = 1 - distance / 2
        assert float(got.acceptance[at]) == pytest.approx(acceptance, abs=1e-6)
        c = torch.sigmoid(confidence[at].double())
        sums["weight"] += weight
        sums["l1"] += weight * distance
        sums["confidence"] -= weight * float(acceptance * c.log() + (1 - acceptance) * (1 - c).log())
        if labels[at] >= 0:
            sums["ce"] -= weight * math.log(float(draft[labels[at]]))
    assert float(got.weight) == pytest.approx(sums["weight"], rel=1e-6)
    for name in ("ce", "l1", "confidence"):
        assert float(getattr(got, name)) == pytest.approx(sums[name] / sums["weight"], rel=1e-5)
    total = 0.3 * got.ce + 0.7 * got.l1 + 0.5 * got.confidence
    assert float(got.loss) == pytest.approx(float(total), rel=1e-6)


def test_no_decay_weighs_all_alike() -> None:
    supervised = torch.tensor([[True, True, False]])
    assert position_weights(supervised, None).tolist() == [[1, 1, 0]]
    assert position_weights(supervised, 2.0)[0].tolist() == pytest.approx([1, math.exp(-0.5), 0])


def test_l1_is_not_halved() -> None:
    """Disjoint laws are 2 apart; a target wholly outside the draft vocabulary too."""
    draft = torch.tensor([[1.0, 0.0]])
    assert l1_distance(draft, TargetLaw(torch.tensor([[0.0, 1.0]]))).item() == 2
    assert l1_distance(draft, TargetLaw(torch.zeros(1, 2))).item() == 2
    assert l1_distance(draft, TargetLaw(torch.tensor([[0.5, 0.0]]))).item() == pytest.approx(1.0)


def test_restricted_rows_with_logsumexp_equal_the_whole_law() -> None:
    ids = torch.tensor([1, 4, 5, 8])
    logits = torch.randn(5, 10) * 3
    whole = TargetLaw.from_logits(logits, ids)
    rows = TargetLaw.from_logits(logits[:, ids], None, logits.logsumexp(-1))
    torch.testing.assert_close(whole.probs, rows.probs)
    torch.testing.assert_close(whole.probs, logits.softmax(-1)[:, ids])


def test_drafter_s_loss_is_the_same_either_way() -> None:
    """The reduced head's rows with the stored logsumexp, or the target's whole head."""
    target, model = small.target(), small.drafter(draft_vocab_size=len(small.DRAFT_IDS))
    model.share_with(target)
    ids, mask = torch.randint(small.VOCAB, (2, 12)), torch.ones(2, 12)
    last = torch.randn(2, 12, small.WIDTH)
    how = {"anchor_positions": torch.tensor([[2, 5], [3, 9]])}
    whole = model(ids, small.states(2, 12), mask, last, **how)
    rows = model(ids, small.states(2, 12), mask, last, target.lm_head(last).logsumexp(-1), **how)
    assert model._teacher.rows is not None
    torch.testing.assert_close(whole.loss, rows.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(whole.acceptance, rows.acceptance, rtol=1e-5, atol=1e-6)


def test_reduced_vocabulary_s_loss_counts_what_it_lacks() -> None:
    """By hand: labels outside the vocabulary have no cross-entropy; their mass counts as distance."""
    target, model = small.target(), small.drafter(draft_vocab_size=len(small.DRAFT_IDS))
    model.share_with(target)
    ids, mask, last = torch.randint(small.VOCAB, (1, 12)), torch.ones(1, 12), torch.randn(1, 12, small.WIDTH)
    model.objective = Objective(ce=1.0, l1=1.0, confidence=0.0, decay=None, chunk_size=None)
    out = model(ids, small.states(1, 12), mask, last, anchor_positions=torch.tensor([[1, 6]]))
    ce, l1, count = 0.0, 0.0, 0
    for a, anchor in enumerate((1, 6)):
        for k in range(4):
            draft = dict(zip(small.DRAFT_IDS, out.logits[0, a, k].softmax(-1).tolist(), strict=True))
            law = target.lm_head(last[0, anchor + k]).softmax(-1).tolist()
            l1 += sum(abs(draft.get(token, 0.0) - mass) for token, mass in enumerate(law))
            label = int(ids[0, anchor + 1 + k])
            ce -= math.log(draft[label]) if label in draft else 0.0
            count += 1
    assert float(out.l1_loss) == pytest.approx(l1 / count, rel=1e-4)
    assert float(out.ce_loss) == pytest.approx(ce / count, rel=1e-4)


@pytest.mark.parametrize("family", ["qwen3", "gemma4"])
def test_batch_without_supervision_gives_zero(family) -> None:
    model = small.drafter(family)
    model.share_with(small.target(family))
    ids, last = torch.randint(small.VOCAB, (2, 8)), torch.randn(2, 8, small.WIDTH)
    out = model(ids, small.states(2, 8), torch.zeros(2, 8), last)
    assert out.loss.item() == 0
    assert out.supervised.sum() == 0
    out.loss.backward()
    assert all((p.grad is None or (p.grad == 0).all()) for p in model.parameters())


@pytest.mark.parametrize("detach", [True, False])
def test_confidence_loss_reaches_the_backbone_unless_detached(detach) -> None:
    model = small.drafter()
    model.share_with(small.target())
    model.objective = Objective(ce=0, l1=0, confidence=1, detach_confidence=detach)
    ids, last = torch.randint(small.VOCAB, (1, 10)), torch.randn(1, 10, small.WIDTH)
    model(ids, small.states(1, 10), torch.ones(1, 10), last).loss.backward()
    reached = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    head = {"confidence_head.proj.weight", "confidence_head.proj.bias", "markov_head.markov_w1.weight"}
    # The label 1 - L1 / 2 is a constant either way: `W2` shapes the draft law and gets nothing.
    assert "markov_head.markov_w2.weight" not in reached
    if detach:
        assert reached == head
    else:
        assert reached == {n for n, _ in model.named_parameters()} - {"markov_head.markov_w2.weight"}


def test_terms_that_weigh_nothing_are_not_computed() -> None:
    """Cross-entropy alone needs no hidden states of the target; the others say what they miss."""
    model = small.drafter()
    model.share_with(small.target())
    ids, mask = torch.randint(small.VOCAB, (1, 10)), torch.ones(1, 10)
    model.objective = Objective(ce=1, l1=0, confidence=0)
    out = model(ids, small.states(1, 10), mask)
    assert out.loss == out.ce_loss
    assert out.acceptance is None
    assert (out.l1_loss, out.confidence_loss) == (0, 0)
    for changes in ({"l1": 1.0}, {"confidence": 1.0}):
        model.objective = Objective(**{"ce": 1.0, "l1": 0.0, "confidence": 0.0, **changes})
        with pytest.raises(ValueError, match=r"no target hidden states were given\. Pass `target_last"):
            model(ids, small.states(1, 10), mask)
    bare = small.drafter(enable_confidence_head=False)
    bare.share_with(small.target())
    bare.objective = Objective(ce=1, l1=0, confidence=1)  # there is no confidence head to weigh
    assert bare(ids, small.states(1, 10), mask).loss > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ce": -0.1}, "at least 0 and not all 0, got ce=-0.1"),
        ({"ce": 0, "l1": 0, "confidence": 0}, "not all 0, got ce=0, l1=0, confidence=0"),
        ({"decay": 0}, "`decay` must be positive or None, got 0"),
        ({"num_anchors": 0}, "`num_anchors` must be at least 1, got 0"),
    ],
)
def test_broken_objective_is_named(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        Objective(**settings)


@pytest.mark.parametrize(
    "name", ["target_hidden_states", "loss_mask", "target_last_hidden_states", "target_logsumexp"]
)  # fmt: skip
@pytest.mark.parametrize("length", [1, 9])
def test_tensors_of_another_length_are_refused(name, length) -> None:
    """A length of 1 would broadcast and train on one position's features."""
    model = small.drafter()
    model.share_with(small.target())
    batch = {
        "input_ids": torch.randint(small.VOCAB, (2, 8)), "target_hidden_states": small.states(2, 8),
        "loss_mask": torch.ones(2, 8), "target_last_hidden_states": torch.randn(2, 8, small.WIDTH),
        "target_logsumexp": torch.ones(2, 8),
    }  # fmt: skip
    batch[name] = batch[name][:, :1].expand(2, length, *batch[name].shape[2:])
    with pytest.raises(
        ValueError, match=rf"`{name}` must have one entry per token of `input_ids` \[2, 8\], got \[2, {length}"
    ):
        model(**batch)
