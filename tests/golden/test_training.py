"""The training forward and loss against the reference: tensors, terms, logged metrics, gradients.

Catches: shifted labels, blocks that see the future or each other, a halved L1, wrong decay or denominators, a detached
confidence path.
"""

from __future__ import annotations

import pytest
import torch

from dspark.objective import Objective, block_attention_mask, build_blocks

from . import common

CASES = common.cases("training")
TOL = {"atol": 2e-4, "rtol": 2e-4}


def run(model, t, objective: Objective):
    model.objective = objective
    return model(
        t["input_ids"], t["target_hidden_states"], t["loss_mask"], t["target_last_hidden_states"],
        anchor_positions=t["anchor_positions"], anchor_keep_mask=t["block_keep_mask"],
    )  # fmt: skip


def objective_of(setting, chunk_size: int | None) -> Objective:
    return Objective(
        ce=setting["ce_loss_alpha"], l1=setting["l1_loss_alpha"], confidence=setting["confidence_head_alpha"],
        decay=setting["loss_decay_gamma"], chunk_size=chunk_size,
    )  # fmt: skip


@pytest.mark.parametrize(("name", "index"), CASES)
def test_blocks_and_masks(name: str, index: int) -> None:
    case = common.read("training", name)["cases"][index]
    t = common.tensors("training", case["file"])
    size = common.read("training", name)["block_size"]
    blocks = build_blocks(t["input_ids"], t["loss_mask"], t["anchor_positions"], t["block_keep_mask"], size)
    assert torch.equal(blocks.labels, t["target_ids"])
    assert torch.equal(blocks.supervised, t["eval_mask"])
    mask = block_attention_mask(
        t["anchor_positions"], t["block_keep_mask"], context_length=t["input_ids"].shape[1], block_size=size
    )
    live = t["block_keep_mask"].repeat_interleave(size, dim=1)[:, None, :, None].expand_as(mask)
    assert torch.equal(mask[live], t["attention_mask"].bool()[live])


@pytest.mark.parametrize(("name", "index"), CASES)
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_forward_tensors(name: str, index: int, attn: str) -> None:
    case = common.read("training", name)["cases"][index]
    t = common.tensors("training", case["file"])
    model = common.drafter(name, attn_implementation=attn)
    out = run(model, t, Objective(chunk_size=None))
    live = t["eval_mask"]
    torch.testing.assert_close(out.logits[live], t["draft_logits"][live], **TOL)
    torch.testing.assert_close(out.acceptance[live], t["accept_rate"][live], **TOL)
    if "confidence_pred" in t:
        torch.testing.assert_close(out.confidence_logits[live], t["confidence_pred"][live], **TOL)


@pytest.mark.parametrize(("name", "index"), CASES)
@pytest.mark.parametrize("chunk_size", [None, 5])
def test_losses_and_gradients(name: str, index: int, chunk_size: int | None) -> None:
    case = common.read("training", name)["cases"][index]
    t = common.tensors("training", case["file"])
    for i, setting in enumerate(case["settings"]):
        model = common.drafter(name)
        for part in (model.embed_tokens, model.lm_head):
            part.requires_grad_(False)
        out = run(model, t, objective_of(setting, chunk_size))
        for ours, theirs in (
            ("loss", "loss"),
            ("ce_loss", "ce_loss"),
            ("l1_loss", "l1_loss"),
            ("confidence_loss", "confidence_loss"),
        ):
            torch.testing.assert_close(float(out[ours].detach()), setting[theirs] or 0.0, rtol=1e-4, atol=1e-5)
        out.loss.backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.requires_grad and p.grad is not None}
        for parameter, norm in setting["grad_norms"].items():
            got = float(grads[parameter].norm()) if parameter in grads else 0.0
            torch.testing.assert_close(got, norm, rtol=2e-3, atol=1e-6, msg=lambda m, p=parameter: f"{p}: {m}")
        if case["grads_file"] and i == case["grads_setting_index"]:
            for parameter, grad in common.tensors("training", case["grads_file"]).items():
                torch.testing.assert_close(grads[parameter], grad, rtol=2e-3, atol=2e-5)
