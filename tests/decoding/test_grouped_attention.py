"""Attention by key heads: the sums of stock sdpa in another layout, taken where it applies and nowhere else.

Catches query heads that meet another key head, masks of another window or row, a layout that plain steps, eager
attention or models with a bias per head would get, and a path that is never taken.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.qwen3.modeling_qwen3 import eager_attention_forward

from dspark.decoding import grouped_attention, ragged_attention
from dspark.decoding.grouped_attention import GroupedAttention, attend_grouped, grouped_mask, head_groups
from tests.decoding.pair import hostile, plain, prompt
from tests.decoding.pair import target as make_target


def tensors(rows: int, width: int, slots: int, key_heads: int, groups: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(rows + width)
    query = torch.randn(rows, key_heads * groups, width, 16, generator=generator).to(dtype)
    key = torch.randn(rows, key_heads, slots + 9, 16, generator=generator).to(dtype)[:, :, :slots]
    value = torch.randn(rows, key_heads, slots + 9, 24, generator=generator).to(dtype)[:, :, :slots]
    mask = torch.rand(rows, 1, width, slots, generator=generator) < 0.6
    mask[..., 0] = True
    return query, key, value, mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width", "key_heads", "groups"), [(1, 2, 1, 4), (1, 8, 3, 3), (5, 3, 2, 2)])
@pytest.mark.parametrize("is_additive", [False, True])
def test_equals_stock_sdpa(rows, width, key_heads, groups, dtype, is_additive):
    query, key, value, mask = tensors(rows, width, 40, key_heads, groups, dtype)
    layer = SimpleNamespace(num_key_value_groups=groups, is_causal=True)
    if is_additive:
        mask = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
    wanted, _ = sdpa_attention_forward(layer, query, key, value, mask, scaling=0.3)
    shaped = grouped_mask(mask, groups, dtype)
    found = attend_grouped(query.transpose(1, 2), key, value, shaped, groups, {"scaling": 0.3})
    assert found.shape == wanted.shape
    tolerance = 2e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)
    single, _ = GroupedAttention().attend(sdpa_attention_forward, layer, query, key, value, mask, scaling=0.3)
    assert torch.equal(single, found)
    # The control: heads dealt out the other way round are other attention.
    dealt = query.unflatten(1, (key_heads, groups)).transpose(1, 2).flatten(1, 2)
    if key_heads > 1:
        other = attend_grouped(dealt.transpose(1, 2), key, value, shaped, groups, {"scaling": 0.3})
        assert not torch.allclose(other, wanted, atol=1e-2)


def test_each_mask_of_a_pass_is_its_own():
    query, key, value, mask = tensors(1, 4, 30, 2, 2, torch.float32)
    layer, attention = SimpleNamespace(num_key_value_groups=2), GroupedAttention()
    for one in (mask, ~mask | (torch.arange(30) == 3), mask):
        wanted, _ = sdpa_attention_forward(layer, query, key, value, one)
        found, _ = attention.attend(sdpa_attention_forward, layer, query, key, value, one)
        torch.testing.assert_close(found, wanted, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize(
    ("change", "groups"),
    [
        ({}, 2),
        ({"function": eager_attention_forward}, 1),
        ({"kwargs": {"position_bias": torch.zeros(1, 4, 4, 30)}}, 1),
        ({"kwargs": {"s_aux": torch.zeros(4)}}, 1),
        ({"kwargs": {"position_bias": None, "sliding_window": 8}}, 2),
        ({"layer": SimpleNamespace()}, 1),
        ({"layer": SimpleNamespace(num_key_value_groups=1)}, 1),
        ({"layer": SimpleNamespace(num_key_value_groups=4)}, 1),  # not what the shapes say
        ({"width": 1}, 1),
    ],
)
def test_only_where_stock_sdpa_would_copy(change, groups):
    query, key, _, _ = tensors(1, change.get("width", 4), 30, 2, 2, torch.float32)
    layer = change.get("layer", SimpleNamespace(num_key_value_groups=2))
    function = change.get("function", sdpa_attention_forward)
    assert head_groups(function, layer, query.transpose(1, 2), key, change.get("kwargs", {})) == groups


@pytest.mark.parametrize(("attention", "rows", "is_taken"), [("sdpa", 1, 1), ("sdpa", 3, 1), ("eager", 1, 0)])
def test_rounds_take_it_and_write_the_plain_text(monkeypatch, attention, rows, is_taken):
    widths = []

    def spied(query, *arguments):
        widths.append(query.shape[1])
        return attend_grouped(query, *arguments)

    for module in (grouped_attention, ragged_attention):
        monkeypatch.setattr(module, "attend_grouped", spied)
    target = make_target(attention)
    groups = target.config.num_attention_heads // target.config.num_key_value_heads
    assert groups > 1, "a target whose query heads share no key heads shows nothing"
    ids = prompt().repeat(rows, 1)
    call = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12}
    wanted = plain(target, ids, **call)
    assert not widths
    assert torch.equal(plain(target, ids, assistant_model=hostile(), **call), wanted)
    assert bool(widths) == bool(is_taken)
    assert all(width > 1 for width in widths)
