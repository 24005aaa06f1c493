"""Adapters trained, saved, loaded in every way there is, and merged: the same drafts each time; the target untouched.

Catches: heads trained whole that come back as they were before, adapters that are not active after loading, drafts
that change by merging, an LM head or embedding of the target that is wrapped, trained, saved or changed.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, Trainer, TrainingArguments

peft = pytest.importorskip("peft")

from dspark import DSparkDrafter  # noqa: E402
from dspark.objective import Objective  # noqa: E402
from dspark.peft_layers import adapter_modules, carries_adapters  # noqa: E402
from tests.peft.wrapped import (  # noqa: E402
    HEADS,
    KINDS,
    Trained,
    close_drafts,
    drafts,
    same_drafts,
    state_hash,
    text,
    trained,
)
from tests.training import tiny  # noqa: E402

load = DSparkDrafter.from_pretrained


@pytest.fixture(scope="module", params=KINDS)
def run(request, tmp_path_factory) -> Trained:
    """After five steps; each kind once."""
    return trained(tmp_path_factory.mktemp("peft"), KINDS[request.param]())


def reloads(folder, base):
    """The drafter of an adapter's folder, in each way it can be loaded."""
    yield load(folder)
    yield peft.PeftModel.from_pretrained(load(base), folder).get_base_model()
    yield AutoModel.from_pretrained(folder)
    drafter = load(base)
    drafter.load_adapter(folder, "by hand")
    yield drafter


def test_training_moves_the_drafts(run) -> None:
    before = drafts(load(run.base).eval(), run.target)
    after = drafts(run.drafter, run.target)
    assert not torch.allclose(before.logits, after.logits, atol=1e-3)
    assert same_drafts(after, drafts(run.model, run.target))


@pytest.mark.parametrize("writer", ["peft", "drafter"])
def test_every_way_of_loading_gives_the_same_drafts(run, tmp_path, writer) -> None:
    (run.model if writer == "peft" else run.drafter).save_pretrained(tmp_path)
    expected = drafts(run.drafter, run.target)
    for drafter in reloads(tmp_path, run.base):
        assert not drafter.training
        assert not any(parameter.requires_grad for parameter in drafter.parameters())
        assert same_drafts(drafts(drafter, run.target), expected)
        for head in HEADS:
            ours, theirs = (getattr(model, head) for model in (run.drafter, drafter))
            for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
                assert torch.equal(one, other)


def test_merged_is_a_plain_drafter(run, tmp_path) -> None:
    run.model.save_pretrained(tmp_path / "adapter")
    expected = drafts(run.drafter, run.target)
    drafter = load(tmp_path / "adapter")
    assert drafter.merge_and_unload() is drafter
    assert not carries_adapters(drafter)
    assert not hasattr(drafter, "peft_config")
    close_drafts(drafts(drafter, run.target), expected)
    drafter.save_pretrained(tmp_path / "merged")
    assert sorted(path.name for path in (tmp_path / "merged").iterdir()) == ["config.json", "model.safetensors"]
    again = load(tmp_path / "merged")
    assert again.state_dict().keys() == load(run.base).state_dict().keys()
    assert same_drafts(drafts(again, run.target), drafts(drafter, run.target))


def test_merging_by_peft_is_the_same(tmp_path) -> None:
    """LoRA and DoRA only: PEFT's own cannot merge IA3 beside heads that are trained whole."""
    for kind in ("lora", "dora"):
        run = trained(tmp_path / kind, KINDS[kind](), steps=2)
        expected = drafts(run.drafter, run.target)
        merged = run.model.merge_and_unload()
        close_drafts(drafts(merged, run.target), expected)
        merged.save_pretrained(tmp_path / kind / "merged")
        assert same_drafts(drafts(load(tmp_path / kind / "merged"), run.target), drafts(merged, run.target))


def test_an_adapter_file_holds_nothing_of_the_target(run, tmp_path) -> None:
    run.model.save_pretrained(tmp_path)
    names = load_file(tmp_path / "adapter_model.safetensors").keys()
    assert not any("embed_tokens" in name for name in names)
    assert all("base_layer" not in name for name in names if "lm_head" not in name)


# --- the target -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{"draft_vocab": None}, {}], ids=["borrowed head", "own head"])
def test_the_target_is_bit_identical_before_and_after(tmp_path, changes) -> None:
    """Weights left trainable on purpose: not even gradients may arrive there."""
    target = tiny.llama(tie_word_embeddings=True).requires_grad_(True)
    ids = torch.arange(5, 25)[None]
    before, logits, plain = state_hash(target), target(ids).logits, text(target)
    run = trained(tmp_path, KINDS["lora"](), target=target, **changes)
    target.requires_grad_(True)
    batch = {
        "input_ids": ids, "loss_mask": torch.ones_like(ids),
        "target_hidden_states": torch.randn(1, 20, run.drafter.config.context_width),
        "target_last_hidden_states": torch.randn(1, 20, 32),
    }  # fmt: skip
    for chunk_size in (8, None):
        run.drafter.objective = Objective(chunk_size=chunk_size)
        run.model.train()(**batch).loss.backward()
    run.model.eval().save_pretrained(run.folder)
    drafter = load(run.folder)
    assert text(target, assistant_model=drafter) == plain
    drafter.merge_and_unload()
    assert text(target, assistant_model=drafter) == plain
    assert all(parameter.grad is None for parameter in target.parameters())
    assert not any(name for name, _ in adapter_modules(target))
    assert (state_hash(target), target.lm_head.weight is target.model.embed_tokens.weight) == (before, True)
    assert torch.equal(target(ids).logits, logits)


