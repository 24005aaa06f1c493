"""The sequential heads and the confidence head, against their formulas written out.

Catches: a training form that differs from the drafting form, a state that is not reset or updated a slot early, a
wrong order in a concatenation, a previous token looked up with a draft id, a confidence that sees its own token.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import get_args

import pytest
import torch

from dspark.configuration_dspark import MarkovHeadType
from dspark.heads import SEQUENTIAL_HEADS, ConfidenceHead, build_sequential_head

from .. import small

KINDS = list(SEQUENTIAL_HEADS)
ROWS, SLOTS = 3, 5


def head_of(kind: str, **fields):
    config = SimpleNamespace(**{
        "markov_head_type": kind, "markov_rank": 6, "vocab_size": 40, "num_logits": 40, "hidden_size": 8, **fields,
    })  # fmt: skip
    head = build_sequential_head(config)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    return head.requires_grad_(False)


def inputs(slots: int = SLOTS):
    return torch.randint(40, (ROWS, slots)), torch.randn(ROWS, slots, 8)


def by_formula(kind: str, head, previous_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Paper eq. 5 and 6 and the gated form, one row and one slot at a time."""
    biases = torch.empty(*previous_ids.shape, head.markov_w2.weight.shape[0])
    for b in range(previous_ids.shape[0]):
        state = torch.zeros(6)
        for k in range(previous_ids.shape[1]):
            e, h = head.markov_w1.weight[previous_ids[b, k]], hidden[b, k]
            if kind == "vanilla":
                features = e
            elif kind == "gated":
                features = torch.sigmoid(head.gate_proj.weight @ torch.cat([h, e]) + head.gate_proj.bias) * e
            else:
                joint = head.joint_proj.weight @ torch.cat([state, e, h]) + head.joint_proj.bias
                gate, candidate, output = joint[:6].sigmoid(), joint[6:12].tanh(), joint[12:].tanh()
                features, state = output, gate * state + (1 - gate) * candidate
            biases[b, k] = head.markov_w2.weight @ features
    return biases


def test_config_literal_and_heads_agree() -> None:
    assert set(get_args(MarkovHeadType)) == {"none", *SEQUENTIAL_HEADS}
    assert build_sequential_head(SimpleNamespace(markov_head_type="none")) is None


