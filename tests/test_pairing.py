"""Pairs that break are refused before the first forward, naming both models; pairs that only draft badly warn once.

Catches: a wrong pair that fails deep inside a round, a right one that is refused, a warning that comes on every call,
and a check that leaves traces on a model or keeps it alive.
"""

from __future__ import annotations

import copy
import gc
import logging
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from dspark import DSparkConfig, DSparkDrafter
from dspark.pairing import Finding, check_pair, draft_vocab_hash, fingerprint, require_pair
from tests.golden import common

_SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def llama(**changes: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**{**_SIZES, **changes})).eval()


def qwen3(**changes: Any) -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**{**_SIZES, **changes})).eval()


def gemma3() -> PreTrainedModel:
    return Gemma3ForCausalLM(Gemma3TextConfig(**_SIZES, sliding_window=8)).eval()


def gpt2() -> PreTrainedModel:
    sizes = {"n_embd": 64, "n_layer": 6, "n_head": 4, "n_positions": 256}
    return GPT2LMHeadModel(GPT2Config(vocab_size=128, **sizes, bos_token_id=1, eos_token_id=2)).eval()


FAMILIES = {"llama": llama, "qwen3": qwen3, "gemma3": gemma3, "gpt2": gpt2}


def drafter(**changes: Any) -> DSparkDrafter:
    fields: dict[str, Any] = {**_SIZES, "num_hidden_layers": 1, "markov_rank": 8, "block_size": 4, "mask_token_id": 3}
    fields.update(target_layer_ids=[0, 2, 4], num_target_layers=6)
    return DSparkDrafter(DSparkConfig(**{**fields, **changes})).eval()


def only(findings: list[Finding]) -> Finding:
    assert len(findings) == 1, findings
    return findings[0]


@pytest.fixture
def logged() -> Iterator[list[str]]:
    messages: list[str] = []

    class _Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler, logger = _Keep(), logging.getLogger("dspark.pairing")
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


