"""A call leaves nothing behind: not on the target, the drafter or the caller's objects, not after an error either.

Catches: hooks that stay, options written to a config, a cache or statistics shared by two calls, a capture that reads
another thread's pass, modes and gradients changed on the way.
"""

from __future__ import annotations

import importlib
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache, GenerationConfig
from transformers.generation import GenerationMixin
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

from dspark import DSparkDrafter, SpeculationConfig
from dspark.compat import cache_name
from dspark.decoding import generate as doors
from tests.decoding.pair import distinct, hostile, new_target, oracle, plain, prompt, target
from tests.decoding.words import tokenizer
from tests.scripted import drafter_config

PROMPT = 6
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")


def snapshot(model: Any) -> dict[str, Any]:
    """Everything a call could change on a model, by value where it is small and by identity where it is not."""
    state: dict[str, Any] = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key in ("last_stats", "schedule", "_parameters", "_buffers", "_modules"):
                continue
            state[f"{name}.{key}"] = dict(value) if isinstance(value, dict) else value
        state[f"{name}.hooks"] = [len(getattr(module, hooks)) for hooks in _HOOKS]
        for kind in ("_parameters", "_buffers"):
            for key, tensor in getattr(module, kind).items():
                if tensor is not None:
                    state[f"{name}.{key}"] = (id(tensor), tensor.requires_grad, tensor.sum().item(), id(tensor.grad))
    state["config"] = model.config.to_dict()
    state["speculation"] = getattr(model, "speculation", None)
    options = getattr(model, "generation_config", None)
    state["generation_config"] = None if options is None else options.to_dict()
    return state


def files(model: Any, folder: Path) -> dict[str, bytes]:
    model.save_pretrained(folder)
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def real_drafter(model: Any = None) -> DSparkDrafter:
    """An untrained drafter: nothing is scripted, so two calls may share it."""
    torch.manual_seed(3)
    return DSparkDrafter(drafter_config(target() if model is None else model)).eval()


class BrokenProcessor(LogitsProcessor):
    """Fails at one length."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] == PROMPT + 6:
            raise RuntimeError("broken on purpose")
        return scores


class BrokenCriterion(StoppingCriteria):
    """Fails at one length."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        BrokenProcessor()(input_ids, input_ids)
        return torch.zeros(1, dtype=torch.bool)


def fail_in_forward(module: nn.Module, after: int) -> Any:
    calls = iter(range(after))

    def hook(*_: Any) -> None:
        if next(calls, None) is None:
            raise RuntimeError("broken on purpose")

    return module.register_forward_pre_hook(hook)


CALLS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "top_k": 20, "temperature": 1.3},
    "settings": {"num_assistant_tokens": 3, "assistant_confidence_threshold": 0.5, "survival_threshold": 0.1},
    "all outputs": {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "output_hidden_states": True,
    },
    "stop strings": {"stop_strings": ["lkjihgfedcba"], "tokenizer": tokenizer()},
    "processors": {"repetition_penalty": 1.2, "guidance_scale": 1.5},
}


PLAIN = {name: {} if name == "settings" else call for name, call in CALLS.items()}


@pytest.mark.parametrize("name", CALLS)
def test_models_are_unchanged_after_a_call(name: str) -> None:
    ids, _ = distinct()
    model, drafter = target(), oracle()
    # The first call for hidden states installs hooks of transformers' own that stay for good.
    model.generate(ids, max_new_tokens=2, **PLAIN[name])
    before = snapshot(model), snapshot(drafter)
    model.generate(ids, max_new_tokens=20, assistant_model=drafter, **CALLS[name])
    assert (snapshot(model), snapshot(drafter)) == before
    assert drafter.last_stats is not None


