"""The forms of a batch's target pass: equal to each other and to single rows, and as cheap as they say.

Catches masks that do not reach a layer, windows told by slots, indices that mix rows up, attention that stays switched
after a pass or switches another thread's, padding that reaches the linear layers, fallbacks that nobody hears of.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.models.qwen3 import modeling_qwen3

from dspark.decoding import ragged_batch
from dspark.decoding.inputs import select_rows
from dspark.decoding.ragged_attention import attends_by_interface
from dspark.decoding.ragged_batch import RaggedBatch
from tests import zoo
from tests.decoding.equality import left_padded, plain
from tests.decoding.test_batches import LENGTHS, PROMPTS, THRESHOLD, WRONG, RowOracle, texts_of
from tests.scripted import CYCLE, Hostile

FAMILIES = [row.target for row in zoo.SUPPORT if row.cells["batch"].verdict == zoo.EXACT]
ALIGNED = [name for name in FAMILIES if "ALiBi" in name]
FORMS = ("flattened", "padded", "aligned")
SCHEDULES = [CYCLE[b:] + CYCLE[:b] for b in range(len(PROMPTS))]


@contextmanager
def passes(form: str | None = None) -> Iterator[list[tuple[str, list[int], int]]]:
    """Form, block lengths and tokens of every pass of a batch; with `form`, all passes are made to have it."""
    seen: list[tuple[str, list[int], int]] = []
    run_pass = RaggedBatch._pass

    def spy(self: RaggedBatch, blocks: list[list[int]], chosen: Any, run: Any) -> Any:
        def counted(inputs: dict[str, Any]) -> Any:
            seen.append((form or chosen, [len(block) for block in blocks], inputs["input_ids"].numel()))
            return run(inputs)

        return run_pass(self, blocks, form or chosen, counted)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RaggedBatch, "_pass", spy)
        yield seen


def need(name: str) -> PreTrainedModel:
    if reason := zoo.TARGETS[name].absent:
        pytest.skip(reason)
    return zoo.target(name)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_form_gives_the_same_logits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every pass of a run, on the same cache: a pass only writes slots behind what is kept."""
    model = need(name)
    forms = ("aligned",) if name in ALIGNED else FORMS
    run_pass, compared = RaggedBatch._pass, []

    def all_forms(self: RaggedBatch, blocks: list[list[int]], _form: str, run: Any) -> Any:
        results = [run_pass(self, blocks, form, run) for form in forms]
        for _, logits, states in results[1:]:
            for b, block in enumerate(blocks):
                for mine, other in ((logits, results[0][1]), (states, results[0][2])):
                    compared.append(float((mine - other)[b, : len(block)].norm() / other[b, : len(block)].norm()))
        return results[0]

    monkeypatch.setattr(RaggedBatch, "_pass", all_forms)
    texts = texts_of(model)
    found = plain(
        model, 30, assistant_model=RowOracle(model, texts, SCHEDULES), speculation=THRESHOLD, **left_padded(*PROMPTS)
    )
    assert [row[-length - 30 :] for row, length in zip(found.tolist(), LENGTHS, strict=True)] == [
        text[: length + 30] for text, length in zip(texts, LENGTHS, strict=True)
    ]
    assert name in ALIGNED or max(compared) < 1e-4


