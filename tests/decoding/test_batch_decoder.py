"""Texts that come and go are each what they are alone, and what goes wrong with one stays with it.

Catches: rows mixed up when others join or leave, a text that depends on its neighbours, settings of one request that
reach another, a failing criterion or callback that takes the batch along, memory beyond the cap, texts lost or served
twice, hooks or rows left behind.
"""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import LogitsProcessor, StoppingCriteria

from dspark import BatchDecoder, DSparkDrafter, SpeculationConfig
from tests.properties.tiny import close_pair
from tests.scripted import drafter_config
from tests.zoo import target

POLICIES = ("fixed", "threshold", "scheduled", "async", "auto")


def pair() -> tuple[Any, Any]:
    """A target and a drafter that is right often, not always."""
    return close_pair(vocab=64, noise=0.3, seed=0)


def prompts(count: int, seed: int = 0) -> list[torch.Tensor]:
    draw = random.Random(seed)
    return [torch.tensor([[draw.randrange(1, 64) for _ in range(draw.randrange(1, 30))]]) for _ in range(count)]


def alone(ids: torch.Tensor, **call: Any) -> list[int]:
    model, _ = pair()
    with torch.no_grad():
        return model.generate(ids, attention_mask=torch.ones_like(ids), **call)[0, ids.shape[1] :].tolist()


def settings(policy: str) -> SpeculationConfig:
    return SpeculationConfig(policy, survival_threshold=0.3 if policy == "threshold" else 0.0)


