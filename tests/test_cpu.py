"""`optimize_for_cpu`: packed models compute the same, hold no second copy, refuse by name, and come back bit for bit.

Catches: weights lost, copied or untied by a round trip, garbage in a checkpoint, a failure that leaves half a model.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import PreTrainedModel

from dspark import cpu as cpu_module
from dspark import packed_blocks
from dspark.cpu import PackedLayers, optimize_for_cpu
from dspark.packed_blocks import HalfBlocks, half_exponent
from dspark.packed_weight import PackedLinear, PackedWeight
from tests.packing import CLOSE, IDS, TARGETS, assert_same, drafter_of, greedy, snapshot, target

needs_half = pytest.mark.skipif(packed_blocks.why_not_half() is not None, reason="torch was built without FBGEMM")


@pytest.mark.parametrize("kind", TARGETS)
@torch.no_grad()
def test_a_packed_target_computes_the_same_and_comes_back_bit_for_bit(kind: str) -> None:
    model = target(kind)
    before, parameters = snapshot(model), dict(model.named_parameters())
    plain, text = model(IDS).logits, greedy(model)
    handle = optimize_for_cpu(model)
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    assert handle.packed == linears
    assert "lm_head" in linears or "embed_out" in linears
    assert all(isinstance(model.get_submodule(name), PackedLinear) for name in linears)
    torch.testing.assert_close(model(IDS).logits, plain, **CLOSE)
    assert greedy(model) == greedy(model) == text
    assert (model.dtype, model.device.type) == (torch.float32, "cpu")
    assert_same(model, before)
    handle.restore()
    handle.restore()
    assert_same(model, before)
    restored = dict(model.named_parameters())
    assert all(restored[name] is parameter for name, parameter in parameters.items())
    assert not any(isinstance(module, PackedLinear) for module in model.modules())
    assert torch.equal(model(IDS).logits, plain)
    assert "_apply" not in model.__dict__


def test_conv1d_layers_of_gpt2_are_left_alone() -> None:
    handle = optimize_for_cpu(target("gpt2"))
    assert handle.packed == ["lm_head"]
    assert handle.skipped["transformer.h.0.attn.c_attn"] == "Conv1D keeps its weight transposed"


@torch.no_grad()
@pytest.mark.parametrize("shares", [True, False])
def test_a_drafter_packs_and_borrows_packed_modules(shares: bool) -> None:
    model = target("llama tied")
    drafter = drafter_of(model, share_lm_head=shares, share_embedding=shares)
    states = torch.randn(2, 5, drafter.config.context_width)
    drafter.share_with(model)  # before packing: the borrowed modules stay the same objects
    before, plain = snapshot(drafter), drafter.draft(IDS[:, 0], states)
    with optimize_for_cpu(model), optimize_for_cpu(drafter) as handle:
        assert {"fc", "markov_head.markov_w2", "confidence_head.proj"} <= set(handle.packed)
        assert ("lm_head" in handle.packed) is not shares
        for packed in (drafter.draft(IDS[:, 0], states), drafter.draft(IDS[:, 0], states, target=model)):
            torch.testing.assert_close(packed.base_logits, plain.base_logits, **CLOSE)
            assert torch.equal(packed.token_ids, plain.token_ids)
    assert_same(drafter, before)
    assert torch.equal(drafter.draft(IDS[:, 0], states).logits, plain.logits)


def test_plain_rows_are_freed_and_tied_ones_are_counted() -> None:
    model = target("llama tied")
    layer = model.model.layers[0].mlp.up_proj
    storages = {
        "layer": StorageWeakRef(layer.weight.untyped_storage()),
        "embedding": StorageWeakRef(model.model.embed_tokens.weight.untyped_storage()),
    }
    head, count = model.lm_head.weight, model.num_parameters()
    handle = optimize_for_cpu(model)
    assert storages["layer"].expired()
    assert not storages["embedding"].expired()
    assert isinstance(layer.weight, PackedWeight)
    assert isinstance(layer.weight, nn.Parameter)
    assert layer.weight.shape == (48, 32)
    assert model.lm_head.weight is head is model.model.embed_tokens.weight
    assert handle.extra_bytes >= head.nbytes
    assert model.num_parameters() == count
    handle.restore()
    assert handle.extra_bytes == 0


def test_the_context_manager_restores_after_an_exception() -> None:
    model = target()
    before = snapshot(model)
    with pytest.raises(ZeroDivisionError), optimize_for_cpu(model):
        raise ZeroDivisionError
    assert_same(model, before)
    assert type(model.lm_head) is nn.Linear


def test_a_failure_while_packing_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = target()
    before, pack = snapshot(model), PackedLayers._pack

    def failing(self: Any, layers: dict[str, nn.Linear], *args: Any, **kwargs: Any) -> None:
        if "lm_head" in layers:
            raise MemoryError
        pack(self, layers, *args, **kwargs)

    monkeypatch.setattr(PackedLayers, "_pack", failing)
    with pytest.raises(MemoryError):
        optimize_for_cpu(model)
    assert_same(model, before)
    assert type(model.model.layers[0].mlp.up_proj) is nn.Linear


def test_layers_already_packed_stay_with_the_handle_that_packed_them() -> None:
    model = target()
    outer = optimize_for_cpu(model)
    with optimize_for_cpu(model) as inner:
        assert inner.packed == []
    assert isinstance(model.lm_head, PackedLinear)
    with pytest.raises(RuntimeError, match="Moving or casting"):
        model.half()
    outer.restore()
    assert type(model.lm_head) is nn.Linear


@pytest.mark.parametrize("kind", ["llama", "llama tied"])
def test_a_packed_model_saves_plain_weights(kind: str, tmp_path: Any) -> None:
    model = target(kind)
    before = snapshot(model)
    with optimize_for_cpu(model):
        model.save_pretrained(tmp_path)
        assert model.state_dict()["lm_head.weight"].is_contiguous()
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert_same(loaded, before)


def test_freezing_a_packed_model_outlives_the_packing() -> None:
    model = target()
    with optimize_for_cpu(model):
        model.requires_grad_(False)
    assert not any(parameter.requires_grad for parameter in model.parameters())


@torch.no_grad()
def test_bfloat16_layers_pack_in_float32_without_loss() -> None:
    model = target().to(torch.bfloat16)
    before, plain = snapshot(model), model(IDS).logits
    with optimize_for_cpu(model, dtype=torch.float32) as handle:
        packed = model(IDS).logits
        assert model.lm_head.weight.dtype == packed.dtype == torch.bfloat16
        assert handle.extra_bytes >= model.lm_head.weight.nbytes
        torch.testing.assert_close(packed, plain, atol=0.1, rtol=0.1)  # a few roundings of bf16 apart
    assert_same(model, before)


def stored_in(dtype: torch.dtype, kind: str = "llama tied") -> PreTrainedModel:
    """A float32 model whose linear weights are numbers of a 16-bit checkpoint."""
    model = target(kind)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))
    return model


@needs_half
@torch.no_grad()
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["llama tied", "qwen2"])  # qwen2: biases
def test_numbers_of_a_16_bit_checkpoint_are_packed_in_16_bits_bit_for_bit(stored: torch.dtype, kind: str) -> None:
    model = stored_in(stored, kind)
    layer = model.model.layers[0].mlp.up_proj
    before, plain, text = snapshot(model), model(IDS).logits, greedy(model)
    size = layer.weight.nbytes
    with optimize_for_cpu(model) as half:
        assert isinstance(layer.packed.blocks, HalfBlocks)
        assert layer.packed.blocks.nbytes == size // 2
        assert half.extra_bytes < 0 or kind == "llama tied"
        assert model.dtype == model(IDS).logits.dtype == torch.float32
        torch.testing.assert_close(model(IDS).logits, plain, **CLOSE)
        assert greedy(model) == text
        assert_same(model, before)
    assert_same(model, before)
    assert torch.equal(model(IDS).logits, plain)
    with optimize_for_cpu(model, dtype=torch.float32) as wide:
        assert not isinstance(layer.packed.blocks, HalfBlocks)
        assert wide.extra_bytes > half.extra_bytes


@pytest.mark.parametrize(
    ("numbers", "exponent"),
    [
        ([1.5, -3.0, 0.0], 0),
        ([0.0, 0.0], 0),
        ([2.0**-30, -3 * 2.0**-29], 42),  # too small for float16, not so with a factor
        ([2.0**20, 1.0], -6),  # too large
        ([1 + 2.0**-20], None),  # too many digits
        ([1.0, 2.0**-45], None),  # too far apart
        ([2.0**-80, -(2.0**-81)], 94),
        ([2.0**-120, 2.0**-120], None),  # the factor would not be a float32
        ([2.0**127, 2.0**126], None),
        ([float("inf"), 1.0], None),
        ([float("nan")], None),
    ],
)
def test_the_power_of_two_that_makes_numbers_float16(numbers: list[float], exponent: int | None) -> None:
    weight = torch.tensor([numbers])
    assert half_exponent(weight) == exponent
    if exponent is not None and packed_blocks.why_not_half() is None:
        assert torch.equal(HalfBlocks(weight).dense(), weight)


@needs_half
@torch.no_grad()
def test_a_float16_weight_that_is_not_finite_is_packed_as_it_is() -> None:
    model = target().half()
    layer = model.model.layers[1].mlp.down_proj
    layer.weight[0, 0] = float("inf")
    before = snapshot(model)
    with optimize_for_cpu(model):
        assert not isinstance(layer.packed.blocks, HalfBlocks)
        assert_same(model, before)
    with pytest.raises(ValueError, match=r"down_proj.*would round"):
        optimize_for_cpu(model, dtype=torch.float16)


def test_without_half_products_a_layer_keeps_its_own_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_module, "why_not_half", lambda: "no FBGEMM in this build")
    model = stored_in(torch.bfloat16)
    with optimize_for_cpu(model):
        assert not isinstance(model.lm_head.packed.blocks, HalfBlocks)
    with pytest.raises(RuntimeError, match=r"no packed torch\.float16 product here: no FBGEMM.*dtype=torch\.float32"):
        optimize_for_cpu(model, dtype=torch.float16)


def test_a_dtype_without_products_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = target().to(torch.bfloat16)
    text = greedy(model, 2)
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        with optimize_for_cpu(model):
            assert not isinstance(model.lm_head.packed.blocks, HalfBlocks)
            greedy(model, 2)
    monkeypatch.setattr(cpu_module, "why_not_onednn", lambda dtype: f"no {dtype}")
    if packed_blocks.why_not_half() is None:
        with optimize_for_cpu(model):  # exact all the same
            assert isinstance(model.lm_head.packed.blocks, HalfBlocks)
            assert greedy(model, 2) == text
    monkeypatch.setattr(cpu_module, "why_not_half", lambda: "no FBGEMM")
    with pytest.raises(RuntimeError, match=r"no packed torch\.bfloat16 product here.*dtype=torch\.float32"):
        optimize_for_cpu(model)


class _Codes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("qweight", torch.zeros(4, 4, dtype=torch.int32))


def _with(model: PreTrainedModel, module: nn.Module) -> PreTrainedModel:
    model.model.layers[0].mlp.up_proj = module
    return model


def _int8_linear() -> nn.Linear:
    layer = nn.Linear(32, 48, bias=False)
    layer.weight = nn.Parameter(torch.zeros(48, 32, dtype=torch.int8), requires_grad=False)
    return layer


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: nn.Linear(2, 2), TypeError, "PreTrainedModel.*got Linear"),
        (lambda: target().to("meta"), ValueError, "on meta.*not loaded"),
        (lambda: _with(target(), _Codes()), ValueError, r"up_proj.*torch\.int32 codes.*quantised"),
        (lambda: _with(target(), _int8_linear()), ValueError, r"up_proj.*torch\.int8 codes.*quantised"),
        (lambda: target().double(), ValueError, r"q_proj.*torch\.float64.*supported are torch\.float32"),
        (lambda: transformers.GPT2Model(target("gpt2").config), ValueError, "no `nn.Linear` layer"),
    ],
)
def test_what_cannot_be_packed_is_refused_by_name(make: Any, error: type[Exception], message: str) -> None:
    model = make()
    with pytest.raises(error, match=message):
        optimize_for_cpu(model)
    assert not any(isinstance(module, PackedLinear) for module in model.modules())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_packing_that_would_round_weights_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"would round.*dtype={dtype}"):
        optimize_for_cpu(target(), dtype=dtype)


def test_a_build_without_onednn_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"no oneDNN linear products.*use the model unpacked"):
        optimize_for_cpu(target())
