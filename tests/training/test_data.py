"""Records, batches and their order.

Catches: prompts that are supervised, answers cut in the wrong place, ids of another tokenizer, padding with the wrong
value or dtype, length groups that lose or repeat sequences, an order that differs after a restart.
"""

from __future__ import annotations

import json

import pytest
import torch

from dspark.training import BlockCollator, DataError, read_answers
from dspark.training.collator import EpochSampler, mix

from . import tiny


def write(path, *records) -> list:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return [path]


def read(paths, **how):
    return read_answers(paths, **{"max_length": 16, "vocab_size": 50, **how})


def test_only_the_answer_is_supervised(tmp_path) -> None:
    data = read(write(tmp_path / "a", {"prompt_ids": [5, 6, 7], "answer_ids": [8, 9]}))
    item = data[0]
    assert item["input_ids"].tolist() == [5, 6, 7, 8, 9]
    assert item["input_ids"].dtype == torch.int64
    assert item["loss_mask"].tolist() == [False, False, False, True, True]
    assert data.lengths == [5]
    assert data.answer_token_counts(50).nonzero()[:, 0].tolist() == [8, 9]


def test_too_long_records_are_cut_dropped_or_refused(tmp_path) -> None:
    paths = write(
        tmp_path / "a",
        {"prompt_ids": [1] * 4, "answer_ids": [2] * 20},
        {"prompt_ids": [1] * 15, "answer_ids": [2] * 5},
        {"prompt_ids": [1] * 4, "answer_ids": [2] * 4},
    )
    data = read(paths)
    assert data.lengths == [16, 8]
    assert (data.counts.records, data.counts.truncated, data.counts.dropped_short) == (3, 1, 1)
    assert data.counts.supervised_tokens == 16
    data = read(paths, too_long="drop")
    assert (data.lengths, data.counts.dropped_long) == ([8], 2)
    with pytest.raises(DataError, match=r"a:1 has 24 tokens, more than max_length=16"):
        read(paths, too_long="error")
    with pytest.raises(DataError, match="too_long"):
        read(paths, too_long="cut")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "No usable record"),
        ([{"prompt_ids": [1], "answer_ids": [2]}], "1 with fewer than two answer tokens"),
        (["{"], r"a:1 is not JSON"),
        (["[1, 2]"], r"a:1 must be an object .* found list"),
        ([{"turns": ["hi"]}], r"found \['turns'\].*dspark data"),
        ([{"prompt_ids": [1], "answer_ids": ["x", "y"]}], "answer_ids.*integers"),
        ([{"prompt_ids": [1], "answer_ids": [2, 50]}], "token id 50, but the target's embedding has 50 rows"),
        ([{"prompt_ids": [-1], "answer_ids": [2, 5]}], "token id -1"),
    ],
)
def test_bad_records_are_named(tmp_path, lines, message) -> None:
    with pytest.raises(DataError, match=message):
        read(write(tmp_path / "a", *lines))


def test_missing_file_and_senseless_limit_are_named(tmp_path) -> None:
    with pytest.raises(DataError, match="nothing is not a file"):
        read([tmp_path / "nothing"])
    with pytest.raises(DataError, match="max_length"):
        read(write(tmp_path / "a"), max_length=2)


def test_collator_pads_right_and_keeps_dtypes() -> None:
    items = [
        {"input_ids": torch.tensor([3, 4, 5]), "loss_mask": torch.tensor([False, True, True]),
         "target_hidden_states": torch.ones(3, 2, dtype=torch.bfloat16)},
        {"input_ids": torch.tensor([6]), "loss_mask": torch.tensor([True]),
         "target_hidden_states": torch.ones(1, 2, dtype=torch.bfloat16)},
    ]  # fmt: skip
    batch = BlockCollator()(items)
    assert batch["input_ids"].tolist() == [[3, 4, 5], [6, 0, 0]]
    assert batch["loss_mask"].tolist() == [[False, True, True], [True, False, False]]
    assert batch["loss_mask"].dtype == torch.bool
    assert batch["target_hidden_states"].dtype == torch.bfloat16
    assert batch["target_hidden_states"].shape == (2, 3, 2)
    assert BlockCollator(2)(items)["input_ids"].tolist() == [[3, 4], [6, 0]]


def sampler(lengths, epoch=0, **how) -> EpochSampler:
    return EpochSampler(lengths, **{"step_size": 4, "seed": 1, "epoch": lambda: epoch, **how})


@pytest.mark.parametrize("grouped", [True, False])
def test_each_epoch_has_every_sequence_once_in_its_own_order(grouped) -> None:
    lengths = [(7 * i) % 31 + 1 for i in range(301)]
    orders = [list(sampler(lengths, epoch, group_by_length=grouped)) for epoch in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert all(sorted(order) == list(range(301)) for order in orders)
    assert list(sampler(lengths, seed=2, group_by_length=grouped)) != orders[0]
    assert list(sampler(lengths, group_by_length=grouped)) == list(sampler(lengths)) or not grouped


def test_grouping_saves_padding() -> None:
    lengths = torch.randint(1, 200, (512,)).tolist()

    def padding(order) -> int:
        steps = [order[i : i + 4] for i in range(0, 512, 4)]
        return sum(max(lengths[i] for i in step) * len(step) - sum(lengths[i] for i in step) for step in steps)

    assert padding(list(sampler(lengths))) < padding(list(sampler(lengths, group_by_length=False))) / 5


def test_seeds_of_neighbours_differ() -> None:
    seeds = {mix(a, b, c) for a in range(8) for b in range(8) for c in range(8)}
    assert len(seeds) == 512
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_tiny_answers_helper_is_deterministic(tmp_path) -> None:
    assert tiny.answers(tmp_path)[0]["input_ids"].equal(tiny.answers(tmp_path)[0]["input_ids"])
