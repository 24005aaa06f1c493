"""`DSparkDrafter` over families, heads, biases, storage, vocabularies and block conventions.

Catches: a combination that does not draft, train or load; a parameter without gradient; a saved drafter that is not
the one that comes back; a block that cannot look to its right; a slot that predicts its neighbour's token; a drafted
id fed on before it is mapped; a soft cap or an embedding scale in the wrong place; a mask read in two ways.
"""

from __future__ import annotations

import math
import warnings
from typing import get_args

import pytest
import torch
from transformers import AutoModel

from dspark import DSparkDrafter
from dspark.configuration_dspark import Family
from dspark.context_cache import ContextCache
from dspark.draft_masks import draft_masks
from dspark.families import FAMILIES, RMSNorm
from dspark.objective import Objective

from . import small

ANCHORS = torch.tensor([5, 17])


@pytest.fixture(params=small.CASES)
def case(request) -> small.Case:
    return small.CASES[request.param]


def ready(case: small.Case) -> DSparkDrafter:
    model = small.drafter(case.family, **case.fields)
    model.share_with(small.target(case.family))
    return model


def equal(a, b) -> bool:
    return all((a[key] is None and b[key] is None) or torch.equal(a[key], b[key]) for key in a.keys() | b.keys())


def train_batch(rows: int = 2, length: int = 12):
    generator = torch.Generator().manual_seed(3)
    return {
        "input_ids": torch.randint(small.VOCAB, (rows, length), generator=generator),
        "target_hidden_states": small.states(rows, length),
        "loss_mask": torch.ones(rows, length),
        "target_last_hidden_states": torch.randn(rows, length, small.WIDTH, generator=generator),
        "generator": torch.Generator().manual_seed(4),
    }


def test_it_drafts(case) -> None:
    model = ready(case)
    out = model.draft(ANCHORS, small.states())
    drafts = 4 if case.fields["sample_from_anchor"] else 3
    width = len(small.DRAFT_IDS) if "draft_vocab_size" in case.fields else small.VOCAB
    assert out.token_ids.shape == (2, drafts)
    assert out.logits.shape == out.base_logits.shape == (2, drafts, width)
    assert out.hidden_states.shape == (2, drafts, model.config.hidden_size)
    assert out.context_features.shape == (2, 9, model.config.hidden_size)
    assert out.logits.isfinite().all()
    assert (out.confidence_logits is None) != case.fields["enable_confidence_head"]
    if width < small.VOCAB:
        assert set(out.token_ids.flatten().tolist()) <= set(small.DRAFT_IDS)
    assert equal(out, model.draft(ANCHORS, small.states()))
    empty = model.draft(ANCHORS, small.states()[:, :0])  # an anchor at position 0 has nothing before it
    assert empty.logits.isfinite().all()


def test_every_parameter_learns(case) -> None:
    model = ready(case).train()
    out = model(**train_batch())
    assert out.loss.isfinite()
    out.loss.backward()
    still = [
        name
        for name, p in model.named_parameters()
        if p.grad is None or not p.grad.isfinite().all() or not p.grad.any()
    ]
    assert still == []


def test_saved_and_loaded_it_is_the_same(case, tmp_path) -> None:
    """Every other case in bfloat16 and in shards."""
    in_shards = list(small.CASES.values()).index(case) % 2 == 1
    dtype = torch.bfloat16 if in_shards else torch.float32
    model = ready(case).to(dtype)
    shards = {"max_shard_size": "8KB"} if in_shards else {}
    model.save_pretrained(tmp_path, **shards)
    assert len(list(tmp_path.glob("*.safetensors"))) > (2 if shards else 0)
    for load in (DSparkDrafter.from_pretrained, AutoModel.from_pretrained):
        again = load(tmp_path)
        assert type(again) is DSparkDrafter
        assert not again.training
        assert again.dtype is dtype
        assert equal(again.state_dict(), model.state_dict())
        # Not stored, hence built anew.
        assert equal(dict(again.named_buffers()), dict(model.named_buffers()))
        if dtype is torch.float32:
            again.share_with(small.target(case.family))
            ours, theirs = (drafter.draft(ANCHORS, small.states()).logits for drafter in (model, again))
            # The file's memory is aligned otherwise, which moves the last bit of a product.
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    borrowed = {"embed_tokens.weight"} if model.config.share_embedding else set()
    borrowed |= {"lm_head.weight"} if model.config.share_lm_head else set()
    assert not borrowed & set(model.state_dict())


