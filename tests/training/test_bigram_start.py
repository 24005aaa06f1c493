"""A head that starts from the answers' bigrams: counts, factors, and the drafts they give.

Catches: pairs counted across sequences or in the prompt, columns of a reduced vocabulary mixed up, a start that
hangs on the random state, a head it does not fit left half-filled.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dspark.heads import SEQUENTIAL_HEADS
from dspark.training import (
    Bigrams,
    FeatureDataset,
    JoinedFeatures,
    bigram_start,
    hold_out,
    new_drafter,
    read_answers,
    run,
)
from dspark.training.shards import write_features
from tests.training import tiny
from tests.training.test_data import write


def pairs(found: Bigrams) -> dict[tuple[int, int], int]:
    columns = (found.previous, found.following, found.counts)
    return {(a, b): n for a, b, n in zip(*(column.tolist() for column in columns), strict=True)}


RECORDS = [
    {"prompt_ids": [1, 2], "answer_ids": [3, 4, 3, 4]},
    {"prompt_ids": [3, 4, 5], "answer_ids": [3, 4, 6]},
    {"prompt_ids": [7], "answer_ids": [7, 7]},
]
WANTED = {(2, 3): 1, (3, 4): 3, (4, 3): 1, (5, 3): 1, (4, 6): 1, (7, 7): 2}


def test_answers_are_counted_and_prompts_and_borders_are_not(tmp_path) -> None:
    target = tiny.llama()
    data = read_answers(write(tmp_path / "a", *RECORDS), max_length=16, vocab_size=tiny.VOCAB)
    assert pairs(Bigrams.of(data)) == WANTED
    for name, part in (("one", data), ("two", data)):
        write_features(target, part, tmp_path / name, [1, 2], shard_bytes=3000, batch_size=1)
    stored = FeatureDataset(tmp_path / "one")
    assert len(stored.index["shards"]) > 1
    assert pairs(Bigrams.of(stored)) == WANTED
    joined = JoinedFeatures([stored, FeatureDataset(tmp_path / "two")])
    assert pairs(Bigrams.of(joined)) == {pair: 2 * count for pair, count in WANTED.items()}
    split = hold_out(joined, 2, seed=0)
    parts = [pairs(Bigrams.of(part)) for part in split]
    assert {pair: sum(part.get(pair, 0) for part in parts) for pair in WANTED} == pairs(Bigrams.of(joined))
    assert all(parts)


def test_held_out_answers_are_not_counted(tmp_path, monkeypatch) -> None:
    seen = []
    monkeypatch.setattr(run, "new_drafter", lambda *args, bigrams, **more: seen.append(bigrams))
    data = read_answers(write(tmp_path / "a", *RECORDS), max_length=16, vocab_size=tiny.VOCAB)
    request = SimpleNamespace(
        adapter=None, start_from=None, shape=None, draft_vocab_size=None, target_name=None, held_out=1,
        config=SimpleNamespace(seed=3),
    )  # fmt: skip
    run._drafter(request, None, None, data, None)
    assert pairs(seen[0]) == pairs(Bigrams.of(hold_out(data, 1, 3).train))
    assert pairs(seen[0]) != WANTED


def test_no_answers_give_no_pairs_and_a_head_at_zero() -> None:
    found = Bigrams.of([])
    assert [len(column) for column in found] == [0, 0, 0]
    assert not bigram_start(head_of("vanilla"), found)


def head_of(kind: str, *, rank: int = 8, width: int = 6, rows: int = 10):
    config = type("Config", (), {"markov_rank": rank, "vocab_size": rows, "num_logits": width, "hidden_size": 4})
    torch.manual_seed(0)
    return SEQUENTIAL_HEADS[kind](config)


def bias(head, previous: int) -> torch.Tensor:
    hidden = torch.zeros(1, 4)
    return head.step(torch.tensor([previous]), hidden, head.initial_state(1, like=hidden))[0][0]


@pytest.mark.parametrize("rank", [2, 8])  # below and above what the table has
@torch.no_grad()
def test_the_bias_is_the_evidence(rank: int) -> None:
    """Of full rank it is the whole table: `log(1 + c_ab N / (5 c_b))`, times the strength."""
    found = Bigrams(*torch.tensor([[0, 0, 1, 9], [2, 3, 3, 5], [4, 1, 2, 8]]))
    head = head_of("vanilla", rank=rank)
    assert bigram_start(head, found)
    table = torch.zeros(10, 6)
    for a, b, count in zip(*(column.tolist() for column in found), strict=True):
        of_b = float(found.counts[found.following == b].sum())
        table[a, b] = torch.log1p(torch.tensor(count * 15 / (5 * of_b)))
    got = torch.stack([bias(head, a) for a in range(10)])
    error = (got - 0.6 * table).norm()
    assert error < (1e-5 if rank == 8 else table.norm())
    if rank == 2:
        left, sizes, right = torch.linalg.svd(table)
        torch.testing.assert_close(got, 0.6 * (left[:, :2] * sizes[:2]) @ right[:2], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_columns_are_those_of_the_draft_vocabulary() -> None:
    found = Bigrams(*torch.tensor([[4, 4, 4], [9, 7, 1], [5, 1, 50]]))
    head = head_of("vanilla", width=3)
    assert bigram_start(head, found, torch.tensor([3, 7, 9]))  # token 1 cannot be drafted
    got = bias(head, 4)
    # Each is seen behind this token alone, so that both weigh the same: log(1 + 6 / 5).
    torch.testing.assert_close(got, 0.6 * torch.log1p(torch.tensor([0.0, 1.2, 1.2])), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(bias(head, 5), torch.zeros(3), atol=1e-6, rtol=0)


@torch.no_grad()
def test_a_gate_that_lets_half_pass_is_made_up_for() -> None:
    found = Bigrams(*torch.tensor([[4, 2], [3, 5], [50, 50]]))
    plain, gated = head_of("vanilla"), head_of("gated")
    assert bigram_start(plain, found)
    assert bigram_start(gated, found)
    gated.gate_proj.weight.zero_()
    gated.gate_proj.bias.zero_()
    torch.testing.assert_close(bias(gated, 4), bias(plain, 4))


@torch.no_grad()
@pytest.mark.parametrize("case", ["rnn", "nothing to count"])
def test_heads_it_cannot_fill_stay_as_they_are(case: str) -> None:
    found = Bigrams(*torch.tensor([[4], [3], [50]]))
    head = head_of("rnn" if case == "rnn" else "vanilla", width=3)
    before = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    assert not bigram_start(head, found, None if case == "rnn" else torch.tensor([5, 6, 7]))
    assert all(torch.equal(before[name], tensor) for name, tensor in head.state_dict().items())


def test_a_new_drafter_starts_from_them_and_the_random_state_does_not_matter(tmp_path) -> None:
    target = tiny.llama()
    found = Bigrams.of(read_answers(write(tmp_path / "a", *RECORDS), max_length=16, vocab_size=tiny.VOCAB))
    shape = {"num_hidden_layers": 1, "markov_rank": 4, "mask_token_id": 0}
    tables = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        tables.append(new_drafter(target, bigrams=found, **shape).markov_head.markov_w2.weight)
    assert torch.equal(*tables)
    assert tables[0].abs().sum() > 0
    assert not new_drafter(target, **shape).markov_head.markov_w2.weight.any()
    assert not new_drafter(target, bigrams=found, init="random", **shape).markov_head.markov_w2.weight.any()
    assert new_drafter(target, bigrams=found, **{**shape, "markov_rank": 0}).markov_head is None


@torch.no_grad()
def test_it_drafts_the_likelier_word() -> None:
    """A drafter that knows nothing but bigrams writes the one that follows most often."""
    found = Bigrams(*torch.tensor([[0, 0, 1], [2, 3, 3], [9, 1, 5]]))
    head = head_of("vanilla")
    bigram_start(head, found)
    assert bias(head, 0).argmax() == 2
    assert bias(head, 1).argmax() == 3
