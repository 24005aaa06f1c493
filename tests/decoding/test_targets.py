"""One test per cell of `tests.zoo.SUPPORT`: exact cells give plain generate's ids, refused ones say so first.

Catches per-family faults of position ids, masks, hidden-state taps, logits kept, cache rollback and state replay.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from dspark import DSparkDrafter, SpeculationConfig
from dspark.compat import cache_length, cache_name
from dspark.target import text_config
from tests import zoo
from tests.decoding.equality import assert_same_text, left_padded, plain, refused
from tests.scripted import CYCLE, Forced, Hostile, Oracle, drafter_config
from tests.zoo import VOCAB

ROWS = (3, 9, 17, 30)


def model_of(name: str, column: str) -> PreTrainedModel:
    return zoo.target(name, column if column in ("sdpa", "eager") else None)


def call_of(name: str, column: str, model: PreTrainedModel) -> dict[str, Any]:
    """Arguments of `generate` that stand for a column."""
    ids = zoo.prompt(9)
    if column == "left padding":
        return left_padded(ids, width=14)
    if column == "chunked prefill":
        return {"input_ids": ids, "prefill_chunk_size": 5}
    if column == "inputs_embeds":
        with torch.no_grad():
            return {"inputs_embeds": model.get_input_embeddings()(ids)}
    if column == "own cache":
        cache = {cache_name(model): DynamicCache(config=text_config(model))}
        return {"input_ids": torch.cat([plain(model, 6, input_ids=ids, **cache), zoo.prompt(5)], dim=1), **cache}
    if column == "static cache":
        return {"input_ids": ids, "cache_implementation": "static"}
    if column == "batch":
        return left_padded(*map(zoo.prompt, ROWS))
    return zoo.inputs(name, 30)


def check_text(name: str, model: PreTrainedModel, lengths: tuple[int, ...]) -> None:
    """Every accept length behind prompts of these lengths, and a hostile drafter behind the last."""
    seen: set[int] = set()
    for length in lengths:
        call = zoo.inputs(name, length)
        oracle = assert_same_text(model, call["input_ids"], 40, **call)
        seen.update(oracle.texts[0][length:])
    assert len(seen) >= 10, "the texts repeat themselves: they would agree with any mistake"
    expected = plain(model, 24, **call)
    assert plain(model, 24, assistant_model=Hostile(model), **call).tolist() == expected.tolist()


def check_own_cache(model: PreTrainedModel, input_ids: torch.Tensor, **cache: Any) -> None:
    """A turn on a half-filled cache leaves it so that a plain turn behind it is as after a plain turn."""
    ours, theirs = cache, copy.deepcopy(cache)
    text = plain(model, 24, input_ids=input_ids, **theirs)
    found = plain(model, 24, input_ids=input_ids, assistant_model=Oracle(model, text.tolist(), CYCLE), **ours)
    assert found.tolist() == text.tolist()
    third = torch.cat([text, zoo.prompt(4)], dim=1)
    (one,), (other,) = ours.values(), theirs.values()
    assert cache_length(one) == cache_length(other)
    after = [plain(model, 12, input_ids=third, **turn).tolist() for turn in (ours, theirs)]
    assert after[0] == after[1]


def check_batch(model: PreTrainedModel, **call: Any) -> None:
    """Rows that accept very different numbers of drafts, each as if it were alone."""
    texts = [plain(model, 40, input_ids=zoo.prompt(length))[0].tolist() for length in ROWS]
    expected = plain(model, 40, **call)
    found = plain(model, 40, assistant_model=Oracle(model, texts, [[0], [3], [6], CYCLE]), **call)
    assert found.tolist() == expected.tolist()
    assert [row[-len(text) :] for row, text in zip(found.tolist(), texts, strict=True)] == texts


def check_exact(name: str, column: str) -> None:
    model = model_of(name, column)
    if column in ("sdpa", "eager"):
        is_main = zoo.TARGETS[name].attention[0] == column
        check_text(name, model, (1, 2, 3, 30) if is_main else (2, 30))
        return
    call = call_of(name, column, model)
    if column == "own cache":
        check_own_cache(model, **call)
    elif column == "batch":
        check_batch(model, **call)
    else:
        assert_same_text(model, zoo.prompt(9), 24, **call)


def test_the_table_has_every_target() -> None:
    assert [row.target for row in zoo.SUPPORT] == list(zoo.TARGETS)
    assert zoo.markdown().count("\n| ") == len(zoo.TARGETS)


@pytest.mark.parametrize("name", ["Qwen2.5-VL", "Qwen3-VL"])
def test_images_shift_the_positions_of_the_text(name: str) -> None:
    """Or the cells of these targets would not see three-dimensional positions at work."""
    if reason := zoo.TARGETS[name].absent:
        pytest.skip(reason)
    model = zoo.target(name)
    plain(model, 2, **zoo.inputs(name, 30))
    assert int(model.model.rope_deltas) < 0


@pytest.mark.parametrize(
    ("row", "column"),
    [pytest.param(row, column, id=f"{row.target}, {column}") for row in zoo.SUPPORT for column in zoo.COLUMNS],
)
def test_cell(row: zoo.Row, column: str) -> None:
    name, cell = row.target, row.cells[column]
    if reason := zoo.TARGETS[name].absent or cell.skipped:
        pytest.skip(reason)
    if cell.verdict_here == zoo.EXACT:
        check_exact(name, column)
    elif cell.verdict_here == zoo.NOT_OFFERED:
        with pytest.raises((ValueError, RuntimeError, AttributeError)):
            model = model_of(name, column)
            plain(model, 24, **call_of(name, column, model))
    else:
        model = model_of(name, column)
        call = call_of(name, column, model)
        with refused(model, cell.says, type(model).__name__ if column != "static cache" else ""):
            plain(model, 24, assistant_model=Hostile(model), **call)


# --- dtypes -------------------------------------------------------------------------------------------------------


def assert_near_ties(model: PreTrainedModel, text: torch.Tensor, prompt: int) -> None:
    """Every emitted token is within rounding of the arg-max when plain decoding is forced along the text."""
    with torch.no_grad():
        logits = model(text).logits[0, prompt - 1 : -1].float()
    top = logits.amax(-1)
    gap = top - logits.gather(1, text[0, prompt:, None])[:, 0]
    # One unit in the last place of the top logit; a pass over several rows rounds hidden states differently too.
    unit = torch.finfo(model.dtype).eps * 2.0 ** top.abs().log2().floor()
    assert (gap <= 4 * unit).all(), (gap / unit).max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["Llama", "Gemma 3", "Qwen3.5"])
def test_half_precision_targets_differ_by_near_ties_at_most(name: str, dtype: torch.dtype) -> None:
    model, ids = zoo.new_target(name, scale=3.0).to(dtype), zoo.prompt(9)
    text = plain(model, 40, input_ids=ids)
    assert len(set(text[0].tolist())) > 10
    for drafter in (Oracle(model, text.tolist(), CYCLE), Hostile(model), Hostile(model).to(dtype)):
        found = plain(model, 40, input_ids=ids, assistant_model=drafter)
        assert found.shape == text.shape
        assert_near_ties(model, found, 9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_drafters_dtype_is_its_own(dtype: torch.dtype) -> None:
    """An fp32 target stays exact, drafts and confidences stay finite and near the fp32 drafter's."""
    model, ids = zoo.target("Llama"), zoo.prompt(9)
    drafter = DSparkDrafter(drafter_config(model)).eval()
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.mul_(3.0 if parameter.dim() > 1 else 1.0)
        hidden = model(ids, output_hidden_states=True).hidden_states
        states = torch.cat([hidden[i + 1] for i in drafter.config.target_layer_ids], dim=-1)
    small = copy.deepcopy(drafter).to(dtype)
    fp32 = drafter.draft(torch.tensor([5]), states, target=model)
    half = small.draft(torch.tensor([5]), states, target=model)
    both = fp32.token_ids == half.token_ids
    slots = int(both.int().cumprod(-1).sum())  # confidences of a slot depend on the tokens before it
    assert slots > 0
    assert half.confidence_logits.isfinite().all()
    difference = fp32.confidence_logits.sigmoid() - half.confidence_logits.sigmoid()
    assert difference[:, :slots].abs().max() < 2e-2
    expected = plain(model, 40, input_ids=ids)
    assert plain(model, 40, input_ids=ids, assistant_model=small).tolist() == expected.tolist()
    settings = SpeculationConfig(survival_threshold=0.2)
    assert plain(model, 40, input_ids=ids, assistant_model=small, speculation=settings).tolist() == expected.tolist()