def test_families_agree_with_the_literal_and_are_kept_whole() -> None:
    assert set(FAMILIES) == set(get_args(Family))
    names = {type(layer).__name__ for family in FAMILIES for layer in small.drafter(family).layers}
    assert names == set(DSparkDrafter._no_split_modules)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("draft_vocab", [None, len(small.DRAFT_IDS)])
def test_new_weights_are_what_a_new_drafter_has(family, draft_vocab) -> None:
    config = small.config(family, draft_vocab_size=draft_vocab, attention_bias=True, initializer_range=0.5)
    model = DSparkDrafter(config)
    for name, tensor in model.state_dict().items():
        if "norm" in name or "layer_scalar" in name:
            assert (tensor == 1).all()
        elif name.endswith("bias"):
            assert (tensor == 0).all()
        elif name == "draft_token_ids":
            assert tensor.tolist() == list(range(draft_vocab))
        else:
            assert 0.3 < float(tensor.std()) < 0.7


@pytest.mark.parametrize("family", FAMILIES)
def test_loading_does_not_initialise_what_was_loaded(family, tmp_path) -> None:
    """Constants that no initialisation gives, in every stored tensor and for two construction orders."""
    model = small.drafter(family, draft_vocab_size=len(small.DRAFT_IDS), share_embedding=False)
    with torch.no_grad():
        for i, tensor in enumerate(model.state_dict().values()):
            if tensor.is_floating_point():
                tensor.fill_(0.25 + i)
    model.save_pretrained(tmp_path)
    for how in ({}, {"dtype": torch.bfloat16}, {"dtype": "auto"}, {"device_map": "cpu"}):
        again = DSparkDrafter.from_pretrained(tmp_path, **how)
        stored = again.state_dict()
        assert all(
            torch.equal(tensor.to(stored[name].dtype), stored[name]) for name, tensor in model.state_dict().items()
        )
        assert again.draft_token_ids.tolist() == small.DRAFT_IDS
        assert torch.equal(again.rotary_emb.inv_freq, model.rotary_emb.inv_freq)
        assert again.rotary_emb.inv_freq.dtype is torch.float32


# --- the block ------------------------------------------------------------------------------------------------------


class Nudged(DSparkDrafter):
    """Adds `nudge [q, D]` to the block's embeddings."""

    nudge: torch.Tensor | float = 0.0

    def embed(self, token_ids, shared):
        return super().embed(token_ids, shared) + self.nudge


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_first_slot_sees_the_last(family, attention) -> None:
    model = small.drafter(family, cls=Nudged, markov_rank=0)
    model.set_attn_implementation(attention)
    model.share_with(small.target(family))
    plain = model.draft(ANCHORS, small.states()).logits
    model.nudge = torch.zeros(4, small.WIDTH)
    model.nudge[-1] = 1.0
    moved = model.draft(ANCHORS, small.states()).logits
    assert ((plain - moved).abs().amax(-1) > 1e-4).all()