def test_an_adapter_for_the_borrowed_head_is_refused(tmp_path) -> None:
    target = tiny.llama()
    for part in ("modules_to_save", "target_modules"):
        names = {"target_modules": ["q_proj"], "modules_to_save": HEADS}
        names[part] = [*names[part], "lm_head", "embed_tokens"]
        model = peft.get_peft_model(tiny.drafter_for(target), peft.LoraConfig(r=2, **names))
        assert not any("lm_head" in name or "embed_tokens" in name for name in model.state_dict())
        with pytest.raises(ValueError, match=r"'default' is to train embed_tokens and lm_head, which .* borrows"):
            tiny.trainer(tmp_path, model, target, tiny.answers(tmp_path))
        ids = torch.arange(8)[None]
        states = torch.randn(1, 8, model.config.context_width)
        model.share_with(target)
        with pytest.raises(ValueError, match="has none of its own to train"):  # any other trainer
            model(input_ids=ids, target_hidden_states=states, loss_mask=torch.ones_like(ids))


def test_a_trained_head_of_its_own_is_not_its_teacher(tmp_path) -> None:
    """A stored copy of the target's whole head also serves as the target's: training must not move the goal."""
    drafter = tiny.drafter_for(tiny.llama())
    drafter.config.share_lm_head = False
    drafter.lm_head = torch.nn.Linear(32, tiny.VOCAB, bias=False)
    weight = drafter.lm_head.weight
    for config in (peft.LoraConfig(r=2, target_modules=["lm_head"]), KINDS["whole LM head"]()):
        model = peft.get_peft_model(drafter, config)
        assert drafter.teacher().lm_head.weight is weight
        drafter = model.unload()


# --- other trainers -------------------------------------------------------------------------------------------------


def test_transformers_own_trainer_trains_the_same_way(tmp_path) -> None:
    target = tiny.llama()
    model = peft.get_peft_model(tiny.drafter_for(target), KINDS["lora"]())
    model.share_with(target)
    data = [
        {
            "input_ids": torch.arange(5 + i, 25 + i), "loss_mask": torch.ones(20),
            "target_hidden_states": torch.randn(20, model.config.context_width),
            "target_last_hidden_states": torch.randn(20, 32),
        }
        for i in range(4)
    ]  # fmt: skip
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    moving = {name: p.clone() for name, p in model.named_parameters() if p.requires_grad}
    args = TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, use_cpu=True, report_to="none", save_strategy="steps", save_steps=2,
        learning_rate=1e-2, disable_tqdm=True,
    )  # fmt: skip
    Trainer(model=model, args=args, train_dataset=data).train()
    weights = dict(model.named_parameters())
    assert all(torch.equal(weights[name], before) for name, before in frozen.items())
    assert not any(torch.equal(weights[name], before) for name, before in moving.items())
    again = peft.PeftModel.from_pretrained(tiny.drafter_for(target), tmp_path / "checkpoint-2")
    assert same_drafts(drafts(model.eval(), target), drafts(again, target))


def test_an_adapter_added_to_a_drafter_trains_without_a_wrapper(tmp_path) -> None:
    target = tiny.llama()
    drafter = tiny.drafter_for(target, draft_vocab=None)
    drafter.add_adapter(KINDS["lora"](), "mine")
    before = drafts(drafter.eval(), target)
    tiny.trainer(tmp_path, drafter.train(), target, tiny.answers(tmp_path), max_steps=2).train()
    drafter.eval().save_pretrained(tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["auto_mapping"]["base_model_class"] == "DSparkDrafter"
    again = tiny.drafter_for(target)
    again.load_adapter(tmp_path / "adapter")
    assert same_drafts(drafts(again, target), drafts(drafter, target))
    assert not same_drafts(drafts(again, target), before)


def test_a_loaded_adapter_is_trained_further(tmp_path) -> None:
    run = trained(tmp_path, KINDS["lora"](), steps=3)
    run.model.save_pretrained(run.folder)
    drafter = load(run.base)
    drafter.load_adapter(run.folder, is_trainable=True)
    wrapped = peft.PeftModel.from_pretrained(load(run.base), run.folder, is_trainable=True)
    for model in (drafter, wrapped):
        assert same_drafts(drafts(model.eval(), run.target), drafts(run.drafter, run.target))
        trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        assert len(trainable) == sum(parameter.requires_grad for parameter in run.model.parameters())
        tiny.trainer(tmp_path, model.train(), run.target, tiny.answers(tmp_path), max_steps=3).train()
        assert not same_drafts(drafts(model.eval(), run.target), drafts(run.drafter, run.target))


def test_gradient_checkpointing_changes_nothing(tmp_path) -> None:
    target, states = tiny.llama(), []
    for is_on in (False, True):
        torch.manual_seed(4)
        model = peft.get_peft_model(tiny.drafter_for(target), KINDS["dora"]())
        how = {"gradient_checkpointing": is_on, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
        tiny.trainer(tmp_path, model, target, tiny.answers(tmp_path), max_steps=2, **how).train()
        states.append(peft.get_peft_model_state_dict(model))
    for name, tensor in states[0].items():
        torch.testing.assert_close(tensor, states[1][name], rtol=1e-5, atol=1e-6)
