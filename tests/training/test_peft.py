"""Training of adapters: what is trained, interruption, the loss's gradient, requests that make no sense.

Catches: a resumed run that starts from fresh matrices or another base, weights trained that are not saved, LoRA in the
vocabulary-wide layers without a gradient from the chunked loss.
"""

from __future__ import annotations

import pytest
import torch

peft = pytest.importorskip("peft")

from dspark import DSparkDrafter  # noqa: E402
from dspark.objective import Objective  # noqa: E402
from dspark.training import AdapterShape, adapt  # noqa: E402
from tests.peft.wrapped import HEADS, KINDS, VOCAB, base_folder, drafts, same_drafts  # noqa: E402

from . import tiny  # noqa: E402
from .test_trainer import Interrupted, dies_at  # noqa: E402


@pytest.mark.parametrize("shape", [AdapterShape("lora", rank=4), AdapterShape("dora", rank=2), AdapterShape("ia3")])
def test_resumed_run_equals_uninterrupted_run_bit_for_bit(tmp_path, shape) -> None:
    target, data = tiny.llama(), tiny.answers(tmp_path, 12)
    base = base_folder(tmp_path / "base", target, draft_vocab=VOCAB)
    how = {
        "max_steps": 8, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "save_strategy": "steps",
        "save_steps": 2, "save_total_limit": 1, "learning_rate": 1e-2,
    }  # fmt: skip

    def fresh():
        return adapt(DSparkDrafter.from_pretrained(base), shape)

    torch.manual_seed(1)
    whole = fresh()
    tiny.trainer(tmp_path / "whole", whole, target, data, **how).train()
    torch.manual_seed(1)
    killed = tiny.trainer(tmp_path / "killed", fresh(), target, data, **how)
    killed.__class__ = dies_at(5)
    with pytest.raises(Interrupted):
        killed.train()
    torch.manual_seed(99)  # nothing of the first process may be needed, its fresh matrices neither
    resumed = fresh()
    tiny.trainer(tmp_path / "killed", resumed, target, data, **how).train(resume_from_checkpoint=True)
    one, other = (peft.get_peft_model_state_dict(model) for model in (whole, resumed))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert same_drafts(drafts(whole.eval(), target), drafts(resumed.eval(), target))
    checkpoint = DSparkDrafter.from_pretrained(tmp_path / "killed" / "checkpoint-8")
    assert same_drafts(drafts(checkpoint, target), drafts(whole, target))
    note = checkpoint.peft_config["default"].auto_mapping
    assert note["draft_vocab_hash"] == checkpoint.config.target["draft_vocab_hash"]


def test_all_linear_layers_of_the_draft_layers_are_adapted_and_heads_trained_whole() -> None:
    drafter = tiny.drafter_for(tiny.llama(), draft_vocab=VOCAB, markov_head_type="gated")
    model = adapt(drafter, AdapterShape())
    config = model.peft_config["default"]
    assert (config.r, config.lora_alpha, config.modules_to_save) == (64, 64, HEADS)
    adapted = {name.removesuffix(".lora_A") for name, _ in drafter.named_modules() if name.endswith(".lora_A")}
    assert adapted == {"fc"} | {
        f"layers.{i}.{part}"
        for i in (0, 1)
        for part in (*(f"self_attn.{p}_proj" for p in "qkvo"), *(f"mlp.{p}_proj" for p in ("gate", "up", "down")))
    }
    trained = {name for name, parameter in drafter.named_parameters() if parameter.requires_grad}
    assert all("lora_" in name or name.split(".")[0] in HEADS for name in trained)
    assert not any(p.requires_grad for p in (*drafter.lm_head.parameters(), drafter.norm.weight))


def test_targets_are_found_by_their_names() -> None:
    def adapted(*targets, **changes) -> set:
        drafter = tiny.drafter_for(tiny.llama(), **changes)
        adapt(drafter, AdapterShape("ia3", targets=targets))
        return {name for name, module in drafter.named_modules() if hasattr(module, "ia3_l")}

    assert adapted("layers.1.self_attn.q_proj", "down_proj") == {
        "layers.0.mlp.down_proj", "layers.1.mlp.down_proj", "layers.1.self_attn.q_proj",
    }  # fmt: skip
    assert adapted("lm_head", draft_vocab=VOCAB) == {"lm_head"}
    for target, message in (
        ("lm_head", r"no such linear layer of its own .* There are: down_proj, fc, gate_proj"),
        ("markov_w2", "trains its heads whole already"),
        ("x_proj", "no such linear layer"),
    ):
        with pytest.raises(ValueError, match=f"Adapter target '{target}': DSparkDrafter .*{message}"):
            adapted(target)


def test_requests_that_make_no_sense_are_refused(tmp_path) -> None:
    for fields, message in (
        ({"kind": "vera"}, "`kind` must be one of lora, dora, ia3, got 'vera'"),
        ({"kind": "ia3", "rank": 4}, "neither rank nor alpha"),
        ({"rank": 0}, "`rank` must be at least 1"),
        ({"alpha": 0}, "`alpha` must be positive"),
    ):
        with pytest.raises(ValueError, match=message):
            AdapterShape(**fields)
    target = tiny.llama()
    model = adapt(tiny.drafter_for(target, draft_vocab=VOCAB), AdapterShape("ia3"))
    with pytest.raises(ValueError, match="has an adapter already"):
        adapt(model.get_base_model(), AdapterShape("ia3"))
    with pytest.raises(ValueError, match="an adapter does not save"):
        tiny.trainer(tmp_path, model, target, tiny.answers(tmp_path), train_lm_head=True)


@pytest.mark.parametrize("kind", ["in the heads", "whole LM head", "everywhere"])
def test_the_chunked_loss_has_the_gradients_of_the_plain_one(tmp_path, kind) -> None:
    """Also of matrices around the vocabulary-wide layers, in whatever module PEFT puts them."""
    target = tiny.llama()
    config = KINDS[kind]()
    if hasattr(config, "lora_dropout"):
        config.lora_dropout = 0.0
    model = peft.get_peft_model(tiny.drafter_for(target, draft_vocab=VOCAB), config)
    run = tiny.trainer(tmp_path, model, target, tiny.answers(tmp_path, 4))
    batch = run._with_features(run.data_collator([run.train_dataset[i] for i in range(4)]))
    run._add_anchors(batch, 0, 0)
    gradients = []
    for chunk_size in (None, 5):
        run.drafter.objective = Objective(chunk_size=chunk_size)
        model.zero_grad()
        model(**batch).loss.backward()
        trained = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        gradients.append({name: grad.clone() for name, grad in trained.items() if grad is not None})
    plain, chunked = gradients
    assert plain.keys() == chunked.keys()
    assert any("markov_w2" in name for name in plain)
    for name, grad in plain.items():
        torch.testing.assert_close(grad, chunked[name], rtol=1e-4, atol=1e-6)
    assert all(parameter.grad is None for parameter in model.parameters() if not parameter.requires_grad)