@pytest.mark.parametrize("heads", ["none-plain", "rnn-markov"])
def test_two_conventions_are_one_slot_apart(heads) -> None:
    """The same weights: without `sample_from_anchor` the anchor's slot is ignored, and slot j predicts anchor + j."""
    from_anchor, from_mask = (small.drafter(sample_from_anchor=rule, **small.HEADS[heads]) for rule in (True, False))
    for model in (from_anchor, from_mask):
        model.share_with(small.target())
    one, other = (model.draft(ANCHORS, small.states()) for model in (from_anchor, from_mask))
    torch.testing.assert_close(one.hidden_states[:, 1:], other.hidden_states)
    torch.testing.assert_close(one.base_logits[:, 1:], other.base_logits)
    if heads.startswith("none"):
        assert torch.equal(one.token_ids[:, 1:], other.token_ids)
        torch.testing.assert_close(one.confidence_logits[:, 1:], other.confidence_logits)
    else:
        # The first prediction follows the anchor either way, one slot later in the block; the state has seen its slot.
        _, state = from_mask.markov_head.step(ANCHORS, one.hidden_states[:, 0], torch.zeros(2, 6))
        bias, _ = from_mask.markov_head.step(ANCHORS, other.hidden_states[:, 0], state)
        torch.testing.assert_close(other.logits[:, 0], other.base_logits[:, 0] + bias)


def test_the_block_is_anchor_and_masks() -> None:
    """All slots after the first hold the mask token; the anchor sits at position S."""
    seen = {}

    class Watched(DSparkDrafter):
        def embed(self, token_ids, shared):
            seen["ids"] = token_ids
            return super().embed(token_ids, shared)

        def run_layers(self, hidden, positions, context, mask):
            seen["positions"] = positions
            return super().run_layers(hidden, positions, context, mask)

    model = small.drafter(cls=Watched)
    model.share_with(small.target())
    model.draft(ANCHORS, small.states())
    assert seen["ids"].tolist() == [[5, small.MASK, small.MASK, small.MASK], [17, small.MASK, small.MASK, small.MASK]]
    assert seen["positions"].tolist() == [[9, 10, 11, 12]] * 2


@pytest.mark.parametrize("heads", ["none-none", "vanilla-markov", "gated-plain", "rnn-markov"])
@pytest.mark.parametrize("from_anchor", [True, False])
def test_reduced_vocabulary_equals_a_loop(heads, from_anchor) -> None:
    """Markov input in target ids, output in draft ids: a drafted id is mapped before it feeds the next slot."""
    model = small.drafter(
        draft_vocab_size=len(small.DRAFT_IDS), sample_from_anchor=from_anchor, **small.HEADS[heads]
    )  # fmt: skip
    model.share_with(small.target())
    out = model.draft(ANCHORS, small.states())
    cache = ContextCache(len(model.layers), [0, 0])
    model.extend_context(cache, out.context_features)
    unused = model.draft_block(ANCHORS, cache, model.shared_modules(None)).anchor_hidden
    assert (unused is None) == from_anchor
    for b in range(2):
        previous, state = int(ANCHORS[b]), None
        if model.markov_head is not None:
            state = model.markov_head.initial_state(1, like=out.hidden_states)
            if unused is not None:
                _, state = model.markov_head.step(ANCHORS[b : b + 1], unused[b : b + 1], state)
        for k in range(out.token_ids.shape[1]):
            logits = model.lm_head.weight @ out.hidden_states[b, k]
            if model.markov_head is not None:
                bias, state = model.markov_head.step(torch.tensor([previous]), out.hidden_states[b, k : k + 1], state)
                logits = logits + bias[0]
            torch.testing.assert_close(out.logits[b, k], logits, atol=1e-5, rtol=1e-5)
            previous = small.DRAFT_IDS[int(logits.argmax())]
            assert int(out.token_ids[b, k]) == previous


def test_soft_cap_is_on_the_base_logits_only() -> None:
    own = small.STORAGE["own"]
    free, capped = (small.drafter("gemma4", final_logit_softcapping=cap, **own) for cap in (None, 2.0))
    one, other = (model.draft(ANCHORS, small.states()) for model in (free, capped))
    torch.testing.assert_close(other.base_logits, 2 * torch.tanh(one.base_logits / 2))
    first = [(out.logits - out.base_logits)[:, 0] for out in (one, other)]  # both follow the anchor
    torch.testing.assert_close(*first, atol=1e-5, rtol=1e-5)