class Raises(StoppingCriteria):
    """Fails after some tokens."""

    def __init__(self, after: int) -> None:
        self.after = after

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        self.after -= 1
        if self.after < 0:
            raise ArithmeticError("this criterion is broken")
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Bias(LogitsProcessor):
    """A processor that is not transformers' own, so it is asked slot by slot."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[:, self.token] += 2.0
        return scores


@pytest.mark.parametrize("policy", POLICIES)
def test_texts_submitted_at_any_time_are_what_they_are_alone(policy: str) -> None:
    model, drafter = pair()
    draw, ids = random.Random(1), prompts(24)
    lengths = [draw.randrange(1, 40) for _ in ids]
    waiting, found = list(zip(ids, lengths, strict=True)), {}
    with BatchDecoder(model, drafter, max_rows=5, speculation=settings(policy)) as decoder:
        submitted = {}
        while waiting or decoder.num_live or decoder.num_waiting:
            for _ in range(min(draw.randrange(0, 4), len(waiting))):
                prompt, length = waiting.pop()
                submission = decoder.submit(prompt, max_new_tokens=length, do_sample=False)
                submitted[submission] = (prompt, length)
            for finished in decoder.step():
                assert finished.submission not in found
                found[finished.submission] = finished
            assert decoder.num_live <= 5
    assert found.keys() == submitted.keys()
    for submission, (prompt, length) in submitted.items():
        finished = found[submission]
        assert finished.reason == "stopped"
        assert finished.new_ids == alone(prompt, max_new_tokens=length, do_sample=False)
        assert finished.ids.tolist() == [prompt[0].tolist() + finished.new_ids]
        stats = finished.stats
        assert stats.num_new_tokens == length == len(finished.new_ids)
        assert sum(stats.accepted) + stats.num_rounds + 1 >= length
    assert decoder.stats.num_new_tokens == sum(lengths)
    assert decoder.stats.num_rows == len(ids)
    if policy == "fixed":
        assert decoder.stats.mean_acceptance_length > 1.3, "the check means little unless drafts are accepted"


def test_each_request_has_its_own_settings() -> None:
    model, drafter = pair()
    calls: list[dict[str, Any]] = [
        {"max_new_tokens": 12},
        {"max_new_tokens": 20, "repetition_penalty": 1.4},
        {"max_new_tokens": 9, "logits_processor": [Bias(5)]},
        {"max_new_tokens": 25, "eos_token_id": 7},
        {"max_new_tokens": 16, "no_repeat_ngram_size": 2},
        {"max_new_tokens": 30, "eos_token_id": [3, 9], "min_new_tokens": 6},
        {"max_new_tokens": 1},
    ]
    ids = prompts(len(calls), seed=3)
    with BatchDecoder(model, drafter, max_rows=4) as decoder:
        submitted = [decoder.submit(prompt, do_sample=False, **call) for prompt, call in zip(ids, calls, strict=True)]
        found = {finished.submission: finished.new_ids for finished in decoder.run()}
    for submission, prompt, call in zip(submitted, ids, calls, strict=True):
        assert found[submission] == alone(prompt, do_sample=False, **call), call


def test_a_seeded_text_does_not_depend_on_the_batch() -> None:
    model, drafter = pair()
    ids = prompts(6, seed=5)

    def sample(chosen: list[int]) -> dict[int, list[int]]:
        with BatchDecoder(model, drafter, max_rows=3) as decoder:
            numbers = {}
            for n in chosen:
                generator = torch.Generator().manual_seed(n)
                call = {"temperature": 0.5 + n / 5, "top_k": 0}
                submission = decoder.submit(ids[n], max_new_tokens=15, do_sample=True, generator=generator, **call)
                numbers[submission] = n
            return {numbers[finished.submission]: finished.new_ids for finished in decoder.run()}

    together = sample(list(range(6)))
    assert {n: sample([n])[n] for n in range(6)} == together
    assert len({tuple(text) for text in together.values()}) == 6


def test_failures_and_cancellations_stay_with_their_text() -> None:
    model, drafter = pair()
    ids = prompts(7, seed=2)

    def broken_callback(token: int) -> None:
        raise KeyError("no such screen")

    def broken_later() -> Any:
        seen: list[int] = []

        def callback(token: int) -> None:
            seen.append(token)
            if len(seen) > 4:
                raise OSError("the pipe is gone")

        return callback

    heard: list[int] = []
    extra: list[dict[str, Any]] = [
        {}, {"stopping_criteria": [Raises(5)]}, {"on_token": broken_callback}, {"on_token": heard.append}, {},
        {"on_token": broken_later()}, {"logits_processor": [None]},
    ]  # fmt: skip
    with BatchDecoder(model, drafter, max_rows=7) as decoder:
        submitted = [
            decoder.submit(prompt, max_new_tokens=30, do_sample=False, **call)
            for prompt, call in zip(ids, extra, strict=True)
        ]
        found = {finished.submission: finished for finished in decoder.step()}
        decoder.cancel(submitted[4])
        for finished in decoder.run():
            found[finished.submission] = finished
    reasons = [found[submission].reason for submission in submitted]
    assert reasons == ["stopped", "failed", "failed", "stopped", "cancelled", "failed", "failed"]
    errors = [type(found[submission].error) for submission in submitted[:6]]
    assert errors == [type(None), ArithmeticError, KeyError, type(None), type(None), OSError]
    for n in (0, 3):
        assert found[submitted[n]].new_ids == alone(ids[n], max_new_tokens=30, do_sample=False)
    assert heard == found[submitted[3]].new_ids
    for n in (1, 4, 5):  # as far as they got
        text = alone(ids[n], max_new_tokens=30, do_sample=False)
        got = found[submitted[n]].new_ids
        assert got == text[: len(got)]
        assert len(got) < 30


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_lone_text_whose_processor_fails_leaves_the_decoder_open(do_sample: bool) -> None:
    class Breaks(Bias):
        left = 12

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            self.left -= 1
            if self.left < 0:
                raise ZeroDivisionError("this processor is broken")
            return super().__call__(input_ids, scores)

    model, drafter = pair()
    first, second = prompts(2, seed=4)
    for left in range(1, 20):  # so that it breaks in the prompt's pass and anywhere in a block
        broken = Breaks(3)
        broken.left = left
        with BatchDecoder(model, drafter) as decoder:
            decoder.submit(first, max_new_tokens=20, do_sample=do_sample, logits_processor=[broken])
            (gone,) = decoder.run()
            assert gone.reason == "failed"
            assert isinstance(gone.error, ZeroDivisionError)
            decoder.submit(second, max_new_tokens=20, do_sample=False)
            (finished,) = decoder.run()
        assert finished.new_ids == alone(second, max_new_tokens=20, do_sample=False)


def test_memory_holds_texts_back_and_nothing_overtakes() -> None:
    model, drafter = pair()
    ids = prompts(9, seed=7)
    limits = [prompt.shape[1] + 20 for prompt in ids]
    cap = 2 * max(limits)
    with BatchDecoder(model, drafter, max_rows=8, max_cached_tokens=cap) as decoder:
        submitted = [decoder.submit(prompt, max_new_tokens=20, do_sample=False) for prompt in ids]
        order = []
        while decoder.num_live or decoder.num_waiting:
            order += [submitted.index(finished.submission) for finished in decoder.step()]
            live = [s.max_length for s in decoder._live.values()]
            assert len(live) * max(live, default=0) <= cap
            joined = {submitted.index(s) for s in decoder._live.values()}
            assert joined | set(order) == set(range(len(joined | set(order)))), "first come, first served"
        assert sorted(order) == list(range(9))
        with pytest.raises(ValueError, match="max_cached_tokens"):
            decoder.submit(ids[0], max_new_tokens=cap)


@pytest.mark.slow
def test_two_hundred_requests_under_load() -> None:
    _load(200)


def test_requests_under_load() -> None:
    _load(50)


def _load(count: int) -> None:
    model, drafter = pair()
    draw, ids = random.Random(11), prompts(count, seed=11)
    plans = [
        {"length": draw.randrange(1, 30), "fails": draw.random() < 0.08, "cancel": draw.random() < 0.12} for _ in ids
    ]
    found: dict[Any, Any] = {}
    times: dict[Any, int] = {}
    submitted: list[Any] = []
    with BatchDecoder(model, drafter, max_rows=6, max_cached_tokens=300, speculation=settings("auto")) as decoder:
        step = 0
        while len(submitted) < count or decoder.num_live or decoder.num_waiting:
            step += 1
            for _ in range(min(draw.choice((0, 0, 1, 3)), count - len(submitted))):
                plan = plans[len(submitted)]
                extra = {"stopping_criteria": [Raises(plan["length"] // 2)]} if plan["fails"] else {}
                submission = decoder.submit(
                    ids[len(submitted)], max_new_tokens=plan["length"], do_sample=False, **extra
                )
                submitted.append(submission)
                if plan["cancel"]:
                    times[submission] = step + draw.randrange(0, 6)
            for submission, when in times.items():
                if when == step:
                    decoder.cancel(submission)
            for finished in decoder.step():
                assert finished.submission not in found
                found[finished.submission] = finished
            room = [layer.keys.shape for layer in _layers(decoder)]
            assert all(shape[0] <= 6 and shape[2] <= 60 + 2 * 256 for shape in room)
    assert len(found) == count
    kinds = set()
    for submission, prompt, plan in zip(submitted, ids, plans, strict=True):
        finished = found[submission]
        kinds.add(finished.reason)
        text = alone(prompt, max_new_tokens=plan["length"], do_sample=False)
        if finished.reason == "stopped":
            assert finished.new_ids == text
        else:
            assert finished.new_ids == text[: len(finished.new_ids)]
            assert plan["fails"] if finished.reason == "failed" else plan["cancel"]
    assert kinds == {"stopped", "failed", "cancelled"}


def _layers(decoder: BatchDecoder) -> Iterator[Any]:
    batch = decoder._run.session._batch
    return iter(()) if batch is None else iter(batch.cache.layers)


def test_sources_are_read_only_as_rows_come_free() -> None:
    model, drafter = pair()
    taken = []

    def source() -> Iterator[dict[str, Any]]:
        for n, prompt in enumerate(prompts(10)):
            taken.append(n)
            yield {"input_ids": prompt, "max_new_tokens": 5 + n, "do_sample": False}

    with BatchDecoder(model, drafter, max_rows=3) as decoder:
        for count, _ in enumerate(decoder.run(source()), start=1):
            assert len(taken) <= count + 3
    assert count == len(taken) == 10


@pytest.mark.parametrize("name", ["Mistral", "Gemma 3", "GPT-2"])
def test_other_targets(name: str) -> None:
    """Sliding windows, and a target with learned positions."""
    model: PreTrainedModel = target(name)
    torch.manual_seed(0)
    drafter = DSparkDrafter(drafter_config(model)).eval()
    ids = [prompt % (model.config.get_text_config().vocab_size - 2) + 1 for prompt in prompts(4, seed=8)]
    with BatchDecoder(model, drafter, max_rows=3) as decoder:
        submitted = [decoder.submit(prompt, max_new_tokens=14, do_sample=False) for prompt in ids]
        found = {finished.submission: finished.new_ids for finished in decoder.run()}
    for submission, prompt in zip(submitted, ids, strict=True):
        text = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=14, do_sample=False)
        assert found[submission] == text[0, prompt.shape[1] :].tolist()


def test_refusals_come_before_anything_runs() -> None:
    model, drafter = pair()
    one = torch.tensor([[1, 2]])
    with BatchDecoder(model, drafter) as decoder:
        for call in (
            {"num_beams": 2}, {"num_return_sequences": 2}, {"streamer": object()},
            {"output_scores": True, "return_dict_in_generate": True},
            {"attention_mask": torch.tensor([[0, 1]])}, {"cache_implementation": "static"}, {"use_cache": False},
        ):  # fmt: skip
            with pytest.raises(ValueError, match=r"."):
                decoder.submit(one, **call)
        for ids in (torch.zeros(2, 3, dtype=torch.long), torch.zeros(1, 0, dtype=torch.long), []):
            with pytest.raises(ValueError, match="one prompt"):
                decoder.submit(ids)
        assert decoder.num_waiting == decoder.num_live == 0
        assert decoder.step() == []
    with pytest.raises(RuntimeError, match="closed"):
        decoder.submit(one)
    for wrong in ({"max_rows": 0}, {"max_cached_tokens": -1}, {"max_rows": True}):
        with pytest.raises(ValueError, match="at least 1"):
            BatchDecoder(model, drafter, **wrong)
    with pytest.raises(ValueError, match="DSparkDrafter"):
        BatchDecoder(model, model)


def test_nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    model, drafter = pair()
    hooks = [len(layer._forward_hooks) for layer in model.model.layers]
    decoder = BatchDecoder(model, drafter, max_rows=2)
    for prompt in prompts(4):
        decoder.submit(prompt, max_new_tokens=10, do_sample=False)
    decoder.step()
    assert [len(layer._forward_hooks) for layer in model.model.layers] == hooks
    cache = weakref.ref(decoder._run.session._batch.cache)
    forward = type(model).forward

    def out_of_memory(*args: Any, **kwargs: Any) -> Any:
        raise MemoryError("none left")

    monkeypatch.setattr(type(model), "forward", out_of_memory)
    with pytest.raises(MemoryError):
        decoder.step()
    monkeypatch.setattr(type(model), "forward", forward)
    assert [len(layer._forward_hooks) for layer in model.model.layers] == hooks
    gc.collect()
    assert cache() is None, "a decoder that failed frees its caches"
    with pytest.raises(RuntimeError, match="closed"):
        decoder.step()
    assert alone(prompts(1)[0], max_new_tokens=5, do_sample=False)


def test_callbacks_may_submit_and_cancel_but_not_step() -> None:
    model, drafter = pair()
    ids = prompts(4, seed=9)
    refused: list[str] = []
    more: list[Any] = []

    def meddle(token: int) -> None:
        for call in (decoder.step, decoder.close, lambda: list(decoder.run())):
            try:
                call()
            except RuntimeError as error:
                refused.append(str(error))
        if not more:
            more.append(decoder.submit(ids[3], max_new_tokens=6, do_sample=False))
            decoder.cancel(first)

    with BatchDecoder(model, drafter, max_rows=3) as decoder:
        first = decoder.submit(ids[0], max_new_tokens=30, do_sample=False)
        others = [decoder.submit(prompt, max_new_tokens=12, do_sample=False) for prompt in ids[1:2]]
        others.append(decoder.submit(ids[2], max_new_tokens=12, do_sample=False, on_token=meddle))
        found = {finished.submission: finished for finished in decoder.run()}
    assert found[first].reason == "cancelled"
    for submission, prompt, length in ((others[0], ids[1], 12), (others[1], ids[2], 12), (more[0], ids[3], 6)):
        assert found[submission].new_ids == alone(prompt, max_new_tokens=length, do_sample=False)
    assert len(refused) == 3 * 12
    assert all("step is under way" in message for message in refused)


def test_a_consumer_that_stops_early_loses_nothing_and_buffers_are_copied() -> None:
    model, drafter = pair()
    buffer = torch.zeros(1, 4, dtype=torch.long)
    with BatchDecoder(model, drafter, max_rows=4) as decoder:
        submitted = []
        for n in range(4):
            buffer.fill_(n + 1)
            submitted.append(decoder.submit(buffer, max_new_tokens=1 + n // 3, do_sample=False))
        found = {}
        while len(found) < 4:
            finished = next(decoder.run())
            found[finished.submission] = finished.new_ids
        assert list(decoder.run()) == []
    for n, submission in enumerate(submitted):
        prompt = torch.full((1, 4), n + 1)
        assert submission.input_ids.tolist() == prompt.tolist()
        assert found[submission] == alone(prompt, max_new_tokens=1 + n // 3, do_sample=False)


def test_a_wrapped_target_and_steps_under_inference_mode() -> None:
    peft = pytest.importorskip("peft")
    model, drafter = pair()
    lora = peft.LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    wrapped = peft.get_peft_model(copy.deepcopy(model), lora).eval()
    ids = prompts(4, seed=4)
    with BatchDecoder(wrapped, drafter, max_rows=3) as decoder:
        submitted = [decoder.submit(prompt, max_new_tokens=12, do_sample=False) for prompt in ids]
        with torch.inference_mode():
            found = {finished.submission: finished.new_ids for finished in decoder.step()}
        found |= {finished.submission: finished.new_ids for finished in decoder.run()}
    for submission, prompt in zip(submitted, ids, strict=True):
        text = wrapped.generate(
            input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False
        )
        assert found[submission] == text[0, prompt.shape[1] :].tolist()


def test_what_one_text_may_not_ask_is_refused_when_it_is_submitted() -> None:
    model, drafter = pair()
    one = torch.tensor([[1, 2]])
    several = GenerationConfig(num_return_sequences=2, do_sample=True, max_new_tokens=3)
    with BatchDecoder(model, drafter) as decoder, BatchDecoder(model, drafter) as other:
        for ids, call in (
            (one, {"generation_config": several}), (one, {"num_assistant_tokens": 1}), (one, {"generator": 3}),
            (one, {"on_token": 5}), (one.float(), {}), (torch.tensor([[1, 64]]), {}), ("text", {}),
        ):  # fmt: skip
            with pytest.raises(ValueError, match=r"`|submit"):
                decoder.submit(ids, **call)
        submission = other.submit(one, max_new_tokens=2)
        for wrong in (submission, None):
            with pytest.raises(ValueError, match="of this decoder"):
                decoder.cancel(wrong)
    with pytest.raises(ValueError, match="SpeculationConfig"):
        BatchDecoder(model, drafter, speculation="auto")
    learned = target("GPT-2")
    torch.manual_seed(0)
    decoder = BatchDecoder(learned, DSparkDrafter(drafter_config(learned)).eval())
    with pytest.raises(ValueError, match="learned positions"):
        decoder.submit(one, max_new_tokens=learned.config.max_position_embeddings)