@pytest.mark.parametrize("form", ["flattened", "padded", "aligned"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["Qwen3", "Mistral"])
def test_each_form_alone_is_exact(name: str, attention: str, form: str) -> None:
    model = zoo.target(name, attention)
    texts = texts_of(model)
    with passes(form) as seen:
        found = plain(model, 48, assistant_model=RowOracle(model, texts, WRONG), **left_padded(*PROMPTS))
    assert [row[-len(text) :] for row, text in zip(found.tolist(), texts, strict=True)] == texts
    assert {chosen for chosen, _, _ in seen} == {form}


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_a_pass_costs_what_is_scheduled(name: str) -> None:
    """Tokens that reach the first linear layer: the rows' own, or at most a tenth more; finished rows bring none."""
    model = zoo.target(name)
    texts = texts_of(model)
    call = left_padded(*PROMPTS)
    stops = [text[length + at] for text, length, at in zip(texts, LENGTHS, (2, 13, 7, 30), strict=True)]
    call.update(eos_token_id=stops, pad_token_id=0)
    worked: list[int] = []
    first = model.model.layers[0].self_attn.q_proj
    handle = first.register_forward_hook(lambda _, args, output: worked.append(output[..., 0].numel()))
    oracle = RowOracle(model, texts, SCHEDULES)
    try:
        with passes() as seen:
            plain(model, 48, assistant_model=oracle, speculation=THRESHOLD, **call)
    finally:
        handle.remove()
    scheduled = [sum(counts) for _, counts, _ in seen]
    assert worked[1:] == [tokens for _, _, tokens in seen]
    assert all(work <= 1.12 * need for work, need in zip(worked[1:], scheduled, strict=True))
    assert sum(worked[1:]) <= 1.1 * sum(scheduled)
    assert "flattened" in {form for form, _, _ in seen}
    live = [len(counts) for _, counts, _ in seen]
    assert live == sorted(live, reverse=True)
    assert live[-1] < 4
    stats = oracle.last_stats
    assert sum(scheduled) >= sum(stats.verified) + stats.num_rounds


# --- nothing is left behind ---------------------------------------------------------------------------------------


class Boom(RuntimeError):
    pass


def test_an_exception_inside_a_pass_leaves_nothing() -> None:
    model = zoo.target("Qwen3")
    lookup, config = AttentionInterface.get_interface, model.config.to_dict()
    call = left_padded(*PROMPTS)
    expected = plain(model, 20, **call)
    inside = []

    def fail(*_: Any) -> None:
        if AttentionInterface.get_interface is not lookup:
            inside.append(True)
            raise Boom

    handle = model.model.layers[2].register_forward_pre_hook(fail)
    try:
        with pytest.raises(Boom):
            plain(model, 20, assistant_model=Hostile(model), **call)
    finally:
        handle.remove()
    assert inside
    assert AttentionInterface.get_interface is lookup
    assert model.config.to_dict() == config
    assert plain(model, 20, **call).tolist() == expected.tolist()
    assert plain(model, 20, assistant_model=Hostile(model), **call).tolist() == expected.tolist()


def test_other_threads_keep_their_attention() -> None:
    """A plain pass of the same model from another thread, in the middle of a ragged pass; and two batches at once."""
    model = zoo.target("Qwen3")
    lookup = AttentionInterface.get_interface
    call, texts = left_padded(*PROMPTS), texts_of(model)
    with torch.no_grad():
        expected = model(PROMPTS[2]).logits
    found = []

    def elsewhere() -> None:
        with torch.no_grad():
            found.append(model(PROMPTS[2]).logits)

    def hook(*_: Any) -> None:
        if threading.current_thread() is threading.main_thread() and len(found) < 3:
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()

    handle = model.model.layers[1].register_forward_pre_hook(hook)
    try:
        plain(model, 20, assistant_model=RowOracle(model, texts, WRONG), **call)
    finally:
        handle.remove()
    assert all(torch.equal(one, expected) for one in found)
    results: list[list[list[int]]] = []
    threads = [
        threading.Thread(
            target=lambda: results.append(
                plain(model, 48, assistant_model=RowOracle(model, texts, WRONG), **call).tolist()
            )
        )
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 3
    assert all([row[-len(text) :] for row, text in zip(rows, texts, strict=True)] == texts for rows in results)
    assert AttentionInterface.get_interface is lookup


# --- targets that cannot be reached -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_who_attends_through_the_interface(name: str) -> None:
    assert attends_by_interface(need(name)) is (name not in ALIGNED)


def test_compiled_layers_keep_their_own_attention() -> None:
    model = zoo.new_target("Qwen3")
    model.model.layers[1].self_attn.compile(backend="eager")
    assert not attends_by_interface(model)
    model = zoo.new_target("Qwen3")
    model.forward = torch.compile(model.forward, backend="eager")
    assert not attends_by_interface(model)


def test_a_layer_that_makes_its_own_mask_is_heard_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found out in the first pass, which is then made again; the text stays exact."""
    forward = modeling_qwen3.Qwen3Attention.forward

    def own_mask(
        self: Any, hidden_states: Any, position_embeddings: Any, attention_mask: Any, *args: Any, **kwargs: Any
    ):
        mask = None if attention_mask is None else attention_mask.expand(-1, 4, -1, -1)  # per head
        return forward(self, hidden_states, position_embeddings, mask, *args, **kwargs)

    monkeypatch.setattr(modeling_qwen3.Qwen3Attention, "forward", own_mask)
    model = zoo.target("Qwen3")
    oracle = RowOracle(model, texts_of(model), WRONG)
    with passes() as seen:
        found = plain(model, 48, assistant_model=oracle, **left_padded(*PROMPTS))
    assert [row[-len(text) :] for row, text in zip(found.tolist(), texts_of(model), strict=True)] == texts_of(model)
    assert [form for form, _, _ in seen[:2]] == ["padded", "aligned"]
    assert {form for form, _, _ in seen[1:]} == {"aligned"}
    assert "a mask of its own" in oracle.last_stats.fallback_reason
    assert "copied" in oracle.last_stats.fallback_reason


def test_chunked_attention_is_exact() -> None:
    fields = {
        "head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 2, "num_experts_per_tok": 1,
        "attention_chunk_size": zoo.WINDOW, "layer_types": ["chunked_attention", "full_attention"] * 2,
        "no_rope_layers": [1, 0, 1, 0], "moe_layers": [1],
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(zoo.TARGETS, "Llama 4", zoo.Target("Llama4ForCausalLM", fields, scale=8.0))
        model = zoo.new_target("Llama 4")
    texts = texts_of(model)
    with passes() as seen:
        found = plain(model, 48, assistant_model=RowOracle(model, texts, WRONG), **left_padded(*PROMPTS))
    assert [row[-len(text) :] for row, text in zip(found.tolist(), texts, strict=True)] == texts
    assert {form for form, _, _ in seen} == {"aligned"}


# --- prompts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_masked_tokens_inside_a_prompt(name: str, form: str) -> None:
    model = zoo.target(name)
    call = left_padded(*PROMPTS)
    call["attention_mask"][1, -4:-2] = 0
    call["attention_mask"][3, 5] = 0
    expected = plain(model, 24, **call)
    with passes(form):
        assert plain(model, 24, assistant_model=Hostile(model), **call).tolist() == expected.tolist()


def test_the_rule_is_asked_once_per_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []
    monkeypatch.setattr(ragged_batch, "saves_by_flattening", lambda counts: bool(asked.append(list(counts))))
    model = zoo.target("Llama")
    with passes() as seen:
        plain(model, 9, assistant_model=Hostile(model), **left_padded(*PROMPTS))
    assert [counts for _, counts, _ in seen] == asked


def test_token_types_follow_their_rows() -> None:
    kwargs = {"token_type_ids": torch.tensor([[0, 1], [0, 2], [0, 3]]), "mm_token_type_ids": None, "other": 5}
    select_rows(kwargs, [0, 2])
    assert kwargs["token_type_ids"].tolist() == [[0, 1], [0, 3]]
    assert kwargs["mm_token_type_ids"] is None
    assert kwargs["other"] == 5