def test_own_embedding_is_scaled_and_a_borrowed_one_scales_itself() -> None:
    target = small.target("gemma4")
    borrowing = small.drafter("gemma4")
    owning = small.drafter("gemma4", share_embedding=False, embed_scale=math.sqrt(small.WIDTH))
    owning.load_state_dict({**borrowing.state_dict(), "embed_tokens.weight": target.get_input_embeddings().weight})
    for model in (borrowing, owning):
        model.share_with(target)
    one, other = (model.draft(ANCHORS, small.states()).logits for model in (borrowing, owning))
    torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)  # the target keeps its scale in bfloat16 precision


@pytest.mark.parametrize("family", ["qwen3", "gemma4"])
def test_a_raw_embedding_is_the_stored_rows(family) -> None:
    """Gemma's own module scales its rows; drafters trained on raw rows get them raw, times their own scale."""
    target = small.target(family)
    model = small.drafter(family, raw_target_embedding=True, embed_scale=1.5)
    stored = target.get_input_embeddings().weight[ANCHORS]
    got = model.embed(ANCHORS, model.shared_modules(target))
    torch.testing.assert_close(got, 1.5 * stored, atol=1e-5, rtol=4e-3)  # the target keeps its scale in bfloat16


def test_logits_are_scaled_before_the_cap() -> None:
    own = small.STORAGE["own"]
    plain, scaled = small.drafter(**own), small.drafter(**own, logit_scale=0.4, final_logit_softcapping=3.0)
    hidden = torch.randn(2, 32)
    shared = plain.shared_modules(None)
    expected = 3 * torch.tanh(0.4 * plain.base_logits(hidden, shared) / 3)
    torch.testing.assert_close(scaled.base_logits(hidden, shared), expected)


def ragged(model: DSparkDrafter) -> tuple[torch.Tensor, ContextCache]:
    """Two rows with contexts of 9 and 4."""
    cache = ContextCache(len(model.layers), [0, 0])
    model.extend_context(cache, model.project_context(small.states()), [9, 4])
    return ANCHORS, cache


