"""A generator per row: a sampled row is the same text alone, in any batch and in any order of the batch.

Catches a row that takes numbers for another, numbers spent on drafts that only a batch makes, columns of acceptance
uniforms shifted by a neighbour's longer block, a source of randomness that no generator reaches.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LogitsProcessor

from dspark import SpeculationConfig
from dspark.decoding.draws import Draws
from tests import zoo
from tests.decoding.equality import left_padded, refused
from tests.decoding.test_batches import RowOracle, texts_of
from tests.properties.tiny import close_pair
from tests.scripted import Hostile

LENGTHS = (3, 7, 12)
THRESHOLD = SpeculationConfig(assistant_confidence_threshold=0.4)


class Untouched(LogitsProcessor):
    """Changes nothing; a processor that is not transformers' own is asked slot by slot."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


def prompt(length: int) -> torch.Tensor:
    return torch.randint(12, (1, length), generator=torch.Generator().manual_seed(length))


def generators(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def sample(lengths: tuple[int, ...], seeds: tuple[int, ...], new: int = 30, **call: Any) -> list[list[int]]:
    """New tokens of each row."""
    model, drafter = close_pair()
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": new, "assistant_model": drafter, **call}
    out = model.generate(**left_padded(*map(prompt, lengths)), row_generators=generators(*seeds), **options)
    return out[:, max(lengths) :].tolist()


CALLS: dict[str, dict[str, Any]] = {
    "fixed": {"speculation": SpeculationConfig(policy="fixed")},
    "threshold": {"speculation": THRESHOLD},
    "slot by slot": {"logits_processor": [Untouched()], "speculation": THRESHOLD},
    "bad words": {"bad_words_ids": [[1, 2], [0]], "temperature": 0.8},
    "ends": {"eos_token_id": [4, 9], "pad_token_id": 0},
}


@pytest.mark.parametrize("name", CALLS)
def test_a_row_is_the_same_alone_and_in_any_batch(name: str) -> None:
    call = CALLS[name]
    alone = [sample((length,), (seed,), **call)[0] for length, seed in zip(LENGTHS, (5, 6, 7), strict=True)]
    together = sample(LENGTHS, (5, 6, 7), **call)
    turned = sample(LENGTHS[::-1], (7, 6, 5), **call)[::-1]
    for own, row, other in zip(alone, together, turned, strict=True):
        assert row[: len(own)] == own
        assert set(row[len(own) :]) <= {0}, "only padding behind the end"
        assert other[: len(own)] == own
    assert len({tuple(row) for row in alone}) == 3


@pytest.mark.parametrize("new", range(1, 12))
def test_the_last_round_of_a_row_is_its_own(new: int) -> None:
    """Rows reach the length limit in different rounds; one without room for a draft still sits in a drafted round."""
    together = sample(LENGTHS, (1, 2, 3), new)
    assert together == [sample((length,), (seed,), new)[0] for length, seed in zip(LENGTHS, (1, 2, 3), strict=True)]


def test_sequences_of_one_prompt() -> None:
    model, drafter = close_pair()
    call = {"do_sample": True, "top_k": 0, "max_new_tokens": 20, "assistant_model": drafter}
    rows = model.generate(prompt(5), num_return_sequences=3, row_generators=generators(1, 2, 1), **call)
    assert rows[0].tolist() == rows[2].tolist() != rows[1].tolist()
    again = model.generate(prompt(5), row_generators=generators(2), **call)
    assert again[0].tolist() == rows[1].tolist()


def test_only_the_generators_are_drawn_from() -> None:
    """The global generator stays where it is, and a caller's goes on: a second call gives another text."""
    model, drafter = close_pair()
    own = generators(3)
    call = {"do_sample": True, "max_new_tokens": 20, "assistant_model": drafter, "row_generators": own}
    state = torch.get_rng_state()
    first = model.generate(prompt(5), **call)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.generate(prompt(5), **call).tolist() != first.tolist()


def test_seeds_of_an_op_are_the_rows_own_and_new_each_time() -> None:
    cpu = torch.device("cpu")
    draws = Draws(generators(1, 2, 3))
    first, second = draws.seeds([0, 1, 2], cpu), draws.seeds([0, 1, 2], cpu)
    assert len({*first.tolist(), *second.tolist()}) == 6
    assert Draws(generators(1, 2, 3)).seeds([2, 0], cpu).tolist() == first[[2, 0]].tolist()
    untouched = Draws(generators(1, 2, 3)).uniforms([1], [4], cpu)
    assert torch.equal(draws.uniforms([1], [4], cpu), untouched), "verdicts have streams of their own"
    torch.manual_seed(5)
    shared = Draws().seeds([0, 1], cpu)
    assert len(set(shared.tolist())) == 2
    torch.manual_seed(5)
    assert torch.equal(Draws().seeds([0, 1], cpu), shared)


def test_greedy_text_needs_no_numbers() -> None:
    model = zoo.target("Llama")
    texts = texts_of(model)[:2]
    call = left_padded(*(torch.tensor([text[:length]]) for text, length in zip(texts, (3, 9), strict=True)))
    oracle = RowOracle(model, texts, [[3], [None]])
    found = model.generate(
        **call, do_sample=False, max_new_tokens=20, assistant_model=oracle, row_generators=generators(1, 2)
    )
    assert found[0, -20:].tolist() == texts[0][3:23]


def test_by_the_other_door() -> None:
    model, drafter = close_pair()
    call = {"do_sample": True, "max_new_tokens": 12, "row_generators": generators(4)}
    one = model.generate(prompt(5), custom_generate=drafter.decode, **call)
    call["row_generators"] = generators(4)
    assert model.generate(prompt(5), assistant_model=drafter, **call).tolist() == one.tolist()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (generators(1), "1 generators for 2 rows"),
        (generators(1, 2, 3), "3 generators for 2 rows"),
        ([1, 2], "list of torch.Generator"),
        (torch.Generator(), "list of torch.Generator"),
    ],
)
def test_what_is_not_one_generator_per_row_is_refused(given: Any, says: str) -> None:
    model = zoo.target("Llama")
    with refused(model, says, "row_generators"):
        model.generate(
            **left_padded(zoo.prompt(3), zoo.prompt(4)), do_sample=True, max_new_tokens=4,
            assistant_model=Hostile(model), row_generators=given,
        )  # fmt: skip


def test_plain_decoding_does_not_take_them() -> None:
    with pytest.raises(ValueError, match="row_generators"):
        zoo.target("Llama").generate(zoo.prompt(3), max_new_tokens=2, row_generators=generators(1))


def test_uniforms_of_a_row_do_not_depend_on_the_longest() -> None:
    alone, wide = Draws(generators(8)), Draws(generators(8, 9))
    own = alone.uniforms([0], [2], torch.device("cpu"))
    both = wide.uniforms([0, 1], [2, 5], torch.device("cpu"))
    assert own.shape == (1, 3)
    assert both.shape == (2, 6)
    assert both[0, :2].tolist() == own[0, :2].tolist()
    assert both[0, -1] == own[0, -1]
    assert Draws().uniforms([0], [2], torch.device("cpu")) is None
