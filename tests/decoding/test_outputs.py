"""What a call returns is what plain decoding returns, and every door leads to the same loop.

Catches: a score or state too many behind a stop, attentions cut at the wrong key, a cache that cannot go on, a door
that loses an argument, an option swallowed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig, Qwen3ForCausalLM, pipeline
from transformers.generation import GenerateDecoderOnlyOutput

from dspark import DSparkDrafter, DSparkGenerationMixin, SpeculationConfig, SpeculationStats
from dspark.compat import cache_name, output_cache_field
from tests import zoo
from tests.decoding.pair import distinct, hostile, new_target, oracle, plain, prompt, target
from tests.decoding.words import tokenizer
from tests.scripted import CYCLE, Oracle, drafter_config

PROMPT = 6
COUNT = 21
ALL = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
    "output_attentions": True,
}
WINDOWS = [None, 8, 13]


def text_of(window: int | None) -> tuple[torch.Tensor, list[int]]:
    model = target("eager", sliding_window=window)
    ids = prompt(PROMPT, seed=8)
    return ids, plain(model, ids, max_new_tokens=40)[0].tolist()


def assert_same(ours: Any, theirs: Any, tolerance: float, path: str) -> None:
    """Equal lengths, shapes and values through nested tuples of tensors."""
    if isinstance(theirs, torch.Tensor):
        assert ours.shape == theirs.shape, (path, ours.shape, theirs.shape)
        close = {"atol": tolerance, "rtol": tolerance}
        torch.testing.assert_close(ours, theirs, **close, msg=lambda text: f"{path}: {text}")
        return
    assert len(ours) == len(theirs), (path, len(ours), len(theirs))
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert_same(a, b, tolerance, f"{path}[{i}]")


def assert_outputs_match(ours: Any, theirs: Any, tolerance: float = 1e-5) -> None:
    assert torch.equal(ours.sequences, theirs.sequences)
    for name in ("scores", "logits", "hidden_states", "attentions"):
        if getattr(theirs, name) is None:
            assert getattr(ours, name) is None
        else:
            assert_same(getattr(ours, name), getattr(theirs, name), tolerance, name)


@pytest.mark.parametrize("window", WINDOWS, ids=["full", "window 8", "window 13"])
@pytest.mark.parametrize("script", [(None,), (4,), CYCLE], ids=str)
@pytest.mark.parametrize("extra", [{}, {"repetition_penalty": 1.3, "suppress_tokens": [5]}], ids=["bare", "processed"])
def test_all_outputs_equal_those_of_plain_decoding(window: int | None, script: Any, extra: dict[str, Any]) -> None:
    model = target("eager", sliding_window=window)
    ids, _ = text_of(window)
    theirs = plain(model, ids, max_new_tokens=COUNT, **ALL, **extra)
    drafter = oracle(script, text=theirs.sequences[0].tolist(), model=model)
    ours = plain(model, ids, max_new_tokens=COUNT, assistant_model=drafter, **ALL, **extra)
    assert_outputs_match(ours, theirs)
    assert len(ours.scores) == COUNT


@pytest.mark.parametrize("place", [0, 1, 3, 6, 7, 8, 9])
@pytest.mark.parametrize("window", WINDOWS, ids=["full", "window 8", "window 13"])
def test_a_stop_cuts_outputs_and_cache_at_its_token(place: int, window: int | None) -> None:
    model = target("eager", sliding_window=window)
    ids, text = text_of(window)

    def stop(input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> bool:
        return input_ids.shape[1] == PROMPT + place + 1

    theirs = plain(model, ids, max_new_tokens=40, stopping_criteria=[stop], **ALL)
    drafter = oracle((None,), text=text, model=model)
    ours = plain(model, ids, max_new_tokens=40, stopping_criteria=[stop], assistant_model=drafter, **ALL)
    assert_outputs_match(ours, theirs)
    assert len(ours.scores) == place + 1
    assert cache_of(ours).get_seq_length() == cache_of(theirs).get_seq_length() == PROMPT + place


def cache_of(output: Any) -> Any:
    return getattr(output, output_cache_field())


@pytest.mark.parametrize("window", WINDOWS, ids=["full", "window 8", "window 13"])
@pytest.mark.parametrize("count", [1, 2, 8, 9, 12])
def test_the_returned_cache_goes_on(window: int | None, count: int) -> None:
    model = target(sliding_window=window)
    ids, text = text_of(window)
    for drafter in (oracle(text=text, model=model), hostile(model=model)):
        out = plain(model, ids, max_new_tokens=count, assistant_model=drafter, return_dict_in_generate=True)
        assert out.past_key_values is cache_of(out)
        mask = torch.ones(1, PROMPT + count, dtype=torch.long)
        more = {cache_name(model): cache_of(out), "attention_mask": mask, "max_new_tokens": 9}
        assert plain(model, out.sequences, **more)[0].tolist() == text[: PROMPT + count + 9]


# Mixed windows, shared keys, recurrent layers without weights, and a static cache whose weights have one width.
@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("Gemma 3", {}),
        ("Gemma 4 (shared keys)", {}),
        ("Qwen3-Next", {}),
        ("Qwen3", {"cache_implementation": "static"}),
    ],
)
def test_outputs_of_other_targets(name: str, extra: dict[str, Any]) -> None:
    model, inputs = zoo.new_target(name, "eager"), zoo.inputs(name, 5)
    call = {"do_sample": False, "max_new_tokens": COUNT, **ALL, **extra}
    theirs = model.generate(**inputs, **call)
    drafter = Oracle(model, [theirs.sequences[0].tolist()], wrong=CYCLE).eval()
    # Their activations are up to a hundred times larger.
    assert_outputs_match(model.generate(**inputs, assistant_model=drafter, **call), theirs, tolerance=5e-4)


def test_hidden_states_of_a_target_without_attention() -> None:
    model, inputs = zoo.new_target("Mamba 2"), zoo.inputs("Mamba 2", 5)
    call = {"do_sample": False, "max_new_tokens": COUNT, **ALL, "output_attentions": False}
    theirs = model.generate(**inputs, **call)
    drafter = Oracle(model, [theirs.sequences[0].tolist()], wrong=CYCLE).eval()
    assert_outputs_match(model.generate(**inputs, assistant_model=drafter, **call), theirs, tolerance=5e-4)


@pytest.mark.parametrize("wanted", ["output_scores", "output_logits", "output_hidden_states", "output_attentions"])
def test_each_output_alone(wanted: str) -> None:
    model = target("eager")
    ids, text = text_of(None)
    call = {"max_new_tokens": 12, "return_dict_in_generate": True, wanted: True}
    theirs = plain(model, ids, **call)
    assert_outputs_match(plain(model, ids, assistant_model=oracle(text=text, model=model), **call), theirs)


def test_outputs_do_not_keep_rejected_slots_alive() -> None:
    ids, _ = distinct()
    model = target("eager")
    out = plain(model, ids, max_new_tokens=COUNT, assistant_model=hostile(model=model), **ALL)
    states = [*out.scores, *out.logits, *(s for step in out.hidden_states[1:] + out.attentions[1:] for s in step)]
    assert all(state.untyped_storage().nbytes() == state.nbytes for state in states)


def test_outputs_are_not_kept_unless_a_dict_is_wanted() -> None:
    ids, text = distinct()
    out = plain(target(), ids, max_new_tokens=12, output_scores=True, assistant_model=oracle())
    assert isinstance(out, torch.Tensor)
    assert out[0].tolist() == text[: PROMPT + 12]


def test_raw_logits_with_a_processor_that_writes_in_place() -> None:
    def shift(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.add_(torch.arange(scores.shape[1]) * 0.01)

    ids, _ = distinct()
    call = {"max_new_tokens": 12, "logits_processor": [shift], **ALL, "output_attentions": False}
    theirs = plain(target(), ids, **call)
    for drafter in (oracle(text=theirs.sequences[0].tolist()), hostile()):
        assert_outputs_match(plain(target(), ids, assistant_model=drafter, **call), theirs)


def test_the_output_is_transformers_own_class_with_statistics() -> None:
    ids, _ = distinct()
    drafter = oracle()
    out = plain(target(), ids, max_new_tokens=12, assistant_model=drafter, return_dict_in_generate=True)
    assert isinstance(out, GenerateDecoderOnlyOutput)
    assert isinstance(out.speculation, SpeculationStats)
    assert out.speculation is drafter.last_stats
    assert set(out.keys()) == {"sequences", output_cache_field(), "speculation"}
    assert out["sequences"] is out.sequences is out[0]


def test_sampled_outputs_are_consistent() -> None:
    ids, _ = distinct()
    out = target("eager").generate(
        ids, do_sample=True, top_k=12, max_new_tokens=12, assistant_model=oracle(model=target("eager")), **ALL
    )
    new = out.sequences[0, PROMPT:]
    assert len(out.scores) == len(out.logits) == len(out.hidden_states) == len(out.attentions) == len(new) == 12
    for token, scores in zip(new, out.scores, strict=True):
        assert torch.isfinite(scores[0, token])
        assert int(torch.isfinite(scores).sum()) == 12
    transition = target("eager").compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
    assert transition.shape == (1, 12)


def test_outputs_of_several_rows_are_refused_before_anything_runs() -> None:
    batch = torch.cat([prompt(seed=1), prompt(seed=2)])
    drafter = hostile()
    call = {"return_dict_in_generate": True, "max_new_tokens": 4}
    for name in ("output_scores", "output_logits", "output_hidden_states", "output_attentions"):
        with pytest.raises(ValueError, match="single row"):
            plain(target(), batch, assistant_model=drafter, **call, **{name: True})
    out = plain(target(), batch, assistant_model=drafter, **call)
    assert torch.equal(out.sequences, plain(target(), batch, max_new_tokens=4))
    assert out.speculation.num_rows == 2


# --- doors -----------------------------------------------------------------------------------------------------------


class Composed(DSparkGenerationMixin, Qwen3ForCausalLM):
    """A model class composed by a user."""


def composed() -> Composed:
    model = Composed._from_config(target().config, attn_implementation="sdpa").eval()
    model.load_state_dict(target().state_dict())
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model


@pytest.mark.parametrize("door", ["assistant_model", "positional", "custom_generate", "wrapped", "mixin"])
def test_every_door_gives_the_same_text_and_statistics(door: str) -> None:
    ids, text = distinct()
    drafter = oracle()
    drafter.speculation = SpeculationConfig(num_assistant_tokens=5)
    call: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True}
    if door == "assistant_model":
        out = target().generate(ids, assistant_model=drafter, **call)
    elif door == "positional":
        out = target().generate(ids, GenerationConfig(**call), None, None, None, None, drafter)
    elif door == "custom_generate":
        out = target().generate(ids, custom_generate=drafter.decode, **call)
    elif door == "wrapped":
        out = target().generate(ids, custom_generate=lambda *args, **kwargs: drafter.decode(*args, **kwargs), **call)
    else:
        model = composed()
        model.drafter = drafter
        out = model.generate(ids, **call)
    assert out.sequences[0].tolist() == text[: PROMPT + 20]
    assert out.speculation.num_rounds < 12
    assert max(out.speculation.verified) == 5
    assert out.speculation is drafter.last_stats


def test_the_decode_door_takes_every_argument() -> None:
    ids, text = distinct()
    string = tokenizer().decode(text[PROMPT + 9 : PROMPT + 10])
    drafter = oracle((None,))
    out = plain(
        target(), ids, custom_generate=drafter.decode, num_assistant_tokens=2, stop_strings=string,
        tokenizer=tokenizer(), max_new_tokens=20,
    )  # fmt: skip
    assert out[0].tolist() == text[: PROMPT + 10]
    assert max(drafter.last_stats.verified) == 2


def test_a_composed_model_holds_its_drafter_beside_its_weights() -> None:
    ids, text = distinct()
    model = composed()
    plain(model, ids, max_new_tokens=5)
    model.drafter = drafter = oracle()
    assert not any("drafter" in name for name in model.state_dict())
    other = hostile()
    assert plain(model, ids, max_new_tokens=9, assistant_model=other)[0].tolist() == text[: PROMPT + 9]
    assert other.last_stats is not None
    assert drafter.last_stats is None
    model.drafter = None
    assert plain(model, ids, max_new_tokens=9)[0].tolist() == text[: PROMPT + 9]
    assert drafter.last_stats is None


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("ids_agree", [True, False])
def test_the_text_generation_pipeline_takes_a_drafter(sampled: bool, ids_agree: bool) -> None:
    ids, _ = distinct()
    words = tokenizer()
    start = words.decode(ids[0])
    encoded = words(start, return_tensors="pt").input_ids
    expected = plain(target(), encoded, max_new_tokens=12)[0].tolist()
    # transformers compares special tokens of both configs and asks for a tokenizer where they differ.
    special = {"pad_token_id": 0} if ids_agree else {}
    drafter = Oracle(target(), [expected], **special).eval()
    extra = {} if ids_agree else {"assistant_tokenizer": words}
    pipe = pipeline("text-generation", model=target(), tokenizer=words, assistant_model=drafter, **extra)
    result = pipe(start, max_new_tokens=12, do_sample=sampled)[0]["generated_text"]
    assert drafter.last_stats.num_new_tokens == 12
    assert sampled or result == words.decode(expected)


@pytest.mark.parametrize("positional", [True, False])
def test_a_generation_config_is_read_in_either_place(positional: bool) -> None:
    ids, text = distinct()
    config = GenerationConfig(max_new_tokens=9, num_assistant_tokens=3)
    drafter = oracle((None,))
    args, kwargs = ((ids, config), {}) if positional else ((ids,), {"generation_config": config})
    assert target().generate(*args, **kwargs, assistant_model=drafter)[0].tolist() == text[: PROMPT + 9]
    assert drafter.last_stats.verified == [3, 3]


def test_inputs_by_keyword_and_as_a_dict() -> None:
    ids, text = distinct()
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    assert plain_call(**inputs, assistant_model=oracle()) == text[: PROMPT + 20]
    assert plain_call(inputs=ids, assistant_model=oracle()) == text[: PROMPT + 20]


def plain_call(**kwargs: Any) -> list[int]:
    return target().generate(**kwargs, do_sample=False, max_new_tokens=20)[0].tolist()


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["num_asistant_tokens", "survival", "foo"])
def test_unknown_arguments_are_refused_as_ever(name: str) -> None:
    ids, _ = distinct()
    for drafter in (None, oracle()):
        with pytest.raises(ValueError, match=f"not used by the model.*{name}"):
            plain(target(), ids, max_new_tokens=5, assistant_model=drafter, **{name: 3})


def test_malformed_calls_stay_type_errors() -> None:
    ids, _ = distinct()
    with pytest.raises(TypeError):
        target().generate(ids, *[None] * 20, assistant_model=oracle())
    with pytest.raises(TypeError):
        target().generate(ids, inputs=ids, assistant_model=oracle())


REFUSED = {
    "num_beams": {"num_beams": 2},
    "penalty_alpha": {"penalty_alpha": 0.6, "top_k": 4},
    "dola_layers": {"dola_layers": "high"},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 3},
    "use_mtp": {"use_mtp": True},
    "assistant_early_exit": {"assistant_early_exit": 2},
    "speculation_type": {"speculation_type": "dflash"},
    "assistant_ensemble_weight": {"assistant_ensemble_weight": 0.5},
    "use_cache": {"use_cache": False},
    "synced_gpus": {"synced_gpus": True},
    "cache_implementation": {"cache_implementation": "paged"},
    "token_healing": {"token_healing": True, "tokenizer": tokenizer()},
    "custom_generate": {"custom_generate": lambda *args, **kwargs: None},
}


@pytest.mark.parametrize("option", REFUSED)
def test_options_that_choose_another_loop_are_refused_before_the_prompt(option: str) -> None:
    ids, _ = distinct()
    model = new_target()
    ran = []
    model.model.register_forward_pre_hook(lambda *_: ran.append(1))
    drafter = oracle(model=model)
    with pytest.raises(ValueError, match=option):
        model.generate(ids, max_new_tokens=5, assistant_model=drafter, **REFUSED[option])
    assert not ran
    assert drafter.last_stats is None


def test_two_loops_at_once_are_refused() -> None:
    ids, _ = distinct()
    with pytest.raises(ValueError, match="pass one of them"):
        plain(target(), ids, assistant_model=oracle(), custom_generate=oracle().decode)


def test_a_pair_that_does_not_fit_is_refused_at_every_door() -> None:
    ids, _ = distinct()
    wrong = DSparkDrafter(drafter_config(target(), target_layer_ids=[0, 1], num_target_layers=9))
    for door in ({"assistant_model": wrong}, {"custom_generate": wrong.decode}):
        with pytest.raises(ValueError, match="num_target_layers"):
            plain(target(), ids, max_new_tokens=4, **door)


def test_the_block_size_of_the_drafter_is_not_the_cap() -> None:
    # A block of another size: nothing in the loop may assume seven.
    ids, text = distinct()
    for size in (1, 2, 12):
        drafter = Oracle(target(), [text], block_size=size).eval()
        assert plain(target(), ids, max_new_tokens=20, assistant_model=drafter)[0].tolist() == text[: PROMPT + 20]
        assert drafter.last_stats.accepted[0] == min(size, 19)