@torch.no_grad()
def drafted(model: DSparkDrafter, attention: str) -> list[torch.Tensor]:
    """Base logits of a block: both rows alike, and rows of different length."""
    model.set_attn_implementation(attention)
    uniform = model.draft(ANCHORS, small.states()).base_logits
    return [uniform, model.draft_block(*ragged(model), model.shared_modules(None)).base_logits]


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_implementations_agree(family) -> None:
    model = small.drafter(family)
    model.share_with(small.target(family))
    for one, other in zip(drafted(model, "sdpa"), drafted(model, "eager"), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    losses = []
    for attention in ("sdpa", "eager"):
        model.set_attn_implementation(attention)
        losses.append(model(**train_batch()).loss)
    torch.testing.assert_close(*losses, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:_compile flag:DeprecationWarning")  # how transformers asks torch for its mask
def test_flex_attention_agrees() -> None:
    """Slow: flex attention is compiled before it runs."""
    model = small.drafter()
    model.share_with(small.target())
    for one, other in zip(drafted(model, "sdpa"), drafted(model, "flex_attention"), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_a_batch_do_not_see_each_other(family) -> None:
    model = small.drafter(family)
    model.share_with(small.target(family))
    both = model.draft_block(*ragged(model), model.shared_modules(None)).base_logits
    for b, length in enumerate((9, 4)):
        alone = model.draft(ANCHORS[b : b + 1], small.states()[b : b + 1, :length]).base_logits
        torch.testing.assert_close(both[b : b + 1], alone, atol=1e-5, rtol=1e-5)


def test_attention_that_cannot_mask_says_so() -> None:
    model = small.drafter()
    model.share_with(small.target())
    _, cache = ragged(model)
    model.config._attn_implementation = "flash_attention_2"
    alike = ContextCache(2, [0, 0])
    assert draft_masks(model.config, torch.zeros(2, 4, 32), alike) == [None, None]  # rows alike need no mask
    with pytest.raises(ValueError, match=r"'flash_attention_2' takes it for padding on the left.*'sdpa'"):
        draft_masks(model.config, torch.zeros(2, 4, 32), cache)
    with pytest.raises(ValueError, match=r"attention 'flash_attention_2' does not take.*'sdpa'"):
        model(**train_batch())


def test_sampling_follows_the_corrected_law() -> None:
    """The first slot's frequencies over 4,000 rows against the softmax of its corrected logits."""
    model = small.drafter(draft_vocab_size=len(small.DRAFT_IDS))
    model.share_with(small.target())
    rows = 4000
    generator = torch.Generator().manual_seed(0)
    out = model.draft(
        torch.full((rows,), 5), small.states(1).expand(rows, -1, -1), do_sample=True, generator=generator
    )
    expected = out.logits[0, 0].softmax(-1) * rows
    counts = (out.token_ids[:, 0, None] == torch.tensor(small.DRAFT_IDS)).sum(0)
    common = expected > 5
    statistic = float(((counts - expected) ** 2 / expected)[common].sum())
    freedom = int(common.sum())
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


# --- training -------------------------------------------------------------------------------------------------------


def gradients(model: DSparkDrafter) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(**train_batch()).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing_changes_nothing(family) -> None:
    model = small.drafter(family).train()
    model.share_with(small.target(family))
    plain = gradients(model)
    model.gradient_checkpointing_enable()
    assert all(layer.gradient_checkpointing for layer in model.layers)
    checkpointed = gradients(model)
    for name, gradient in plain.items():
        torch.testing.assert_close(checkpointed[name], gradient, atol=1e-6, rtol=1e-5)
    with pytest.raises(ValueError, match="needs use_reentrant=False, got True"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.gradient_checkpointing_disable()
    assert not any(layer.gradient_checkpointing for layer in model.layers)


def test_autocast_trains() -> None:
    model = small.drafter(markov_head_type="rnn").train()
    model.share_with(small.target())
    exact = model(**train_batch()).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(**train_batch()).loss
    loss.backward()
    assert loss.dtype is torch.float32
    torch.testing.assert_close(loss, exact, atol=0.05, rtol=0.05)
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_norms_of_narrower_activations_take_the_fused_form() -> None:
    """As under autocast: the dtype stays, nothing warns, and the numbers are those of float32, rounded once."""
    norm, hidden = RMSNorm(16, 1e-6), torch.randn(3, 16).bfloat16()
    torch.nn.init.normal_(norm.weight)
    torch.set_warn_always(True)  # else one of torch's own comes once per process
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = norm(hidden)
    finally:
        torch.set_warn_always(False)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, norm(hidden.float()).bfloat16())


def test_keep_mask_of_integers() -> None:
    model = small.drafter()
    model.share_with(small.target())
    keep = torch.tensor([[1, 0], [1, 1]])
    batch = {**train_batch(), "anchor_positions": torch.tensor([[2, 0], [3, 6]])}
    losses = [model(**batch, anchor_keep_mask=mask).loss for mask in (keep, keep.bool())]
    assert torch.equal(*losses)


@pytest.mark.slow
def test_compiled_training_forward_is_the_same() -> None:
    """Slow: traced once. No inductor, so no compiler is needed."""
    model = small.drafter()
    model.share_with(small.target())
    model.objective = Objective(num_anchors=4)
    batch = {**train_batch(), "anchor_positions": torch.tensor([[2, 5], [3, 6]])}
    expected = model(**batch).loss
    torch.testing.assert_close(torch.compile(model, backend="aot_eager")(**batch).loss, expected)


@pytest.mark.parametrize(
    ("anchors", "shape", "message"),
    [
        (ANCHORS, (2, 9, 95), r"must be 96 wide \(3 tapped layers \[-1, 0, 2\] of width 32\), got 95"),
        (ANCHORS, (1, 9, 96), r"with a row per anchor \(2\), got \[1, 9, 96\]"),
        (ANCHORS, (2, 96), r"must be \[B, S, m\*D_t\] with a row per anchor \(2\), got \[2, 96\]"),
    ],
)
def test_wrong_hidden_states_are_named(anchors, shape, message) -> None:
    model = small.drafter()
    model.share_with(small.target())
    with pytest.raises(ValueError, match=message):
        model.draft(anchors, torch.zeros(shape))
