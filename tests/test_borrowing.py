"""What a drafter borrows from its target: by reference, in any dtype, quantised or offloaded, and never kept.

Catches: a copy of the target's embedding in memory, in a checkpoint, in a deep copy or a pickle; a checkpoint's own
tensors passed over for the target's; a quantised weight cast or read; activations cast to a code's dtype.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from dspark import DSparkDrafter
from dspark.borrowing import call_embedding, call_head, teacher_head

from . import small

ANCHORS = torch.tensor([5, 17])


def pair(**fields):
    target = small.target()
    model = small.drafter(**fields)
    model.share_with(target)
    return target, model


def train_batch():
    return {
        "input_ids": torch.randint(small.VOCAB, (2, 10)), "target_hidden_states": small.states(2, 10),
        "loss_mask": torch.ones(2, 10), "target_last_hidden_states": torch.randn(2, 10, small.WIDTH),
        "anchor_positions": torch.tensor([[2, 5], [1, 6]]),
    }  # fmt: skip


@pytest.mark.parametrize("storage", small.STORAGE)
def test_borrowed_modules_are_the_target_s_and_own_ones_are_used(storage) -> None:
    target, model = pair(**small.STORAGE[storage])
    shared = model.shared_modules(None)
    assert shared == model.shared_modules(target)
    config = model.config
    assert shared.embedding is (target.get_input_embeddings() if config.share_embedding else None)
    assert shared.lm_head is (target.get_output_embeddings() if config.share_lm_head else None)
    theirs = {parameter.data_ptr() for parameter in target.parameters()}
    assert not theirs & {tensor.data_ptr() for tensor in model.state_dict().values()}
    assert ("embed_tokens.weight" in model.state_dict()) != config.share_embedding
    assert ("lm_head.weight" in model.state_dict()) != config.share_lm_head
    # What it does not borrow it does not touch.
    before = model.draft(ANCHORS, small.states())
    with torch.no_grad():
        for part, is_shared in (("embed_tokens", config.share_embedding), ("lm_head", config.share_lm_head)):
            if not is_shared:
                getattr(model, part).weight.mul_(-1)
    after = model.draft(ANCHORS, small.states())
    assert torch.equal(before.hidden_states, after.hidden_states) == config.share_embedding
    if config.share_embedding:
        assert torch.equal(before.base_logits, after.base_logits) == config.share_lm_head


def test_share_with_none_forgets() -> None:
    _, model = pair()
    model.share_with(None)
    with pytest.raises(ValueError, match=r"borrows the target's embedding and LM head, and no target is known\. Pass"):
        model.draft(ANCHORS, small.states())
    assert model.draft(ANCHORS, small.states(), target=small.target()).token_ids.shape == (2, 4)


def test_nothing_needed_nothing_asked() -> None:
    model = small.drafter(**small.STORAGE["own"])
    model.share_with(None)
    assert model.shared_modules(None) == (None, None)
    assert model(**train_batch()).loss > 0  # its own head stands for the target's, as DeepSpec stores it


def test_loss_without_the_target_s_head_says_so() -> None:
    model = small.drafter(**small.STORAGE["reduced own embedding"])
    with pytest.raises(ValueError, match=r"needs the target's LM head.*Call `drafter.share_with\(target\)`"):
        model(**train_batch())


def test_target_without_the_part_is_refused() -> None:
    bare = small.target().model
    for borrow in (lambda m: m.share_with(bare), lambda m: m.draft(ANCHORS, small.states(), target=bare)):
        with pytest.raises(
            ValueError, match=r"borrows the target's LM head, and Qwen3Model .* has none. Pass the whole"
        ):
            borrow(small.drafter())
    embedding_only = small.drafter(share_lm_head=False)
    embedding_only.share_with(bare)
    assert embedding_only.draft(ANCHORS, small.states()).token_ids.shape == (2, 4)


def test_wrapped_targets_are_looked_through() -> None:
    target = small.target()
    wrapper = nn.DataParallel(target)
    model = small.drafter()
    model.share_with(wrapper)
    assert model.shared_modules(None).lm_head is target.lm_head


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_forget_what_was_borrowed(clone) -> None:
    """Else a deep copy would hold a second embedding, and a pickle the target's."""
    target, model = pair(draft_vocab_size=len(small.DRAFT_IDS))
    other = clone(model)
    assert (other._shared, other._teacher) == (None, None)
    assert model._shared.embedding is target.model.embed_tokens
    assert model._teacher is not None
    with pytest.raises(ValueError, match="no target is known"):
        other.draft(ANCHORS, small.states())
    expected = model.draft(ANCHORS, small.states())
    got = other.draft(ANCHORS, small.states(), target=target)
    assert torch.equal(got.token_ids, expected.token_ids)
    torch.testing.assert_close(got.logits, expected.logits)
    size = sum(tensor.nbytes for tensor in model.state_dict().values())
    assert len(pickle.dumps(model)) < size + 40_000  # code names, config; the target's tables have 8 KiB each


