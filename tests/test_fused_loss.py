"""The chunked loss against the plain one: values, gradients, and what is alive at a time.

Catches: a gradient that misses a term, a softcap or a trained head; weights that depend on the chunk; positions that
move when unsupervised ones are left out; a vocabulary-wide tensor of all positions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dspark.objective import Objective, block_attention_mask, flex_block_mask

from . import small

OBJECTIVES = {
    "all": Objective(ce=0.3, l1=0.7, confidence=0.5),
    "cross-entropy": Objective(ce=1, l1=0, confidence=0),
    "distance": Objective(ce=0, l1=1, confidence=0, decay=None),
    "confidence": Objective(ce=0, l1=0, confidence=1),
    "detached": Objective(detach_confidence=True),
}


def run(model: Any, objective: Objective, scale: float = 1.0, **batch: torch.Tensor) -> tuple[Any, dict[str, Any]]:
    """Output and gradients of `scale * loss`."""
    model.objective = objective
    model.zero_grad()
    out = model(**batch)
    (scale * out.loss).backward()
    return out, {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def batch_for(model: Any) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    mask = torch.ones(2, 14, dtype=torch.bool)
    mask[0, :5], mask[1, 10:] = False, False
    return {
        "input_ids": torch.randint(small.VOCAB, (2, 14), generator=generator),
        "target_hidden_states": small.states(2, 14),
        "loss_mask": mask,
        "target_last_hidden_states": torch.randn(2, 14, small.WIDTH, generator=generator),
        "anchor_positions": torch.tensor([[5, 7, 12, 0], [1, 2, 6, 8]]),
        "anchor_keep_mask": torch.tensor([[True, True, True, False], [True, True, True, True]]),
    }


def pair(name: str) -> Any:
    family, fields = small.CASES[name]
    model = small.drafter(family, **fields)
    model.share_with(small.target(family))
    return model


def assert_same(plain: tuple[Any, dict], chunked: tuple[Any, dict], tolerance: float = 1e-5) -> None:
    for term in ("loss", "ce_loss", "l1_loss", "confidence_loss"):
        torch.testing.assert_close(chunked[0][term], plain[0][term], atol=tolerance, rtol=tolerance)
    if plain[0].acceptance is not None:
        live = plain[0].supervised
        torch.testing.assert_close(
            chunked[0].acceptance[live], plain[0].acceptance[live], atol=tolerance, rtol=tolerance
        )
    for name, expected in plain[1].items():
        found = chunked[1][name]
        if expected is None or not expected.any():
            assert found is None or not found.any(), name
        else:
            torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance, msg=lambda m, n=name: n + m)


@pytest.mark.parametrize("name", small.CASES)
def test_every_drafter(name: str) -> None:
    model = pair(name)
    batch = batch_for(model)
    plain = run(model, Objective(chunk_size=None), **batch)
    assert plain[0].logits is not None
    for chunk_size in (1, 5, 1000):
        assert_same(plain, run(model, Objective(chunk_size=chunk_size), **batch))


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
@pytest.mark.parametrize("storage", ["own", "reduced"])
def test_every_objective(objective: Objective, storage: str) -> None:
    model = small.drafter(**small.STORAGE[storage])
    model.share_with(small.target())
    batch = batch_for(model)
    plain = run(model, replace(objective, chunk_size=None), scale=3.0, **batch)
    assert_same(plain, run(model, replace(objective, chunk_size=4), scale=3.0, **batch))


def test_a_frozen_head_gets_no_gradient_and_a_dropout_one_is_called_once_per_chunk() -> None:
    model = small.drafter(share_lm_head=False)
    model.share_with(small.target())
    model.lm_head.requires_grad_(False)
    calls = []
    model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    batch = batch_for(model)
    out, grads = run(model, Objective(chunk_size=8), **batch)
    assert grads["lm_head.weight"] is None
    assert len(calls) == -(-int(out.supervised.sum()) // 8)


def test_half_precision_stays_close() -> None:
    model = small.drafter().to(torch.bfloat16)
    model.share_with(small.target())
    batch = batch_for(model)
    plain = run(model, Objective(chunk_size=None), **batch)
    assert_same(plain, run(model, Objective(chunk_size=4), **batch), tolerance=3e-2)


def test_no_gradient_is_computed_where_none_is_wanted() -> None:
    model = small.drafter()
    model.share_with(small.target())
    batch = batch_for(model)
    model.objective = Objective(chunk_size=None)
    expected = model(**batch).loss.detach()
    model.objective = Objective(chunk_size=4)
    with torch.no_grad():
        out = model(**batch)
    assert not out.loss.requires_grad
    torch.testing.assert_close(out.loss, expected)


class _Widest(TorchDispatchMode):
    """Rows of the largest tensor made (not viewed) whose last dimension is the vocabulary's."""

    rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {leaf.data_ptr() for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)}
        for leaf in tree_leaves(out):
            is_wide = isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[-1] == small.VOCAB
            if is_wide and leaf.data_ptr() not in given:
                self.rows = max(self.rows, leaf.numel() // small.VOCAB)
        return out


@pytest.mark.parametrize(("chunk_size", "most"), [(4, 4), (None, 32)])
def test_vocabulary_wide_tensors_are_a_chunk_high(chunk_size: int | None, most: int) -> None:
    """The plain loss, measured the same way, holds all 2 x 4 blocks of 4 positions."""
    model = small.drafter(share_lm_head=True)
    model.share_with(small.target())
    with _Widest() as widest:
        run(model, Objective(chunk_size=chunk_size), **batch_for(model))
    assert widest.rows == most


@pytest.mark.parametrize("family", ["qwen3", "gemma4"])
def test_flex_attention_equals_sdpa(family: str) -> None:
    """Values only: flex attention has no backward pass on a CPU."""
    model = small.drafter(family)
    model.share_with(small.target(family))
    outputs = []
    for attention in ("sdpa", "flex_attention"):
        model.set_attn_implementation(attention)
        with torch.no_grad():
            outputs.append(model(**batch_for(model)))
    torch.testing.assert_close(outputs[0].loss, outputs[1].loss)
    torch.testing.assert_close(outputs[0].acceptance, outputs[1].acceptance)


def test_flex_mask_is_the_dense_one() -> None:
    anchors, keep = torch.tensor([[5, 7, 12, 0], [1, 2, 6, 8]]), torch.tensor([[True, True, True, False], [True] * 4])
    shape = {"context_length": 14, "block_size": 3}
    flex = flex_block_mask(anchors, keep, **shape)
    rows, queries, keys = torch.arange(2), torch.arange(12), torch.arange(26)
    grid = flex.mask_mod(rows[:, None, None], rows.new_zeros(()), queries[:, None], keys)
    assert torch.equal(grid, block_attention_mask(anchors, keep, **shape)[:, 0])