@pytest.mark.parametrize("kind", KINDS)
def test_block_bias_is_the_formula(kind) -> None:
    head, (previous_ids, hidden) = head_of(kind), inputs()
    expected = by_formula(kind, head, previous_ids, hidden)
    torch.testing.assert_close(head.block_bias(previous_ids, hidden), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("slots", [1, SLOTS])
def test_steps_give_the_teacher_forced_numbers(kind, slots) -> None:
    head, (previous_ids, hidden) = head_of(kind), inputs(slots)
    state = head.initial_state(ROWS, like=hidden)
    steps = []
    for k in range(slots):
        bias, state = head.step(previous_ids[:, k], hidden[:, k], state)
        steps.append(bias)
    # The same products in batches of another shape: equal but for the last bits.
    torch.testing.assert_close(torch.stack(steps, dim=1), head.block_bias(previous_ids, hidden), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_leading_shape_is_free(kind) -> None:
    """Training gives `[B, A, K]`; each block starts afresh."""
    head, (previous_ids, hidden) = head_of(kind), inputs()
    stacked = head.block_bias(previous_ids[:, None].expand(-1, 2, -1), hidden[:, None].expand(-1, 2, -1, -1))
    for a in range(2):
        torch.testing.assert_close(stacked[:, a], head.block_bias(previous_ids, hidden))


@pytest.mark.parametrize(("kind", "sees_the_past", "sees_hidden"), [
    ("vanilla", False, False), ("gated", False, True), ("rnn", True, True),
])  # fmt: skip
def test_what_a_slot_s_bias_depends_on(kind, sees_the_past, sees_hidden) -> None:
    head, (previous_ids, hidden) = head_of(kind), inputs()
    bias = head.block_bias(previous_ids, hidden)
    other_ids, other_hidden = previous_ids.clone(), hidden.clone()
    other_ids[:, 1] = (other_ids[:, 1] + 1) % 40
    changed = (head.block_bias(other_ids, hidden) - bias).abs().amax((0, 2)) > 1e-6
    assert changed.tolist() == [False, True, *[sees_the_past] * 3]
    other_hidden[:, 1] += 1
    changed = (head.block_bias(previous_ids, other_hidden) - bias).abs().amax((0, 2)) > 1e-6
    assert changed.tolist() == [False, sees_hidden, *[sees_the_past] * 3]


@pytest.mark.parametrize("kind", KINDS)
def test_two_widths(kind) -> None:
    """Previous tokens live in the target's vocabulary, the bias in the draft's."""
    head = head_of(kind, num_logits=7)
    bias = head.block_bias(torch.full((1, 2), 39), torch.randn(1, 2, 8))
    assert bias.shape == (1, 2, 7)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_in_its_dtype(kind, dtype) -> None:
    head, (previous_ids, hidden) = head_of(kind), inputs()
    exact = head.block_bias(previous_ids, hidden)
    bias = head.to(dtype).block_bias(previous_ids, hidden.to(dtype))
    assert bias.dtype is dtype
    torch.testing.assert_close(bias.float(), exact, atol=0.15, rtol=0.05)  # a few roundings of 2^-8 on sums of six
    state = head.initial_state(ROWS, like=hidden.to(dtype))
    assert state is None or state.dtype is dtype


@pytest.mark.parametrize("with_markov", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_confidence_is_one_linear_read_out(with_markov, bias) -> None:
    config = SimpleNamespace(
        hidden_size=8, markov_rank=6, confidence_head_with_markov=with_markov, confidence_head_bias=bias
    )
    head = ConfidenceHead(config)
    hidden, previous = torch.randn(ROWS, SLOTS, 8), torch.randn(ROWS, SLOTS, 6)
    seen = torch.cat([hidden, previous], dim=-1) if with_markov else hidden
    expected = (seen * head.proj.weight[0]).sum(-1) + (head.proj.bias[0] if bias else 0)
    torch.testing.assert_close(head(hidden, previous if with_markov else None), expected)
    half = head.to(torch.bfloat16)(hidden.bfloat16(), previous)  # the embedding may come in another dtype
    assert half.dtype is torch.float32
    assert (head.proj.bias is not None) == bias


def test_confidence_without_its_embedding_is_refused() -> None:
    config = SimpleNamespace(hidden_size=8, markov_rank=6, confidence_head_with_markov=True, confidence_head_bias=True)
    with pytest.raises(ValueError, match="takes the Markov embedding of the previous token, got None"):
        ConfidenceHead(config)(torch.randn(1, 1, 8), None)


@pytest.mark.parametrize("heads", [name for name in small.HEADS if not name.endswith("none")])
def test_confidence_of_a_slot_does_not_see_its_token(heads) -> None:
    """Nor any later one: changing what is drawn at slot 1 changes confidences from slot 2 on at most."""
    model = small.drafter(share_embedding=False, share_lm_head=False, **small.HEADS[heads])
    hidden = torch.randn(1, 4, small.WIDTH)
    previous = torch.tensor([[1, 2, 3, 4], [1, 2, 9, 4]])
    plain, changed = (model.confidence_logits(hidden, ids[None]) for ids in previous)
    with_markov = small.HEADS[heads]["confidence_head_with_markov"]
    assert (plain != changed)[0].tolist() == [False, False, with_markov, False]


@pytest.mark.parametrize("heads", small.HEADS)
@pytest.mark.parametrize("storage", ["own", "reduced own embedding"])
def test_walk_equals_teacher_forcing_along_its_own_tokens(heads, storage) -> None:
    model = small.drafter(**{"share_lm_head": False, **small.HEADS[heads], **small.STORAGE[storage]})
    out = model.draft(torch.tensor([5, 6]), small.states())
    previous = torch.cat([torch.tensor([[5], [6]]), out.token_ids[:, :-1]], dim=1)
    expected = out.base_logits
    if model.markov_head is not None:
        expected = expected + model.markov_head.block_bias(previous, out.hidden_states)
    torch.testing.assert_close(out.logits, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(out.token_ids, model.to_target_ids(out.logits.argmax(-1)))
    confidence = model.confidence_logits(out.hidden_states, previous)
    assert (confidence is None) == (out.confidence_logits is None)
    if confidence is not None:
        torch.testing.assert_close(out.confidence_logits, confidence)
