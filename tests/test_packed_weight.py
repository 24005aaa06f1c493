"""A packed layer: reads as plain, refuses writes, passes gradients or fails loudly, and its rows stand alone.

Catches: a frozen packed target that cuts the gradient of a drafter, an optimizer that trains parameters the model no
longer has, a change that misses the blocks, results that depend on batching.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from dspark.cpu import optimize_for_cpu
from tests.packing import IDS, assert_same, greedy, snapshot, target


def test_what_would_miss_the_blocks_is_refused_and_changes_nothing() -> None:
    model = target()
    before = snapshot(model)
    with optimize_for_cpu(model):
        weight = model.lm_head.weight
        attempts = {
            "Moving or casting": [lambda: model.to(torch.bfloat16), lambda: model.lm_head.double()],
            "Using the memory": [model.share_memory, weight.data_ptr, weight.untyped_storage],
            "Copying": [lambda: copy.deepcopy(model), lambda: copy.deepcopy(weight)],
            "Pickling": [lambda: pickle.dumps(model), lambda: pickle.dumps(weight)],
            "Writing to": [
                lambda: weight.data.zero_(),
                lambda: weight.data.__setitem__(0, 1.0),
                lambda: model.lm_head.load_state_dict({"weight": torch.zeros(96, 32)}),
                lambda: setattr(weight, "data", torch.zeros(96, 32)),
            ],
        }
        for reason, calls in attempts.items():
            for call in calls:
                with pytest.raises(RuntimeError, match=f"{reason}.* packed weight is refused.*restore"):
                    call()
        assert model.to("cpu").float().eval() is model
        assert_same(model, before)


@torch.no_grad()
def test_reading_a_packed_weight_gives_the_plain_numbers() -> None:
    model = target()
    plain, rows = model.lm_head.weight.clone(), torch.tensor([5, 0])
    with optimize_for_cpu(model):
        weight = model.lm_head.weight
        assert torch.equal(weight.detach()[rows], plain[rows])
        assert torch.equal(weight.T @ weight, plain.T @ plain)
        x = torch.randn(3, 32)
        assert torch.equal(nn.functional.linear(x, weight), model.lm_head(x))


def test_gradients_pass_through_a_frozen_packed_layer() -> None:
    model = target("llama tied").requires_grad_(False)
    model.model.layers[0].mlp.up_proj.bias = nn.Parameter(torch.zeros(48))
    x = torch.randn(2, 3, 32, requires_grad=True)
    layers = (model.lm_head, model.model.layers[0].mlp.up_proj)
    bias = layers[1].bias

    def gradients() -> list[torch.Tensor]:
        loss = layers[0](x).square().sum() + layers[1](x).square().sum()
        return list(torch.autograd.grad(loss, [x, bias]))

    plain = gradients()
    with optimize_for_cpu(model):
        packed = gradients()
    torch.testing.assert_close(packed, plain, atol=1e-3, rtol=1e-5)  # sums of about a thousand


@pytest.mark.parametrize("kind", ["llama", "llama tied"])
def test_a_gradient_of_a_packed_weight_is_an_error(kind: str) -> None:
    model = target(kind)
    with optimize_for_cpu(model):
        loss = model(IDS, labels=IDS).loss
        with pytest.raises(RuntimeError, match=r"requires a gradient.*handle\.restore\(\).*requires_grad_\(False\)"):
            loss.backward()
    model(IDS, labels=IDS).loss.backward()
    assert model.lm_head.weight.grad.abs().sum() > 0


def test_an_optimizer_made_before_packing_trains_the_restored_model() -> None:
    model = target()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with optimize_for_cpu(model):
        greedy(model, 2)
    before = snapshot(model)
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    assert not torch.equal(model.model.layers[0].mlp.up_proj.weight, before["model.layers.0.mlp.up_proj.weight"])


@torch.no_grad()
def test_a_weight_changed_or_replaced_while_packed_is_the_one_that_counts() -> None:
    model, other = target("llama tied"), nn.Parameter(torch.ones(48, 32))
    x = torch.randn(1, 32)
    with optimize_for_cpu(model):
        model.model.embed_tokens.weight[0] = 1.0
        torch.testing.assert_close(model.lm_head(x)[:, 0], x.sum(-1))
        model.model.layers[0].mlp.up_proj.weight = other
        torch.testing.assert_close(model.model.layers[0].mlp.up_proj(x), x.sum(-1).expand(1, 48))
    assert model.model.layers[0].mlp.up_proj.weight is other
    assert model.lm_head.weight is model.model.embed_tokens.weight


@torch.no_grad()
def test_wrong_inputs_and_autocast_say_what_a_packed_layer_takes() -> None:
    model = target()
    with optimize_for_cpu(model):
        for wrong in (torch.zeros(1, 31), torch.zeros(1, 32, dtype=torch.bfloat16)):
            with pytest.raises(RuntimeError, match=r"takes torch\.float32 inputs \[\.\.\., 32\], got"):
                model.lm_head(wrong)
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="Under autocast"):
            model(IDS)


@torch.no_grad()
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])  # bfloat16: packed in 16 bits
def test_a_result_does_not_depend_on_how_many_rows_are_computed_at_once(stored: torch.dtype) -> None:
    model = target("llama").to(stored).float()
    with optimize_for_cpu(model):
        layer = model.model.layers[0].mlp.up_proj
        rows = torch.randn(33, 32)
        single = torch.cat([layer(row[None]) for row in rows])
        for count in (0, 2, 8, 33):
            torch.testing.assert_close(layer(rows[:count]), single[:count], atol=1e-6, rtol=0)  # one rounding
        assert torch.equal(layer(rows[5]), layer(rows[5:6])[0])
        assert layer(rows.view(3, 11, 32).transpose(0, 1)).shape == (11, 3, 48)