# --- dtypes ---------------------------------------------------------------------------------------------------------


def fresh_target(dtype: torch.dtype = torch.float32):
    return copy.deepcopy(small.target()).to(dtype)


@pytest.mark.parametrize("storage", ["borrowed", "own", "reduced"])
@pytest.mark.parametrize("heads", ["vanilla-markov", "gated-markov", "rnn-markov", "none-plain"])
@pytest.mark.parametrize("dtypes", [
    (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float16, torch.float32),
    (torch.float32, torch.float16), (torch.bfloat16, torch.float16),
])  # fmt: skip
def test_drafter_and_target_may_have_different_dtypes(storage, heads, dtypes) -> None:
    ours, theirs = dtypes
    exact = small.drafter(**small.HEADS[heads], **small.STORAGE[storage])
    exact.share_with(fresh_target())
    model = copy.deepcopy(exact).to(ours)
    target = fresh_target(theirs)
    model.share_with(target)
    features = small.states()
    out = model.draft(ANCHORS, features.to(theirs))
    assert out.hidden_states.dtype is out.context_features.dtype is ours
    assert out.confidence_logits.dtype is torch.float32
    expected = exact.draft(ANCHORS, features)
    # Slot 0 follows the anchor in both; later slots may follow different tokens.
    close = {"atol": 0.12, "rtol": 0.05}  # two layers of bfloat16, 2^-8 each product
    torch.testing.assert_close(out.logits[:, 0].float(), expected.logits[:, 0], **close)
    gap = out.confidence_logits[:, 0].sigmoid() - expected.confidence_logits[:, 0].sigmoid()
    assert gap.abs().max() < (2e-2 if ours is torch.bfloat16 else 1e-2)
    loss = model.train()(
        **{key: value.to(theirs) if key.endswith("states") else value for key, value in train_batch().items()}
    ).loss
    loss.backward()
    assert loss.dtype is torch.float32
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("cast", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.bfloat16()])
@pytest.mark.parametrize("kind", ["default", "proportional"])
def test_a_cast_keeps_the_rotary_frequencies(cast, kind) -> None:
    """In bfloat16 they would turn keys at position 5,000 to anywhere: low acceptance at long context, no error."""
    rope = {"rope_type": kind, "rope_theta": 1e6}
    model = small.drafter(rope_parameters=rope)
    frequencies = model.rotary_emb.inv_freq.clone()
    there = cast(model)
    assert there.fc.weight.dtype is not torch.float32
    for buffer in (there.rotary_emb.inv_freq, there.rotary_emb.original_inv_freq):
        assert torch.equal(buffer, frequencies)
    positions = torch.tensor([[5000]])
    cos, _ = there.rotary_emb(torch.zeros(1, dtype=torch.bfloat16), positions)
    assert torch.equal(cos[0, 0, :8], (5000 * frequencies).cos().bfloat16())
    assert there.float().rotary_emb.inv_freq.dtype is torch.float32
    assert torch.equal(copy.deepcopy(there).rotary_emb.inv_freq, frequencies)
    assert there.to("meta").rotary_emb.inv_freq.is_meta


# --- quantised and offloaded targets --------------------------------------------------------------------------------


