"""The hooks into transformers: there or named in an ImportError, installed once, and out of the way of plain calls."""

from __future__ import annotations

import functools
import inspect
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache
from transformers.generation import GenerationMixin

import dspark
from dspark import DSparkDrafter, compat, requirements
from dspark.decoding.arguments import check_devices
from dspark.decoding.generate import install
from tests import zoo
from tests.decoding.equality import refused
from tests.scripted import CYCLE, Hostile, Oracle, drafter_config


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


# --- wrapped models -----------------------------------------------------------------------------------------------


def _text(model: Any, **kwargs: Any) -> list[int]:
    return model.generate(input_ids=zoo.prompt(6), do_sample=False, max_new_tokens=30, **kwargs)[0].tolist()


def test_compiled_wrappers_are_looked_through() -> None:
    model = zoo.target("Llama")
    text = _text(model)
    oracle = Oracle(model, [text], CYCLE)
    compiled = torch.compile(model, backend="eager"), torch.compile(oracle, backend="eager")
    assert _text(compiled[0], assistant_model=compiled[1]) == text
    assert sum(oracle.last_stats.accepted) > 0


def test_a_forward_that_ran_compiled_before_is_exact() -> None:
    """Hooks come with a call, and a graph of before knows nothing of them."""
    model = zoo.new_target("Llama", num_hidden_layers=2)
    text = _text(model)
    model.forward = torch.compile(model.forward, backend="eager", dynamic=True)
    _text(model)
    oracle = Oracle(model, [text], CYCLE)
    assert _text(model, assistant_model=oracle) == text
    assert sum(oracle.last_stats.accepted) > 0


def _with_lora(model: Any, modules: list[str]) -> Any:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=16, target_modules=modules)).eval()
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    return wrapped


def test_a_peft_target_decodes_with_its_adapter() -> None:
    without = _text(zoo.target("Llama"))
    wrapped = _with_lora(zoo.new_target("Llama"), ["q_proj", "down_proj"])
    text = _text(wrapped)
    assert text != without
    oracle = Oracle(wrapped.get_base_model(), [text], CYCLE)
    assert _text(wrapped, assistant_model=oracle) == text
    assert oracle.last_stats.mean_acceptance_length > 3


def test_a_peft_drafter_drafts_with_its_adapter() -> None:
    model = zoo.target("Llama")
    drafter = DSparkDrafter(drafter_config(model)).eval()
    call = (torch.tensor([5]), torch.randn(1, 6, drafter.config.context_width))
    before = drafter.draft(*call, target=model).base_logits
    wrapped = _with_lora(drafter, ["q_proj", "down_proj"])
    assert not torch.allclose(drafter.draft(*call, target=model).base_logits, before)
    assert _text(model, assistant_model=wrapped) == _text(model)
    assert drafter.last_stats.num_rounds > 0


# --- what is refused before any pass ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_beams": 2}, ("num_beams=2", "greedy")),
        ({"num_beams": 2, "num_return_sequences": 2}, ("num_beams=2", "greedy")),
        ({"use_cache": False}, ("use_cache=False", "Leave it on")),
        ({"dola_layers": "high"}, ("dola_layers=high", "greedy")),
        ({"penalty_alpha": 0.6, "top_k": 4}, ("penalty_alpha=0.6", "greedy")),
        ({"prompt_lookup_num_tokens": 3}, ("prompt_lookup_num_tokens=3", "greedy")),
    ],
)
def test_modes_of_their_own_are_refused(options: dict[str, Any], says: tuple[str, ...]) -> None:
    model = zoo.target("Llama")
    with refused(model, *says):
        _text(model, assistant_model=Hostile(model), **options)


def test_an_encoder_decoder_is_refused() -> None:
    config = transformers.T5Config(
        vocab_size=zoo.VOCAB, d_model=32, d_kv=8, d_ff=32, num_layers=4, num_heads=4, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    with refused(model, "encoder-decoder", "T5ForConditionalGeneration", "causal LM"):
        _text(model, assistant_model=Hostile(zoo.target("Llama")))


@pytest.mark.parametrize("place", ["no/such-drafter", "./drafter", Path("drafter")])
def test_a_place_is_no_assistant(place: Any) -> None:
    model = zoo.target("Llama")
    with refused(model, "must be a loaded model", repr(str(place)), "DSparkDrafter.from_pretrained("):
        _text(model, assistant_model=place)


def test_tensors_on_several_devices_are_named() -> None:
    model, ids = zoo.target("Llama"), zoo.prompt(6)
    mask = torch.ones_like(ids)
    for inputs, says in (
        ({"input_ids": ids.to("meta")}, ("`input_ids` on meta", "embedding on cpu")),
        ({"inputs": ids.to("meta"), "attention_mask": mask}, ("`inputs` on meta", "`attention_mask` on cpu")),
        ({"input_ids": ids, "attention_mask": mask.to("meta")}, ("`attention_mask` on meta", "`input_ids` on cpu")),
    ):
        with refused(model, *says, "inputs.to(model.device)"):
            model.generate(**inputs, assistant_model=Hostile(model), max_new_tokens=4)


def test_a_target_that_moves_its_inputs_is_let_pass() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = zoo.new_target("Llama")
    text = _text(model)
    oracle = Oracle(model, [text], CYCLE)
    accelerate.cpu_offload(model, torch.device("cpu"))  # its weights are on the meta device between passes
    assert _text(model, assistant_model=oracle) == text
    check_devices(model, {"input_ids": zoo.prompt(3).to("meta")})


# --- versions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["4.57.3", "5.9.0", "5.14.9", "5.3.0.dev0"])
def test_an_older_transformers_is_refused(version: str) -> None:
    with pytest.raises(ImportError) as caught:
        requirements.check_transformers(version)
    assert f"needs transformers 5.15 to 5.24, found {version}" in str(caught.value)
    assert "pip install 'transformers>=5.15,<5.25'" in str(caught.value)


@pytest.mark.parametrize("version", ["5.15.0", "5.24.0", "5.30.0.dev0", "6.0.0", transformers.__version__])
def test_supported_and_newer_ones_are_not(version: str) -> None:
    requirements.check_transformers(version)


def test_the_import_says_so_before_it_misses_a_name(tmp_path: Path) -> None:
    """Of the old transformers only its version is there: the refusal comes before anything else of it is asked for."""
    (tmp_path / "transformers.py").write_text("__version__ = '4.57.3'\n")
    places = [str(tmp_path), str(Path(dspark.__file__).parents[1])]
    done = subprocess.run(
        [sys.executable, "-c", "import dspark"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(places)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stderr.splitlines()[-1].startswith("ImportError: dspark needs transformers 5.15 to 5.24, found 4.57.3")


def test_the_range_is_that_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    (named,) = [one for one in project["dependencies"] if one.startswith("transformers")]
    major, minor = requirements.NEWEST.split(".")
    assert named == f"transformers>={requirements.OLDEST},<{major}.{int(minor) + 1}"
