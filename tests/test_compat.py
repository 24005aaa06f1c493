"""The hooks into transformers: there or named in an ImportError, installed once, and out of the way of plain calls."""

from __future__ import annotations

import functools
import inspect

import pytest
import torch
import transformers
from transformers import DynamicCache
from transformers.generation import GenerationMixin

import dspark
from dspark import compat
from dspark.decoding.generate import install
from tests import zoo
from tests.scripted import Hostile


@pytest.mark.parametrize("name", ["_prefill", "prepare_inputs_for_generation"])
def test_a_missing_hook_is_named_with_the_version(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delattr(GenerationMixin, name)
    with pytest.raises(ImportError) as caught:
        compat.check_generation_hooks()
    for part in (f"GenerationMixin.{name}", transformers.__version__, "no such method", "5.15 to 5.24"):
        assert part in str(caught.value)


def test_a_hook_that_lost_a_parameter_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def _prefill(self: object, input_ids: object, model_kwargs: object) -> None: ...

    monkeypatch.setattr(GenerationMixin, "_prefill", _prefill)
    with pytest.raises(ImportError, match=r"lost generation_config") as caught:
        compat.check_generation_hooks()
    assert transformers.__version__ in str(caught.value)


def test_install_checks_the_hooks_first(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = GenerationMixin.generate._dspark_original
    monkeypatch.setattr(GenerationMixin, "generate", plain)
    monkeypatch.delattr(GenerationMixin, "_prefill")
    with pytest.raises(ImportError, match="_prefill"):
        install()
    assert GenerationMixin.generate is plain


def test_install_twice_wraps_once() -> None:
    wrapped = GenerationMixin.generate
    install()
    assert GenerationMixin.generate is wrapped
    assert not hasattr(wrapped._dspark_original, "_dspark_original")
    assert inspect.signature(wrapped) == inspect.signature(wrapped._dspark_original)


def test_plain_generate_is_handed_through_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Same arguments, same objects, whatever they are; also when another kind of assistant is named."""
    calls = []
    original = GenerationMixin.generate._dspark_original

    @functools.wraps(original)
    def record(self: object, *args: object, **kwargs: object) -> str:
        calls.append((self, args, kwargs))
        return "result"

    monkeypatch.setattr(GenerationMixin, "generate", record)
    install()
    model, ids, other = zoo.target("Llama"), zoo.prompt(3), object()
    assert model.generate(ids, assistant_model=other, num_beams=2) == "result"
    assert model.generate(inputs=ids) == "result"
    assert calls == [(model, (ids,), {"assistant_model": other, "num_beams": 2}), (model, (), {"inputs": ids})]


def test_plain_runs_are_the_same_before_and_after_a_drafted_one() -> None:
    model, ids = zoo.target("Qwen3"), zoo.prompt(5)
    first = model.generate(ids, do_sample=False, max_new_tokens=12)
    model.generate(ids, do_sample=False, max_new_tokens=12, assistant_model=Hostile(model))
    assert torch.equal(model.generate(ids, do_sample=False, max_new_tokens=12), first)


def test_the_cache_keyword_is_one_the_forward_takes() -> None:
    for name in ("Llama", "Gemma 3", "Qwen3.5", "Mamba 2", "Qwen2.5-VL"):
        model = zoo.target(name)
        assert compat.cache_name(model) in inspect.signature(type(model).forward).parameters


def test_a_cache_is_found_under_every_name() -> None:
    cache = DynamicCache()
    for name in ("cache", "past_key_values", "cache_params"):
        assert compat.pop_cache({name: cache, "use_cache": True}) == (name, cache)
    assert compat.pop_cache({"cache": None}) == (None, None)


def test_lengths_of_caches() -> None:
    cache = DynamicCache()
    assert compat.cache_length(cache) == 0
    states = torch.zeros(1, 2, 5, 8)
    cache.update(states, states, 0)
    assert compat.cache_length(cache) == 5
    recurrent = DynamicCache(config=zoo.target("Mamba 2").config)
    assert compat.cache_length(recurrent) is None


def test_the_public_names_install_the_hook() -> None:
    assert dspark.__version__
    assert hasattr(GenerationMixin.generate, "_dspark_original")