# --- vocabularies -------------------------------------------------------------------------------------------------


class Stubborn(Forced):
    """Always proposes one token."""

    def __init__(self, target: PreTrainedModel, token: int, **overrides: Any) -> None:
        super().__init__(drafter_config(target, markov_rank=0, **overrides))
        self.token = token

    def forced_tokens(self, b: int, position: int) -> list[int]:
        return [self.token] * self.config.num_draft_tokens


class Reduced(Oracle):
    """An oracle that speaks only `draft_token_ids`; of other tokens it proposes its first."""

    def __init__(self, target: PreTrainedModel, texts: list[list[int]], ids: list[int]) -> None:
        super().__init__(target, texts, CYCLE, draft_vocab_size=len(ids))
        self.draft_token_ids.copy_(torch.tensor(ids))

    def forced_tokens(self, b: int, position: int) -> list[int]:
        column = {token: j for j, token in enumerate(self.draft_token_ids.tolist())}
        return [column.get(token, 0) for token in super().forced_tokens(b, position)]


OWN = {"share_embedding": False, "share_lm_head": False}


@pytest.mark.parametrize("said", [VOCAB - 6, VOCAB + 4])
def test_logits_may_have_another_width_than_the_config_says(said: int) -> None:
    """Padded vocabularies: the rows of the head are what counts."""
    model, ids = zoo.new_target("Llama"), zoo.prompt(9)
    text = plain(model, 40, input_ids=ids)
    model.config.vocab_size = said
    oracle = Oracle(model, text.tolist(), CYCLE, vocab_size=VOCAB, mask_token_id=VOCAB - 1)
    assert plain(model, 40, input_ids=ids, assistant_model=oracle).tolist() == text.tolist()
    assert sum(oracle.last_stats.accepted) > 0


