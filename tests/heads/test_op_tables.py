"""What the ops may read of a head, and a head's walk over few candidates.

Catches: a weight read where calling the module gives other numbers (adapters, packing, hooks, other dtypes), a gate or
recurrence split at the wrong column, candidates that get another column's bias.
"""

from __future__ import annotations

import peft
import pytest
import torch

from dspark import optimize_for_cpu
from dspark.heads import SEQUENTIAL_HEADS
from dspark.heads.plain import plain_weight
from dspark.ops.markov_step import markov_block
from tests import small

from .test_heads import ROWS, SLOTS, head_of, inputs

KINDS = list(SEQUENTIAL_HEADS)


def start(head, previous_ids, hidden):
    return head.start(previous_ids[:, 0], None, like=hidden)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("behind_anchor", [False, True])
def test_the_op_walks_as_the_head(kind, behind_anchor):
    head, (previous_ids, hidden) = head_of(kind), inputs()
    base, anchors = torch.randn(ROWS, SLOTS, 40), previous_ids[:, 0]
    state = head.start(anchors, torch.randn(ROWS, 8) if behind_anchor else None, like=hidden)
    drawn = markov_block(base, anchors, head.op_tables(hidden, state), with_law=True)
    previous = anchors
    for k in range(SLOTS):
        logits, state = head.correct(base[:, k], previous, hidden[:, k], state)
        torch.testing.assert_close(drawn.law_logits[:, k], logits, rtol=1e-5, atol=1e-5)
        previous = logits.argmax(-1)
        assert torch.equal(drawn.token_ids[:, k], previous)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_plain", [True, False])
def test_candidates_get_the_bias_of_their_columns(kind, is_plain):
    head, (previous_ids, hidden) = head_of(kind), inputs()
    calls = []
    if not is_plain:
        head.markov_w2.register_forward_hook(lambda *_: calls.append(1))
    base, state = torch.randn(ROWS, 40), start(head, previous_ids, hidden)
    candidates = torch.stack([torch.randperm(40)[:7] for _ in range(ROWS)])
    got, after = head.correct(base, previous_ids[:, 1], hidden[:, 1], state, candidates)
    assert bool(calls) != is_plain
    want, after_all = head.correct(base, previous_ids[:, 1], hidden[:, 1], state)
    torch.testing.assert_close(got.gather(1, candidates), want.gather(1, candidates))
    assert ((got > -torch.inf).sum(-1) == 7).all()
    assert (after is None) == (after_all is None) == (kind != "rnn")
    if after is not None:
        assert torch.equal(after, after_all)


def test_candidates_in_half_precision_keep_the_heads_dtype():
    head, (previous_ids, hidden) = head_of("gated").to(torch.bfloat16), inputs()
    candidates = torch.arange(5).expand(ROWS, -1)
    base = torch.randn(ROWS, 40).to(torch.bfloat16)
    got, _ = head.correct(base, previous_ids[:, 0], hidden[:, 0].to(torch.bfloat16), None, candidates)
    want, _ = head.correct(base, previous_ids[:, 0], hidden[:, 0].to(torch.bfloat16), None)
    assert got.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(got[:, :5], want[:, :5], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_more_than_its_weights_is_left_alone(kind):
    head, (previous_ids, hidden) = head_of(kind), inputs()
    state = start(head, previous_ids, hidden)
    assert head.op_tables(hidden, state) is not None
    assert head.op_tables(hidden.double(), state) is None
    for name, module in head.named_children():
        hook = module.register_forward_pre_hook(lambda *_: None)
        assert head.op_tables(hidden, state) is None, name
        hook.remove()
        module.forward = module.forward
        assert head.op_tables(hidden, state) is None, name
        del module.forward
    assert head.op_tables(hidden, state) is not None


def test_adapted_and_packed_layers_are_left_alone():
    like = torch.zeros(1)
    model = small.drafter()
    assert plain_weight(model.markov_head.markov_w2, like) is model.markov_head.markov_w2.weight
    with optimize_for_cpu(model):
        assert plain_weight(model.markov_head.markov_w2, like) is None
        assert plain_weight(model.markov_head.markov_w1, like) is not None
    adapted = peft.get_peft_model(small.drafter(), peft.LoraConfig(target_modules=["markov_w2"]))
    assert plain_weight(adapted.get_base_model().markov_head.markov_w2, like) is None