@pytest.mark.parametrize("where", ["criterion", "processor", "target", "target's prompt pass", "drafter", "streamer"])
def test_models_are_unchanged_after_an_error(where: str) -> None:
    ids, text = distinct()
    model, drafter = target(), oracle()
    before = snapshot(model), snapshot(drafter)
    call: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "assistant_model": drafter}
    handle = None
    if where == "criterion":
        call["stopping_criteria"] = [BrokenCriterion()]
    elif where == "processor":
        call["logits_processor"] = [BrokenProcessor()]
    elif where == "streamer":
        call["streamer"] = type("Closed", (), {"put": fail_after(4), "end": lambda self: None})()
    else:
        module = drafter.layers[1] if where == "drafter" else model.model.layers[2]
        handle = fail_in_forward(module, 0 if "prompt" in where else 2)
    with pytest.raises(RuntimeError, match="broken on purpose"):
        model.generate(ids, **call)
    if handle is not None:
        handle.remove()
    assert (snapshot(model), snapshot(drafter)) == before
    assert plain(model, ids, max_new_tokens=20)[0].tolist() == text[: PROMPT + 20]
    assert plain(model, ids, max_new_tokens=20, assistant_model=drafter)[0].tolist() == text[: PROMPT + 20]


def fail_after(count: int) -> Any:
    calls = iter(range(count))

    def put(self: Any, value: torch.Tensor) -> None:
        if next(calls, None) is None:
            raise RuntimeError("broken on purpose")

    return put


def test_saved_files_are_the_same_bytes(tmp_path: Path) -> None:
    ids, _ = distinct()
    model, drafter = new_target(), oracle()
    before = files(model, tmp_path / "a"), files(drafter, tmp_path / "b")
    assert set(before[1]) >= {"config.json", "model.safetensors"}
    for call in CALLS.values():
        model.generate(ids, max_new_tokens=12, assistant_model=drafter, **call)
    with pytest.raises(RuntimeError, match="on purpose"):
        plain(model, ids, max_new_tokens=12, assistant_model=drafter, stopping_criteria=[BrokenCriterion()])
    assert (files(model, tmp_path / "c"), files(drafter, tmp_path / "d")) == before


def test_the_callers_objects_are_unchanged() -> None:
    ids, _ = distinct()
    config = GenerationConfig(
        max_new_tokens=12, num_assistant_tokens=4, assistant_confidence_threshold=0.2, stop_strings=["lkjihgfedcba"],
        eos_token_id=[5, 6],
    )  # fmt: skip
    criteria = StoppingCriteriaList([type("Never", (StoppingCriteria,), {"__call__": lambda s, i, c: False})()])
    processors = LogitsProcessorList([type("Same", (LogitsProcessor,), {"__call__": lambda s, i, c: c})()])
    inputs = {"input_ids": ids.clone(), "attention_mask": torch.ones_like(ids)}
    settings = SpeculationConfig(num_assistant_tokens=5)
    before = config.to_dict(), list(criteria), list(processors), vars(settings).copy()
    target().generate(
        **inputs, generation_config=config, stopping_criteria=criteria, logits_processor=processors,
        speculation=settings, tokenizer=tokenizer(), assistant_model=oracle(),
    )  # fmt: skip
    assert (config.to_dict(), list(criteria), list(processors), vars(settings)) == before
    assert torch.equal(inputs["input_ids"], ids)
    assert bool(inputs["attention_mask"].all())
    assert set(inputs) == {"input_ids", "attention_mask"}


def test_a_callers_cache_is_left_as_plain_decoding_leaves_it() -> None:
    ids, text = distinct()
    lengths = []
    for drafter in (None, oracle(), hostile()):
        cache = DynamicCache(config=target().config)
        plain(target(), ids, max_new_tokens=12, assistant_model=drafter, **{cache_name(target()): cache})
        lengths.append(cache.get_seq_length())
        assert not any(getattr(layer, "record_past", False) for layer in cache.layers)
        longer = torch.tensor([text[: PROMPT + 12]])
        out = plain(target(), longer, max_new_tokens=12, **{cache_name(target()): cache})
        assert out[0].tolist() == text[: PROMPT + 24]
    assert lengths == [PROMPT + 11] * 3


# --- threads ---------------------------------------------------------------------------------------------------------


