"""Drafters written by other frameworks' own code give the numbers of those frameworks, and lookalikes are refused.

Catches: a layer id, slot, mask, window, scale or map that is off by a convention; a field taken from a default; a
damaged or contradictory checkpoint that loads; code or a pickle of a checkpoint that runs.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from dspark.conversion import FORMATS, LayerSight

from dspark import DSparkDrafter
from dspark.context_cache import ContextCache
from dspark.hub import read_record
from dspark.pairing import require_pair
from tests.conversion import peers

TOLERANCE = {"atol": 2e-4, "rtol": 2e-4}
# canonical name: ours, where they differ
NAMES = {"confidence_bias": "confidence_head_bias", "output_multiplier": "logit_scale"}


def load(path: Any, **kwargs: Any) -> DSparkDrafter:
    return DSparkDrafter.from_pretrained(path, dtype=torch.float32, **kwargs).eval()


def slots(drafter: DSparkDrafter, tensors: dict[str, torch.Tensor], case: str) -> Any:
    """The block of a case and the hidden states of all its slots `[1, q, D]`."""
    cache = ContextCache(len(drafter.layers), [0])
    drafter.extend_context(cache, drafter.project_context(tensors[f"{case}.context_hidden"][None]))
    block = drafter.draft_block(tensors[f"{case}.anchor_id"], cache, drafter.shared_modules(peers.target()))
    if block.anchor_hidden is None:
        return block, block.hidden
    return block, torch.cat([block.anchor_hidden[:, None], block.hidden], dim=1)


@pytest.mark.parametrize("case", ["p0", "p1"])
@pytest.mark.parametrize("name", peers.WITH_NUMBERS)
@torch.no_grad()
def test_block_has_the_numbers_of_its_framework(name: str, case: str) -> None:
    tensors, drafter = peers.numbers(name), load(peers.folder(name))
    block, hidden = slots(drafter, tensors, case)
    logits = drafter.base_logits(hidden, drafter.shared_modules(peers.target()))
    torch.testing.assert_close(hidden[0], tensors[f"{case}.block_hidden"], **TOLERANCE)
    torch.testing.assert_close(logits[0], tensors[f"{case}.base_logits"], **TOLERANCE)
    previous = tensors.get(f"{case}.tf_prev_tokens")
    if previous is None:
        return
    first = hidden.shape[1] - block.hidden.shape[1]
    previous = previous[None, first:]
    forced = block.base_logits
    if drafter.markov_head is not None:
        forced = forced + drafter.markov_head.block_bias(previous, block.hidden, block.anchor_hidden)
    if f"{case}.tf_logits" in tensors:
        torch.testing.assert_close(forced[0], tensors[f"{case}.tf_logits"][first:], **TOLERANCE)
    confidence = drafter.confidence_logits(block.hidden, previous)
    assert (confidence is None) == (f"{case}.tf_confidence_logits" not in tensors)
    if confidence is not None:
        torch.testing.assert_close(confidence[0], tensors[f"{case}.tf_confidence_logits"][first:], **TOLERANCE)


@pytest.mark.parametrize("case", ["p0", "p1"])
@pytest.mark.parametrize("name", peers.WITH_NUMBERS)
def test_greedy_drafts_are_those_of_its_framework(name: str, case: str) -> None:
    tensors, drafter = peers.numbers(name), load(peers.folder(name))
    out = drafter.draft(tensors[f"{case}.anchor_id"], tensors[f"{case}.context_hidden"][None], target=peers.target())
    assert torch.equal(out.token_ids[0], tensors[f"{case}.greedy_tokens"])
    torch.testing.assert_close(out.logits[0], tensors[f"{case}.greedy_logits"], **TOLERANCE)
    if (confidence := tensors.get(f"{case}.greedy_confidence_logits")) is not None:
        torch.testing.assert_close(out.confidence_logits[0], confidence, **TOLERANCE)


@pytest.mark.parametrize("name", peers.WITH_NUMBERS)
def test_record_says_what_the_framework_means(name: str) -> None:
    record = read_record(peers.folder(name))
    for key, value in peers.expected(name)["canonical"].items():
        if key in ("num_target_layers", "vocab_size") and record[key] is None:
            continue  # the file does not say; known with the target
        assert canonical(record, key) == comparable(key, value), key
    assert all(field.source for field in record.fields.values())
    assert record.num_draft_tokens == peers.expected(name)["canonical"]["gamma"]


def canonical(record: Any, key: str) -> Any:
    if key == "gamma":
        return record.num_draft_tokens
    if key == "rope":
        rope = record["rope_parameters"]
        return {name.removeprefix("rope_"): value for name, value in rope.items()}
    return record[NAMES.get(key, key)]


def comparable(key: str, value: Any) -> Any:
    if key == "markov_head_type":
        return value or "none"
    if key == "layers_attention":
        return [LayerSight(one.get("window"), one.get("window_rule"), one["causal_in_block"]) for one in value]
    return value


def test_every_folder_and_every_format_is_met() -> None:
    if len(peers.ALL) > 20:
        formats = {read_record(peers.folder(name)).format for name in peers.WITH_NUMBERS}
        assert formats == FORMATS.keys() - {"dspark", "deepspec", "flat"}
        assert len(peers.WITH_NUMBERS) == 39
        assert len(peers.CORRUPT) == 32


@pytest.mark.parametrize(("name", "words"), [
    ("sf_domino", ["Domino", "architectures: DominoDraftModel", "projector_type", "prefix_gru"]),
    ("spec090_dflash2", ["DFlash 2", "DFlash2DraftModel", "speculators_model_type: 'dflash2'", "candidate_selector"]),
    ("zlab010_dflash2", ["DFlash 2", "architectures: DFlash2DraftModel", "candidate_selector"]),
    ("spec090_xpress", ["XPress", "speculators_model_type: 'xpress'", "refiner_head"]),
])  # fmt: skip
def test_another_model_is_refused_by_name(name: str, words: list[str]) -> None:
    if name not in peers.ALL:
        pytest.skip("not in the shipped subset")
    assert name in peers.REFUSED
    with pytest.raises(ValueError, match="cannot be run as a DSpark drafter") as error:
        load(peers.folder(name))
    assert all(word in str(error.value) for word in words)


# --- damaged and contradictory ------------------------------------------------------------------------------------

VARIANTS = {name: peers.expected("corrupt")["variants"][name] for name in peers.CORRUPT}
ONLY_WITH_THE_TARGET = ("aux_out_of_range", "aux_last_layer")


@pytest.mark.parametrize(
    "name", [name for name in peers.CORRUPT if name not in (*ONLY_WITH_THE_TARGET, "custom_code_sentinel")]
)
def test_damaged_checkpoint_is_refused(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # an unpickled sentinel warns
        with pytest.raises((ValueError, OSError)) as error:
            load(peers.ROOT / "corrupt" / name)
    for word in VARIANTS[name]["message_should_name"]:
        assert word in str(error.value)


@pytest.mark.parametrize("name", [name for name in ONLY_WITH_THE_TARGET if name in peers.CORRUPT])
def test_layers_the_target_lacks_are_refused_with_it(name: str) -> None:
    drafter = load(peers.ROOT / "corrupt" / name)
    assert drafter.config.num_target_layers is None
    for call in (lambda: require_pair(peers.target(), drafter), lambda: generate(drafter)):
        with pytest.raises(ValueError, match=r"target_layer_ids: The drafter reads target layers") as error:
            call()
        assert all(word in str(error.value) for word in VARIANTS[name]["message_should_name"])
    with pytest.raises(ValueError, match=r"must lie in -1\.\.4 .* was read from config.json: aux_hidden_state_layer_"):
        load(peers.ROOT / "corrupt" / name, num_target_layers=6)


def generate(drafter: DSparkDrafter) -> torch.Tensor:
    return peers.target().generate(torch.tensor([[3, 5, 7]]), assistant_model=drafter, max_new_tokens=4)


def test_code_beside_the_weights_is_never_imported() -> None:
    drafter = load(peers.ROOT / "corrupt" / "custom_code_sentinel", trust_remote_code=True)
    if "spec090_dspark_bf16" in peers.ALL:
        same = load(peers.folder("spec090_dspark_bf16"))
        assert all(torch.equal(a, b) for a, b in zip(drafter.parameters(), same.parameters(), strict=True))


@pytest.mark.parametrize("name", ["anchor_contradiction", "speculative_tokens_nonsense", "gguf_no_anchor_key"])
def test_the_caller_can_decide_what_the_file_leaves_open(name: str) -> None:
    if name not in peers.CORRUPT:
        pytest.skip("not in the shipped subset")
    for choice in (True, False):
        drafter = load(peers.ROOT / "corrupt" / name, sample_from_anchor=choice)
        assert drafter.config.num_draft_tokens == (7 if choice else 6)


# --- decoding -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [
    "zlab010_dflash", "gguf_dflash", "muse_mixed", "spec090_dspark_rnn_noanchor", "sf_dspark_yarn_sliding",
    "spec090_dspark_reduced_gated_noanchor", "zlab010_dflash_scaled",
])  # fmt: skip
@pytest.mark.parametrize("rows", [1, 2])
def test_generation_is_the_target_s(name: str, rows: int) -> None:
    """Rank 0 without an anchor draft, windows, reduced vocabularies: exact through `generate`, rows of two lengths."""
    if name not in peers.ALL:
        pytest.skip("not in the shipped subset")
    drafter, target = load(peers.folder(name)), peers.target()
    prompt = peers.numbers(name)["p0.prompt_ids"]
    ids = (
        prompt[None]
        if rows == 1
        else torch.stack([prompt, torch.cat([torch.zeros(9, dtype=torch.long), prompt[:-9]])])
    )
    mask = torch.ones_like(ids)
    if rows == 2:
        mask[1, :9] = 0
    how = {"attention_mask": mask, "max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    plain = target.generate(ids, **how)
    assert torch.equal(target.generate(ids, assistant_model=drafter, **how), plain)
    assert drafter.last_stats.num_rounds > 0


def test_messages_have_no_foreign_paths() -> None:
    """A record names keys and tensors, so that it can be shown."""
    for name in peers.WITH_NUMBERS[:3]:
        record = read_record(peers.folder(name))
        assert not any(re.search(r"/\w+/\w+/", field.source) for field in record.fields.values())