def tokenizer(words: str, *, template: str | None = None, start: int = 0) -> PreTrainedTokenizerFast:
    vocabulary = {word: start + i for i, word in enumerate(["<unk>", *words.split()])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", chat_template=template)


# --- errors ----------------------------------------------------------------------------------------------------------

MISFITS = {
    "width": (lambda: llama(hidden_size=32), {}, {"target_hidden_size", "share_embedding", "share_lm_head"}, "32"),
    "layers": (lambda: llama(num_hidden_layers=8), {}, {"num_target_layers"}, "8"),
    "fewer layers": (lambda: llama(num_hidden_layers=5), {}, {"num_target_layers", "target_layer_ids"}, "[0, 2, 4]"),
    "borrowed head": (lambda: llama(vocab_size=120), {}, {"vocab_size"}, "120"),
    "target knows more": (
        lambda: llama(vocab_size=160), {"share_embedding": False, "share_lm_head": False}, {"vocab_size"}, "160",
    ),
    "mask id": (
        lambda: llama(vocab_size=120), {"share_lm_head": False, "mask_token_id": 125}, {"mask_token_id"}, "125",
    ),
    "architecture": (llama, {"target": {"model_type": "qwen3"}}, {"model_type"}, "'qwen3'"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISFITS)
def test_a_pair_that_breaks_is_refused_with_both_names_value_and_way_out(case: str) -> None:
    build, changes, fields, value = MISFITS[case]
    target, draft = build(), drafter(**changes)
    target.config._name_or_path, draft.config._name_or_path = "org/target", "org/drafter"
    errors = [finding for finding in check_pair(target, draft) if finding.severity == "error"]
    assert {error.field for error in errors} == fields
    with pytest.raises(ValueError, match="cannot draft for") as raised:
        require_pair(target, draft)
    message = str(raised.value)
    assert "DSparkDrafter (org/drafter)" in message
    assert "LlamaForCausalLM (org/target)" in message
    assert value in message
    assert all(error.message in message for error in errors)
    assert all("oad the" in error.message or "load a" in error.message for error in errors)


def test_layer_ids_are_judged_by_the_target_not_only_by_the_config() -> None:
    draft = drafter()
    draft.config.target_layer_ids = [0, 2, 5]
    found = only(check_pair(llama(), draft))
    assert (found.severity, found.field) == ("error", "target_layer_ids")
    assert "-1..4" in found.message
    assert "final norm" in found.message


def test_an_encoder_decoder_target_is_refused_alone() -> None:
    target = T5ForConditionalGeneration(T5Config(vocab_size=128, d_model=64, d_ff=64, num_layers=2, num_heads=4))
    found = only(check_pair(target, drafter()))
    assert (found.severity, found.field) == ("error", "is_encoder_decoder")
    assert "causal LM" in found.message


def test_weights_on_the_meta_device_are_an_error_on_either_side() -> None:
    with torch.device("meta"):
        empty_target, empty_draft = llama(), drafter()
    for target, draft, who in (
        (empty_target, drafter(), "The weights of the target"),
        (llama(), empty_draft, "The weights of the drafter"),
    ):
        found = only(check_pair(target, draft))
        assert (found.severity, found.field) == ("error", "device")
        assert found.message.startswith(who)
    assert "target and the drafter" in only(check_pair(empty_target, empty_draft)).message


def test_offloaded_weights_are_not_missing_weights() -> None:
    accelerate = pytest.importorskip("accelerate")
    target = accelerate.cpu_offload(llama(), torch.device("cpu"))
    assert target.get_input_embeddings().weight.is_meta
    assert check_pair(target, drafter()) == []
    note = fingerprint(target)
    assert note["embedding_hash"] is note["lm_head_hash"] is note["layer_hashes"] is None


def test_a_target_without_the_module_to_borrow_is_refused() -> None:
    bare = llama().model  # the decoder alone has no LM head
    assert only(check_pair(bare, drafter())).field == "share_lm_head"
    assert check_pair(bare, drafter(share_lm_head=False)) == []


def test_the_reduced_vocabulary_must_be_sorted_in_range_and_the_one_trained_with() -> None:
    target, draft = llama(), drafter(draft_vocab_size=32)
    assert check_pair(target, draft) == []
    draft.config.target = {"draft_vocab_hash": draft_vocab_hash(draft)}
    assert check_pair(target, draft) == []
    draft.draft_token_ids[31] = 40
    assert only(check_pair(target, draft)).field == "draft_vocab_hash"
    draft.config.target = None
    for bad in (130, 20):  # out of range, unsorted
        draft.draft_token_ids[31] = bad
        found = only(check_pair(target, draft))
        assert (found.severity, found.field) == ("error", "draft_token_ids")
        assert "0..127" in found.message


def test_another_tokenizer_is_an_error_that_names_it() -> None:
    ours, other = tokenizer("The quick brown fox In def return x"), tokenizer("In x return The fox quick def brown")
    target = llama()
    draft = drafter(target=fingerprint(target, tokenizer=ours))
    assert check_pair(target, draft, tokenizer=ours) == []
    found = only(check_pair(target, draft, tokenizer=other))
    assert (found.severity, found.field) == ("error", "tokenizer")
    assert type(other).__name__ in found.message
    with pytest.raises(
        ValueError, match=r"cannot draft for [\s\S]*gives other ids .* load the drafter for this target"
    ):
        target.generate(torch.tensor([[1, 2]]), assistant_model=draft, tokenizer=other, max_new_tokens=4)


# --- warnings --------------------------------------------------------------------------------------------------------


def test_a_smaller_vocabulary_warns_where_the_drafter_has_its_own_head() -> None:
    target = llama(vocab_size=120)
    found = only(check_pair(target, drafter(share_lm_head=False, share_embedding=False)))
    assert (found.severity, found.field) == ("warning", "vocab_size")
    assert "120" in found.message
    reduced = drafter(draft_vocab_size=32)  # all of its ids are below 120
    assert check_pair(target, reduced) == []


def test_a_fine_tuned_target_warns_whichever_part_was_tuned() -> None:
    target = llama()
    note = fingerprint(target)
    for part, name in ((target.model.embed_tokens, "embedding"), (target.lm_head, "LM head"),
                       (target.model.layers[3].mlp.up_proj, "1 of 7")):  # fmt: skip
        tuned = copy.deepcopy(target)
        draft = drafter(target=note)
        assert check_pair(tuned, draft) == []
        weight = dict(tuned.named_modules())[next(n for n, m in target.named_modules() if m is part)].weight
        with torch.no_grad():
            weight.mul_(1.1)
        found = only(check_pair(tuned, draft))
        assert (found.severity, found.field) == ("warning", "fingerprint")
        assert name in found.message
        assert "output stays exact" in found.message


def test_rope_positions_and_template_warn() -> None:
    thinking = "{% if enable_thinking is defined %}{{ 'x' }}{% endif %}"
    plain, switch = tokenizer("The fox"), tokenizer("The fox", template="{{ 'do some thinking' }}")
    draft = drafter(target=fingerprint(llama(), tokenizer=switch), max_position_embeddings=128)
    draft.config.target.update(embedding_hash=None, lm_head_hash=None, layer_hashes=None)
    target = llama(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0})
    fields = {"rope_type", "rope_theta", "max_position_embeddings"}
    for given, more in ((None, set()), (plain, set()), (switch, set()),
                        (tokenizer("The fox", template=thinking), {"chat_template_hash", "has_thinking_switch"}),
                        (tokenizer("The fox jumps", template=switch.chat_template), {"tokenizer_size"})):  # fmt: skip
        findings = check_pair(target, draft, tokenizer=given)
        assert {finding.field for finding in findings} == fields | more
        assert {finding.severity for finding in findings} == {"warning"}


@pytest.mark.parametrize(
    ("note", "severity"),
    [("llama", None), ("llama_text", None), ("llama_unified", "warning"), ("mistral", "error"), (None, None)],
)
def test_a_variant_of_the_architecture_warns_another_one_is_refused(note: str | None, severity: str | None) -> None:
    findings = check_pair(llama(), drafter(target={"model_type": note}))
    assert [finding.severity for finding in findings] == ([severity] if severity else [])


def test_equal_embeddings_vouch_for_an_architecture_under_another_name() -> None:
    target = llama()
    noted = drafter(target={**fingerprint(target), "model_type": "renamed"})
    assert only(check_pair(target, noted)).severity == "warning"
    stored = drafter(target={"model_type": "renamed"}, share_embedding=False)
    assert only(check_pair(target, stored)).severity == "error"
    with torch.no_grad():
        stored.embed_tokens.weight.copy_(target.model.embed_tokens.weight)
    assert only(check_pair(target, stored)).severity == "warning"


def test_warnings_are_logged_once_per_pair_and_name_both(logged: list[str]) -> None:
    target, draft = llama(), drafter(max_position_embeddings=64, target={"name": "org/base"})
    target.config._name_or_path = "org/target"
    assert only(require_pair(target, draft)) == only(require_pair(target, draft))
    assert len(logged) == 1
    assert "LlamaForCausalLM (org/target)" in logged[0]
    assert "DSparkDrafter (unnamed), trained for org/base" in logged[0]
    require_pair(target, drafter(max_position_embeddings=64))
    assert len(logged) == 2
    assert require_pair(target, drafter()) == []


# --- clean pairs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pair_is_clean_for_every_family(family: str) -> None:
    target = FAMILIES[family]()
    draft = drafter(target=fingerprint(target))
    assert check_pair(target, draft) == []
    assert require_pair(target, draft) == []


def test_wrapped_models_are_looked_through() -> None:
    peft = pytest.importorskip("peft")
    target, draft = llama(), drafter()
    draft.config.target = fingerprint(target)
    adapted = peft.get_peft_model(target, peft.LoraConfig(target_modules=["q_proj"], r=2))
    assert check_pair(torch.compile(adapted), draft) == []
    assert fingerprint(adapted)["layer_hashes"].items() >= draft.config.target["layer_hashes"].items()
    assert check_pair(target, peft.get_peft_model(draft, peft.LoraConfig(target_modules=["q_proj"], r=2))) == []


def test_golden_pairs_are_clean_and_crossed_ones_refused() -> None:
    index = {"qwen3": common.target("targets/qwen3_a"), "gemma4": common.target("targets/gemma4_a")}
    for name in common.names("vectors"):
        draft = common.drafter(name)
        for family, target in index.items():
            if name.startswith(family):
                assert check_pair(target, draft) == [], name
            else:
                assert only(check_pair(target, draft)).severity == "error", name


# --- no traces -------------------------------------------------------------------------------------------------------


def test_nothing_is_left_on_either_model_and_neither_is_kept_alive() -> None:
    target, draft = llama(), drafter(max_position_embeddings=64, draft_vocab_size=16)
    before = [(set(vars(model)), model.config.to_dict()) for model in (target, draft)]
    modules = [set(vars(module)) for model in (target, draft) for module in model.modules()]
    require_pair(target, draft)
    fingerprint(target, drafter=draft)
    assert [(set(vars(model)), model.config.to_dict()) for model in (target, draft)] == before
    assert [set(vars(module)) for model in (target, draft) for module in model.modules()] == modules
    alive = [weakref.ref(model) for model in (target, draft)]
    del target, draft
    gc.collect()
    assert [reference() for reference in alive] == [None, None]


def test_threads_agree(logged: list[str]) -> None:
    target, draft = llama(), drafter(max_position_embeddings=64)
    results: list[list[Finding]] = []
    threads = [threading.Thread(target=lambda: results.append(require_pair(target, draft))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    assert all(result == results[0] for result in results)
    assert len(logged) == 1


def test_a_second_check_is_cheap_and_a_first_one_copies_no_matrix() -> None:
    target = llama(vocab_size=50_000, hidden_size=512, num_hidden_layers=2)
    draft = drafter(vocab_size=50_000, hidden_size=512, num_target_layers=2, target_layer_ids=[0])
    draft.config.target = fingerprint(target)

    def seconds(call: Any) -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    # Least of several: the machine may be busy. Copying the embedding alone would take longer than the first bound.
    assert min(seconds(lambda: fingerprint(target)) for _ in range(5)) < 0.05
    assert min(seconds(lambda: require_pair(target, draft)) for _ in range(20)) < 0.001