def run_threads(*bodies: Any) -> list[Any]:
    results: list[Any] = [None] * len(bodies)
    barrier = threading.Barrier(len(bodies))

    def body(i: int) -> None:
        barrier.wait()
        try:
            results[i] = bodies[i]()
        except BaseException as error:  # noqa: BLE001 - handed to the test
            results[i] = error

    threads = [threading.Thread(target=body, args=(i,)) for i in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("sharing", ["two drafters", "one drafter", "one call without"])
def test_two_threads_on_one_target_give_their_own_results(sharing: str) -> None:
    prompts, counts = [prompt(5, seed=31), prompt(9, seed=32)], [40, 31]
    outputs_of = {"return_dict_in_generate": True, "output_hidden_states": True}
    texts = [
        plain(target(), ids, max_new_tokens=n, **outputs_of).sequences
        for ids, n in zip(prompts, counts, strict=True)
    ]  # fmt: skip
    if sharing == "one drafter":
        drafters: list[Any] = [real_drafter()] * 2
    else:
        drafters = [oracle(text=text[0].tolist()) for text in texts]
        drafters[1] = None if sharing == "one call without" else drafters[1]

    def call(i: int) -> Any:
        return lambda: [
            plain(
                target(), prompts[i], max_new_tokens=counts[i], assistant_model=drafters[i], **outputs_of
            )
            for _ in range(3)
        ]  # fmt: skip

    before = snapshot(target())
    for i, outputs in enumerate(run_threads(call(0), call(1))):
        assert isinstance(outputs, list), outputs
        for out in outputs:
            assert torch.equal(out.sequences, texts[i])
            if drafters[i] is not None:
                stats = out.speculation
                assert stats.num_new_tokens == counts[i]
                assert sum(stats.accepted) + stats.num_rounds + 1 == counts[i]
        speculations = [getattr(out, "speculation", None) for out in outputs]
        assert drafters[i] is None or len({id(stats) for stats in speculations}) == 3
    assert snapshot(target()) == before


# --- modes -----------------------------------------------------------------------------------------------------------


def test_inference_mode_and_no_grad() -> None:
    ids, text = distinct()
    for drafter in (oracle(), real_drafter()):
        with torch.inference_mode():
            out = plain(target(), ids, max_new_tokens=30, assistant_model=drafter)
            sampled = target().generate(ids, do_sample=True, max_new_tokens=10, assistant_model=drafter)
            assert sampled.shape == (1, PROMPT + 10)
        assert out[0].tolist() == text[: PROMPT + 30]
        with torch.no_grad():
            assert plain(target(), ids, max_new_tokens=9, assistant_model=drafter)[0].tolist() == text[: PROMPT + 9]
        # Nothing made under inference mode may have stayed behind.
        assert plain(target(), ids, max_new_tokens=30, assistant_model=drafter)[0].tolist() == text[: PROMPT + 30]
    assert torch.is_grad_enabled()


def test_modes_and_gradients_are_untouched() -> None:
    ids, text = distinct()
    model = new_target().train()
    drafter = real_drafter(model).train()
    drafter.confidence_head.eval()
    for parameter in [*model.parameters(), *drafter.parameters()]:
        parameter.grad = torch.ones_like(parameter)
    before = snapshot(model), snapshot(drafter)
    out = model.generate(
        ids, max_new_tokens=12, assistant_model=drafter, return_dict_in_generate=True, output_logits=True
    )
    assert out.sequences[0].tolist() == text[: PROMPT + 12]
    assert not any(logits.requires_grad for logits in out.logits)
    assert (snapshot(model), snapshot(drafter)) == before
    assert model.training
    assert drafter.training
    assert not drafter.confidence_head.training
    grads = [parameter.grad for parameter in [*model.parameters(), *drafter.parameters()]]
    assert all(bool((grad == 1).all()) for grad in grads)


# --- the wrapper itself ----------------------------------------------------------------------------------------------


def test_installing_again_wraps_once() -> None:
    wrapped = GenerationMixin.generate
    doors.install()
    assert GenerationMixin.generate is wrapped
    importlib.import_module("dspark")
    assert GenerationMixin.generate is wrapped
    assert not hasattr(getattr(wrapped, doors._MARK), doors._MARK)


def test_plain_calls_stay_plain_after_drafting(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, text = distinct()
    plain(target(), ids, max_new_tokens=12, assistant_model=oracle())

    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the loop ran in a plain call")

    monkeypatch.setattr(doors, "decode_with", never)
    assert plain(target(), ids, max_new_tokens=30)[0].tolist() == text[: PROMPT + 30]
    assert target().generate(ids, num_beams=2, max_new_tokens=5).shape == (1, PROMPT + 5)
    assert plain(target(), ids, max_new_tokens=9, prompt_lookup_num_tokens=2)[0].tolist() == text[: PROMPT + 9]