class Packed(nn.Linear):
    """A head whose weight is two 4-bit codes a byte, as bitsandbytes keeps it: only calling it gives numbers."""

    def __init__(self, plain: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.plain = [plain]
        codes = torch.zeros(plain.weight.numel() // 2, 1, dtype=torch.uint8)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.bias = None
        self.seen: list[torch.dtype] = []

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        assert hidden.is_floating_point()
        self.seen.append(hidden.dtype)
        return nn.functional.linear(hidden, self.plain[0].weight.to(hidden.dtype))

    def _apply(self, fn, recurse=True):
        raise AssertionError("a quantised model is not moved or cast")


class Codes(nn.Module):
    """A head with buffers only, as GPTQ keeps it."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("qweight", torch.zeros(4, 4, dtype=torch.int32))
        self.plain = [plain]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(hidden, self.plain[0].weight.to(hidden.dtype))


class Float8(Codes):
    """A head in 8-bit floats, which takes activations of a wider type."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__(plain)
        del self.qweight
        self.weight = nn.Parameter(plain.weight.to(torch.float8_e4m3fn), requires_grad=False)


@pytest.mark.parametrize("kind", [Packed, Codes, Float8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("storage", ["borrowed", "reduced"])
def test_quantised_head_is_called_and_never_touched(kind, dtype, storage) -> None:
    target = fresh_target()
    exact = small.drafter(**small.STORAGE[storage]).to(dtype)
    exact.share_with(target)
    expected, loss = exact.draft(ANCHORS, small.states()), exact(**(batch := train_batch())).loss
    target.lm_head = kind(target.lm_head)
    model = small.drafter(**small.STORAGE[storage]).to(dtype)
    model.share_with(target)
    out = model.draft(ANCHORS, small.states())
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype is torch.float32 else {"atol": 0.1, "rtol": 0.05}
    torch.testing.assert_close(out.base_logits.float(), expected.base_logits.float(), **tolerance)
    torch.testing.assert_close(model(**batch).loss, loss, **tolerance)
    with_logsumexp = model(**batch, target_logsumexp=torch.ones(2, 10))
    assert with_logsumexp.loss.isfinite()
    assert model._teacher.rows is None  # no rows to take from codes
    if kind is Packed:
        assert set(target.lm_head.seen) <= {dtype, torch.float32}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantised_drafter_computes_in_its_norms_dtype(dtype) -> None:
    _, model = pair()
    model.to(dtype)
    expected = model.draft(ANCHORS, small.states())
    model.fc = Packed(model.fc)
    out = model.draft(ANCHORS, small.states())
    assert set(model.fc.seen) == {dtype}
    torch.testing.assert_close(out.logits, expected.logits)


def test_plain_rows_are_taken_for_a_reduced_vocabulary() -> None:
    ids = torch.tensor(small.DRAFT_IDS)
    target = small.target()
    assert torch.equal(teacher_head(target, ids).rows, target.lm_head.weight[ids])
    assert teacher_head(target, None).rows is None
    assert teacher_head(small.target("gemma4"), ids).rows is None  # a soft cap needs all logits
    assert teacher_head(target.model, ids) is None


class WithoutTensors(nn.Module):
    def forward(self, x):
        return x + 1


def test_modules_without_tensors_are_called_as_they_are() -> None:
    assert call_head(WithoutTensors(), torch.zeros(1)).item() == 1
    assert call_embedding(WithoutTensors(), torch.zeros(1)).item() == 1


def test_offloaded_target_lends_its_modules() -> None:
    """accelerate keeps weights on the meta device and brings them in by a hook when a module is called."""
    accelerate = pytest.importorskip("accelerate")
    model = small.drafter()
    target = fresh_target()
    expected = model.draft(ANCHORS, small.states(), target=target)
    accelerate.cpu_offload(target, execution_device="cpu")
    assert target.lm_head.weight.is_meta
    out = model.draft(ANCHORS, small.states(), target=target)
    assert torch.equal(out.logits, expected.logits)


def test_tied_target_is_borrowed_as_it_is() -> None:
    config = Qwen3Config(
        vocab_size=small.VOCAB, hidden_size=small.WIDTH, intermediate_size=48, num_hidden_layers=4,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, tie_word_embeddings=True,
    )  # fmt: skip
    target = Qwen3ForCausalLM(config)
    model = small.drafter()
    model.share_with(target)
    shared = model.shared_modules(None)
    assert shared.embedding.weight is shared.lm_head.weight
    model.train()(**train_batch()).loss.backward()
    assert DSparkDrafter is type(model)
    assert not {"embed_tokens.weight", "lm_head.weight"} & set(model.state_dict())