@pytest.mark.parametrize("do_sample", [False, True])
def test_no_token_beyond_the_targets_rows_is_drafted(do_sample: bool) -> None:
    model, ids = zoo.target("Llama"), zoo.prompt(9)
    drafter = Stubborn(model, VOCAB + 7, vocab_size=VOCAB + 8, **OWN)
    seen: list[torch.Tensor] = []
    walk = drafter.walk_block
    drafter.walk_block = lambda *args: seen.append(result := walk(*args)) or result
    call = {"input_ids": ids, "assistant_model": drafter, "max_new_tokens": 20, "do_sample": do_sample}
    text = model.generate(**call)
    assert seen
    assert max(int(result.token_ids.max()) for result in seen) < VOCAB
    assert int(text.max()) < VOCAB
    if not do_sample:
        assert text.tolist() == plain(model, 20, input_ids=ids).tolist()


def test_a_reduced_vocabulary_with_gaps() -> None:
    model, ids = zoo.target("Llama"), zoo.prompt(9)
    text = plain(model, 60, input_ids=ids)[0].tolist()
    known = sorted(set(text[9:]))[::2]
    drafter = Reduced(model, [text], known)
    assert plain(model, 60, input_ids=ids, assistant_model=drafter)[0].tolist() == text
    assert sum(drafter.last_stats.accepted) > 5
    torch.manual_seed(0)
    sampled = model.generate(ids, do_sample=True, max_new_tokens=20, assistant_model=Reduced(model, [text], known))
    assert sampled.shape == (1, 29)
