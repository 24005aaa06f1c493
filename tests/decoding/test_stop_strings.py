"""Stop strings end the text at the token that completes them, wherever in a block that is.

Catches: strings looked for at the end of a block only, options read from one of their three homes only, a tokenizer
lost on the way to the criterion, the caller's config changed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria

from tests.decoding.pair import BLOCK, distinct, hostile, new_target, oracle, plain, prompt, sampled, target
from tests.decoding.words import tokenizer
from tests.scripted import CYCLE

PROMPT = 6
LENGTH = 24


def two_tokens(place: int) -> str:
    """The string that new tokens `place - 1` and `place` (or the first alone) spell together."""
    new = distinct()[1][PROMPT:]
    return tokenizer().decode(new[max(place - 1, 0) : place + 1])


def run(drafter: Any, **kwargs: Any) -> list[int]:
    kwargs = {"tokenizer": tokenizer(), "max_new_tokens": LENGTH, **kwargs}
    return plain(target(), distinct()[0], assistant_model=drafter, **kwargs)[0].tolist()


@pytest.mark.parametrize("script", [(None,), (2,), CYCLE], ids=str)
@pytest.mark.parametrize("place", range(2 * BLOCK))
def test_a_match_may_end_in_any_slot(place: int, script: tuple[Any, ...]) -> None:
    text = distinct()[1]
    expected = run(None, stop_strings=two_tokens(place))
    assert expected == text[: PROMPT + place + 1]
    drafter = oracle(script)
    assert run(drafter, stop_strings=[two_tokens(place)]) == expected
    assert drafter.last_stats.num_new_tokens == place + 1


@pytest.mark.parametrize("place", range(1, BLOCK + 2))
def test_a_match_may_begin_and_end_inside_tokens(place: int) -> None:
    string = two_tokens(place)[1:-1]
    expected = run(None, stop_strings=string)
    for drafter in (oracle((None,)), oracle(), hostile()):
        assert run(drafter, stop_strings=string) == expected
        # A processor that is no function of one row takes the other path through verification.
        assert run(drafter, stop_strings=string, repetition_penalty=1.0001) == expected


def test_the_first_of_several_strings_counts() -> None:
    text = distinct()[1]
    strings = [two_tokens(9), "nowhere", two_tokens(4)]
    assert run(oracle((None,)), stop_strings=strings) == text[: PROMPT + 5]


@pytest.mark.parametrize("place", [0, 3, 7, 8])
def test_strings_in_a_generation_config(place: int) -> None:
    ids, text = distinct()
    config = GenerationConfig(stop_strings=[two_tokens(place)], max_new_tokens=LENGTH)
    before = config.to_dict()
    for positional in (True, False):
        args = (ids, config) if positional else (ids,)
        kwargs = {} if positional else {"generation_config": config}
        out = target().generate(*args, **kwargs, tokenizer=tokenizer(), assistant_model=oracle())
        assert out[0].tolist() == text[: PROMPT + place + 1]
    assert config.to_dict() == before


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
@pytest.mark.parametrize("place", [0, 3, 7, 8])
def test_strings_in_the_targets_own_generation_config(place: int) -> None:
    ids, text = distinct()
    owner = new_target()
    owner.generation_config.stop_strings = two_tokens(place)
    drafter = oracle(model=owner)
    kwargs = {"max_new_tokens": LENGTH, "tokenizer": tokenizer(), "assistant_model": drafter}
    assert owner.generate(ids, **kwargs)[0].tolist() == text[: PROMPT + place + 1]
    assert owner.generation_config.stop_strings == two_tokens(place)
    # A passed config without strings leaves the target's in force, one with strings goes first.
    configs = (GenerationConfig(max_new_tokens=LENGTH), GenerationConfig(stop_strings=two_tokens(5)))
    for config, end in zip(configs, (place, 5), strict=True):
        out = owner.generate(ids, generation_config=config, tokenizer=tokenizer(), assistant_model=oracle(model=owner))
        assert out[0].tolist() == text[: PROMPT + end + 1]


def test_an_explicit_none_turns_the_targets_strings_off() -> None:
    ids, text = distinct()
    owner = new_target()
    owner.generation_config.stop_strings = two_tokens(2)
    for drafter in (None, oracle(model=owner)):
        out = owner.generate(ids, stop_strings=None, max_new_tokens=9, assistant_model=drafter)
        assert out[0].tolist() == text[: PROMPT + 9]


def test_strings_without_a_tokenizer_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="`stop_strings` needs the tokenizer"):
        run(oracle(), stop_strings="ab", tokenizer=None)


def test_a_users_own_criterion_goes_before_the_option() -> None:
    text = distinct()[1]
    own = StoppingCriteriaList([StopStringCriteria(tokenizer(), two_tokens(6))])
    for drafter in (None, oracle((None,))):
        assert run(drafter, stop_strings=two_tokens(3), stopping_criteria=own) == text[: PROMPT + 7]
    assert len(own) == 1


def test_strings_beside_eos_and_other_criteria() -> None:
    text = distinct()[1]
    for eos, string, end in ((text[PROMPT + 4], two_tokens(9), 4), (text[PROMPT + 9], two_tokens(4), 4)):
        assert run(oracle((None,)), stop_strings=string, eos_token_id=eos) == text[: PROMPT + end + 1]


def test_rows_of_a_batch_end_at_their_own_match() -> None:
    batch = torch.cat([prompt(seed=1), prompt(seed=2), prompt(seed=3)])
    new = plain(target(), batch, max_new_tokens=LENGTH)[:, PROMPT:].tolist()
    rules = {
        "stop_strings": [tokenizer().decode(new[0][3:5]), tokenizer().decode(new[1][9:11])],
        "eos_token_id": 127,
        "max_new_tokens": LENGTH,
        "tokenizer": tokenizer(),
    }
    expected = plain(target(), batch, **rules)
    assert torch.equal(plain(target(), batch, assistant_model=hostile(), **rules), expected)


def test_strings_when_sampling() -> None:
    ids, _ = distinct()
    strings = ["c", "g"]
    for seed in range(10):
        torch.manual_seed(seed)
        call = {"max_new_tokens": LENGTH, "stop_strings": strings, "tokenizer": tokenizer()}
        out = sampled(target(), ids, assistant_model=oracle(), **call)
        pieces = [tokenizer().decode([token]) for token in out[0, PROMPT:].tolist()]
        assert not any(letter in piece for piece in pieces[:-1] for letter in strings)
