"""Batches by policy: the same ids in every way, tokens counted up to each row's end, prompts padded on the left.

Catches: a way or a batch size that runs other prompts, statistics of the warm-up, tokens counted behind an end, a mask
that shows the padding.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dspark import SpeculationConfig
from dspark.evaluation.batches import PLAIN, BatchCell, left_padded, measure_batches
from tests.decoding.pair import new_target, plain, prompt
from tests.evaluation.test_replay import pair

PROMPTS = [prompt(length, seed) for seed, length in enumerate((6, 3, 9))]
WAYS = {"fixed": SpeculationConfig("fixed"), "auto": SpeculationConfig("auto")}
NEW = 12


def test_every_way_writes_the_plain_ids() -> None:
    target, drafter = pair()
    seen: list[BatchCell] = []
    cells = measure_batches(
        target, drafter, PROMPTS, WAYS, [1, 3], max_new_tokens=NEW, repeats=2, progress=seen.append
    )
    assert [(cell.way, cell.batch_size) for cell in cells] == [(w, b) for b in (1, 3) for w in (PLAIN, *WAYS)]
    assert all(cell.is_equal for cell in cells)
    assert all(len(cell.seconds) == 2 and min(cell.seconds) > 0 for cell in cells)
    assert len(seen) == 3 * 2 * (3 + 1)  # ways; two repeats of three batches of one row, and of one of three
    for cell in cells:
        assert cell.new_tokens == NEW * 3  # every batch size decodes all prompts
        assert cell.tokens_per_second > 0
        if cell.way == PLAIN:
            assert cell.stats is None
        else:
            assert cell.stats is not None
            assert cell.stats.num_new_tokens == 2 * cell.new_tokens  # two repeats, the warm-up not among them
            assert cell.stats.num_rows == 2 * 3


def test_tokens_count_up_to_each_row_s_end() -> None:
    target, drafter = pair()
    texts = [plain(target, ids, max_new_tokens=NEW)[0, ids.shape[1] :].tolist() for ids in PROMPTS]
    end = texts[1][4]
    expected = sum(text.index(end) + 1 if end in text else NEW for text in texts)
    assert expected < 3 * NEW
    target.generation_config.eos_token_id = end
    cells = measure_batches(target, drafter, PROMPTS, {"fixed": WAYS["fixed"]}, [3], max_new_tokens=NEW, repeats=1)
    assert [cell.new_tokens for cell in cells] == [expected] * 2
    assert all(cell.is_equal for cell in cells)


def test_different_ids_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = pair()
    generate = type(target).generate

    def lying(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = generate(self, *args, **kwargs)
        if "assistant_model" in kwargs:
            output.sequences[-1, -1] += 1
        return output

    monkeypatch.setattr(type(target), "generate", lying)
    cells = measure_batches(target, drafter, PROMPTS, {"fixed": WAYS["fixed"]}, [2], max_new_tokens=4, repeats=1)
    assert [cell.is_equal for cell in cells] == [True, False]


def test_prompts_are_padded_on_the_left() -> None:
    padded = left_padded([torch.tensor([[5, 6, 7]]), torch.tensor([[8]])], 9)
    assert padded["input_ids"].tolist() == [[5, 6, 7], [9, 9, 8]]
    assert padded["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]


def test_more_rows_than_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="4 rows needs as many prompts, got 3"):
        measure_batches(new_target(), None, PROMPTS, {}, [1, 4], max_new_tokens=4)  # type: ignore[arg-type]
