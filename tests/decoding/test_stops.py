"""Stops are those of plain decoding, wherever in a block they fall.

Catches: criteria asked only at the end of a block, a bonus token behind an accepted end of sequence, a length that
overshoots, criteria asked about rejected tokens or asked twice, an option that stops only the default call.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation import stopping_criteria as criteria_module
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)

from tests.decoding.pair import BLOCK, VOCAB, distinct, hostile, new_target, oracle, plain, prompt, sampled, target
from tests.scripted import CYCLE

# Which slot is wrong: every accept length on its own, all right, and the mix.
SCRIPTS = [(slot,) for slot in range(BLOCK)] + [(None,), CYCLE]
PROMPT = 6


def generate(drafter: Any, **kwargs: Any) -> list[int]:
    ids, _ = distinct()
    return target().generate(ids, do_sample=False, assistant_model=drafter, **kwargs)[0].tolist()


# --- end of sequence -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_eos_ends_the_text_in_every_slot(script: tuple[Any, ...]) -> None:
    # Over all scripts and places: the very first token, every slot of a block, the bonus and every recovered token.
    _, text = distinct()
    for place in range(2 * BLOCK + 3):
        drafter = oracle(script)
        assert generate(drafter, eos_token_id=text[PROMPT + place], max_new_tokens=30) == text[: PROMPT + place + 1]
        assert drafter.last_stats.num_new_tokens == place + 1


def test_nothing_runs_behind_an_eos() -> None:
    _, text = distinct()
    for place, passes in ((0, 1), (1, 2), (7, 2), (8, 2), (9, 3)):
        drafter = oracle((None,))
        generate(drafter, eos_token_id=text[PROMPT + place], max_new_tokens=30)
        assert drafter.last_stats.num_target_passes == passes, place


@pytest.mark.parametrize("script", [(None,), (3,), CYCLE], ids=str)
def test_any_token_of_an_eos_list_ends_the_text(script: tuple[Any, ...]) -> None:
    _, text = distinct()
    absent = next(token for token in range(1, VOCAB) if token not in text)
    for place in range(BLOCK + 2):
        stops = [absent, text[PROMPT + place]]
        assert generate(oracle(script), eos_token_id=stops, max_new_tokens=30) == text[: PROMPT + place + 1]
    both = [text[PROMPT + 5], text[PROMPT + 3]]
    assert generate(oracle(script), eos_token_id=both, max_new_tokens=30) == text[: PROMPT + 4]


@pytest.mark.parametrize("place", range(BLOCK + 3))
def test_eos_from_a_generation_config_and_from_the_target(place: int) -> None:
    ids, text = distinct()
    expected = text[: PROMPT + place + 1]
    config = GenerationConfig(eos_token_id=text[PROMPT + place], max_new_tokens=30, do_sample=False)
    assert target().generate(ids, config, assistant_model=oracle()).tolist() == [expected]
    owner = new_target()
    owner.generation_config.eos_token_id = text[PROMPT + place]
    assert owner.generate(ids, max_new_tokens=30, assistant_model=oracle(model=owner)).tolist() == [expected]


def test_a_sampled_text_ends_at_its_eos() -> None:
    ids, _ = distinct()
    stops = list(range(0, VOCAB, 3))
    for seed in range(20):
        torch.manual_seed(seed)
        out = sampled(target(), ids, eos_token_id=stops, max_new_tokens=30, assistant_model=oracle())
        new = out[0, PROMPT:].tolist()
        hits = [i for i, token in enumerate(new) if token in stops]
        assert hits == [len(new) - 1] or (not hits and len(new) == 30)


@pytest.mark.parametrize("length", [1, 2, 3, 33])
def test_prompts_of_any_length(length: int) -> None:
    ids = prompt(length, seed=5)
    text = plain(target(), ids, max_new_tokens=30)
    for drafter in (oracle(text=text[0].tolist()), hostile()):
        assert torch.equal(plain(target(), ids, max_new_tokens=30, assistant_model=drafter), text)
        assert drafter.last_stats.num_new_tokens == 30


# --- length and time -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 9, 15, 16, 17])
def test_max_new_tokens_is_exact(count: int) -> None:
    _, text = distinct()
    for script in SCRIPTS:
        assert generate(oracle(script), max_new_tokens=count) == text[: PROMPT + count]
    drafter = oracle((None,))
    generate(drafter, max_new_tokens=count)
    assert drafter.last_stats.num_rounds == -(-(count - 1) // (BLOCK + 1))
    # One token of the budget is the target's own, so no draft beyond it is verified.
    assert sum(drafter.last_stats.verified) == count - 1 - drafter.last_stats.num_rounds


def test_max_length_one_behind_the_prompt_and_the_default() -> None:
    ids, text = distinct()
    assert generate(oracle(), max_length=PROMPT + 1) == text[: PROMPT + 1]
    assert generate(oracle(), max_length=PROMPT + 9) == text[: PROMPT + 9]
    with pytest.warns(UserWarning, match="model-agnostic default"):
        assert generate(oracle()) == text[: PROMPT + 20]
    for drafter in (None, oracle()):
        with pytest.raises(ValueError, match="max_length"):
            plain(target(), ids, max_length=PROMPT, assistant_model=drafter)


def test_a_users_own_length_criterion() -> None:
    _, text = distinct()
    short = StoppingCriteriaList([MaxLengthCriteria(max_length=PROMPT + 5)])
    assert generate(oracle((None,)), max_new_tokens=30, stopping_criteria=short) == text[: PROMPT + 5]
    # transformers lets the caller's criterion replace its own of the same class, a longer one too.
    longer = StoppingCriteriaList([MaxLengthCriteria(max_length=PROMPT + 17)])
    for drafter in (None, oracle((None,)), oracle()):
        assert generate(drafter, max_new_tokens=9, stopping_criteria=longer) == text[: PROMPT + 17]


@pytest.mark.parametrize("limit", [0.0, 3.5, 8.5, 12.5])
def test_max_time_ends_at_the_token_that_passes_it(limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    # A clock that moves by one whenever it is read makes time a count of the tokens asked about.
    ids, _ = distinct()

    class Clock:
        now = 0.0

        def time(self) -> float:
            self.now += 1.0
            return self.now

    monkeypatch.setattr(criteria_module, "time", Clock())
    expected = plain(target(), ids, max_time=limit, max_new_tokens=30)[0].tolist()
    assert PROMPT < len(expected) < PROMPT + 30
    for script in SCRIPTS:
        monkeypatch.setattr(criteria_module, "time", Clock())
        assert generate(oracle(script), max_time=limit, max_new_tokens=30) == expected


# --- criteria of the user's own --------------------------------------------------------------------------------------


class Recording(StoppingCriteria):
    """Stops at a length; remembers every call."""

    def __init__(self, length: int, result: Any = None) -> None:
        self.length = length
        self.result = result or (lambda stops, ids: torch.full((ids.shape[0],), stops))
        self.calls: list[tuple[list[int], Any]] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        seen = None if scores is None else [tuple(score.shape) for score in scores]
        self.calls.append((input_ids[0].tolist(), seen))
        return self.result(input_ids.shape[1] >= self.length, input_ids)


@pytest.mark.parametrize("script", [(None,), (2,), CYCLE], ids=str)
def test_a_criterion_stops_at_any_length_and_sees_every_prefix_once(script: tuple[Any, ...]) -> None:
    ids, text = distinct()
    for count in range(1, 2 * BLOCK + 4):
        ours, theirs = Recording(PROMPT + count), Recording(PROMPT + count)
        # A processor that is no function of one row takes the other path through verification.
        for extra in ({}, {"repetition_penalty": 1.0001}):
            plain(target(), ids, max_new_tokens=30, stopping_criteria=[theirs], **extra)
            drafter = oracle(script)
            assert generate(drafter, max_new_tokens=30, stopping_criteria=[ours], **extra) == text[: PROMPT + count]
            assert ours.calls == theirs.calls
            assert drafter.last_stats.num_new_tokens == count


@pytest.mark.parametrize(
    "outputs", [{}, {"output_scores": True, "return_dict_in_generate": True}], ids=["ids", "scores"]
)
def test_a_criterion_sees_the_scores_plain_decoding_shows(outputs: dict[str, Any]) -> None:
    ids, _ = distinct()
    calls = []
    for drafter in (None, oracle(), hostile()):
        criterion = Recording(PROMPT + 11)
        plain(target(), ids, max_new_tokens=30, stopping_criteria=[criterion], assistant_model=drafter, **outputs)
        calls.append(criterion.calls)
    assert calls[0] == calls[1] == calls[2]
    assert (calls[0][0][1] is None) == (not outputs)


def test_a_criterion_that_decides_by_scores() -> None:
    ids, text = distinct()

    class Sure(StoppingCriteria):
        def __init__(self, limit: float) -> None:
            self.limit = limit

        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            return scores[-1].softmax(-1).amax(-1) > self.limit

    outputs = {"output_scores": True, "return_dict_in_generate": True, "max_new_tokens": 30}
    probabilities = [s.softmax(-1).max().item() for s in plain(target(), ids, **outputs).scores]
    for place in (2, 6, 9, 12):
        record = max(probabilities[:place])
        limit = min((p for p in probabilities[place:] if p > record), default=None)
        if limit is None:
            continue
        expected = next(i for i, p in enumerate(probabilities) if p > limit - 1e-6) + 1
        got = plain(target(), ids, stopping_criteria=[Sure(limit - 1e-6)], assistant_model=oracle(), **outputs)
        assert got.sequences[0].tolist() == text[: PROMPT + expected]


@pytest.mark.parametrize(
    "result", [lambda stops, ids: stops, lambda stops, ids: torch.tensor([stops])], ids=["bool", "tensor"]
)
def test_a_criterion_may_answer_with_a_python_bool(result: Any) -> None:
    _, text = distinct()
    criteria = StoppingCriteriaList([Recording(PROMPT + 5, result)])
    assert generate(oracle((None,)), max_new_tokens=30, stopping_criteria=criteria) == text[: PROMPT + 5]


def test_subclasses_of_transformers_criteria_decide_for_themselves() -> None:
    ids, text = distinct()

    class LateEos(EosTokenCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            return super().__call__(input_ids, scores, **kwargs) & (input_ids.shape[1] > PROMPT + 9)

    class NoLength(MaxLengthCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    stops = [text[PROMPT + 3], text[PROMPT + 12]]
    for criterion in (LateEos(torch.tensor(stops)), NoLength(PROMPT + 4)):
        expected = plain(target(), ids, max_new_tokens=16, stopping_criteria=[criterion])[0].tolist()
        assert len(expected) > PROMPT + 10
        for script in ((None,), CYCLE):
            assert generate(oracle(script), max_new_tokens=16, stopping_criteria=[criterion]) == expected


def test_an_error_in_a_criterion_comes_through() -> None:
    class Broken(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            if input_ids.shape[1] == PROMPT + 4:
                raise RuntimeError("broken criterion")
            return torch.zeros(1, dtype=torch.bool)

    with pytest.raises(RuntimeError, match="broken criterion"):
        generate(oracle((None,)), max_new_tokens=30, stopping_criteria=[Broken()])


# --- minimum length and forced ends ----------------------------------------------------------------------------------


@pytest.mark.parametrize("script", [(None,), (1,), CYCLE], ids=str)
@pytest.mark.parametrize("place", [0, 1, 2, 7, 8])
def test_min_new_tokens_holds_an_eos_back(script: tuple[Any, ...], place: int) -> None:
    ids, text = distinct()
    rules = {"eos_token_id": [text[PROMPT + place], text[PROMPT + 13]], "min_new_tokens": 10, "max_new_tokens": 30}
    expected = plain(target(), ids, **rules)[0].tolist()
    assert len(expected) >= PROMPT + 10
    # One drafter knows the constrained text, the other goes on proposing the forbidden token.
    assert generate(oracle(script, text=expected), **rules) == expected
    assert generate(oracle(script), **rules) == expected


@pytest.mark.filterwarnings("ignore:Unfeasible length constraints")
@pytest.mark.parametrize("rules", [
    {"forced_eos_token_id": 5}, {"forced_eos_token_id": [5, 9], "eos_token_id": [5, 9]},
    {"forced_bos_token_id": 7}, {"min_length": PROMPT + 9}, {"eos_token_id": None},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("count", [1, 5, 8, 9, 17])
def test_forced_tokens(rules: dict[str, Any], count: int) -> None:
    ids, text = distinct()
    rules = {"eos_token_id": text[PROMPT + 3], **rules, "max_new_tokens": count}
    expected = plain(target(), ids, **rules)[0].tolist()
    for drafter in (oracle(text=expected), oracle((None,), text=expected), oracle(), hostile()):
        assert generate(drafter, **rules) == expected


# --- batches ---------------------------------------------------------------------------------------------------------


def test_rows_that_would_end_apart_need_a_padding_rule() -> None:
    # Without an end-of-sequence criterion plain decoding goes on with rows that have ended: no drafter can follow.
    batch = torch.cat([prompt(seed=1), prompt(seed=2)])
    with pytest.raises(ValueError, match="eos_token_id"):
        plain(target(), batch, max_new_tokens=9, stopping_criteria=[Recording(9)], assistant_model=hostile())


def test_a_criterion_of_the_whole_batch_with_eos() -> None:
    batch = torch.cat([prompt(seed=1), prompt(seed=2)])

    class EndsIn(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            return input_ids[:, -1] % 16 == 3

    rules = {"max_new_tokens": 24, "stopping_criteria": [EndsIn()], "eos_token_id": 126}
    expected = plain(target(), batch, **rules)
    assert torch.equal(plain(target(), batch, assistant_model=hostile(), **rules), expected)
