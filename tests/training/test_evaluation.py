"""Evaluation during training: what it measures, and that the run is the same without it.

Catches: a real accepted length that is an estimate, or of another drafter; random states, modes, gradients or
statistics that evaluation moves; held-out sequences that are trained on; a "best" that is the last, or that a resumed
run forgets.
"""

from __future__ import annotations

import pytest
import torch
from transformers import TrainerCallback

from dspark import SpeculationStats
from dspark.training.best import BestWeights
from dspark.training.evaluation import DecodingEvaluation, undisturbed
from dspark.training.splits import hold_out

from . import tiny
from .test_trainer import same_weights

PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16]]


def with_dropout(target):
    drafter = tiny.drafter_for(target)
    for layer in drafter.layers:
        layer.self_attn.attention_dropout = 0.3
    return drafter


def run(folder, target, data, drafter=None, **how):
    drafter = with_dropout(target) if drafter is None else drafter
    extra = {name: how.pop(name) for name in ("eval_dataset", "eval_prompts", "callbacks") if name in how}
    how = {"eval_every": 2, "eval_new_tokens": 12, "logging_steps": 1, **how}
    return tiny.trainer(folder, drafter, target, data, extra=extra, **how)


def evaluations(trainer) -> dict[int, dict]:
    return {entry["step"]: entry for entry in trainer.state.log_history if any(k.startswith("eval_") for k in entry)}


def test_a_run_is_the_same_with_and_without_it(tmp_path) -> None:
    target, data = tiny.llama(), tiny.answers(tmp_path)
    parts = hold_out(data, 4, seed=1)
    plain = run(tmp_path / "plain", target, parts.train)
    plain.train()
    watched = run(
        tmp_path / "watched", target, parts.train, eval_dataset=parts.held_out, eval_prompts=PROMPTS, eval_every=1
    )
    watched.train()
    assert same_weights(plain.drafter, watched.drafter)
    assert list(evaluations(watched)) == [1, 2, 3, 4, 5, 6]
    losses = [[entry["loss"] for entry in t.state.log_history if "loss" in entry] for t in (plain, watched)]
    assert losses[0] == losses[1]


def test_it_leaves_no_trace(tmp_path) -> None:
    target, data = tiny.llama(), tiny.answers(tmp_path)
    trainer = run(tmp_path, target, data, eval_dataset=data, eval_prompts=PROMPTS)
    drafter = trainer.drafter.train()
    drafter.layers[0].eval()
    drafter.fc.weight.grad = torch.ones_like(drafter.fc.weight)
    mine = drafter.last_stats = SpeculationStats()
    before, speculation = torch.get_rng_state(), drafter.speculation
    trainer.evaluate()
    assert torch.equal(before, torch.get_rng_state())
    assert (drafter.training, drafter.layers[0].training, target.training) == (True, False, False)
    assert (drafter.fc.weight.grad == 1).all()
    assert drafter.last_stats is mine
    assert drafter.speculation is speculation
    assert not any(module._forward_hooks for module in target.modules())


def test_real_tau_is_what_generate_accepts(tmp_path) -> None:
    target, data = tiny.llama(), tiny.answers(tmp_path)
    trainer = run(tmp_path, target, data, eval_prompts=PROMPTS, max_steps=4)
    trainer.train()
    drafter, stats = trainer.drafter.eval(), SpeculationStats()
    for prompt in PROMPTS:
        how = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
        stats = stats.merge(target.generate(torch.tensor([prompt]), assistant_model=drafter, **how).speculation)
    entry = evaluations(trainer)[4]
    assert entry["eval_tau"] == pytest.approx(stats.mean_acceptance_length)
    for k, value in enumerate(stats.conditional_acceptance(), 1):
        assert entry.get(f"eval_acceptance_{k}", 0.0) == pytest.approx(value)
    assert "eval_loss" not in entry


def test_counts_of_parts_add_up(tmp_path) -> None:
    target = tiny.llama()
    evaluation = DecodingEvaluation(target, tiny.drafter_for(target).eval(), PROMPTS, 10)
    parts = evaluation.count(slice(0, None, 2)) + evaluation.count(slice(1, None, 2))
    assert torch.equal(parts, evaluation.count(slice(None)))
    assert evaluation.figures(torch.tensor([4.0, 6, 4, 3, 0, 0, 3, 3, 0, 0])) == {
        "tau": 2.5, "acceptance_1": 0.75, "acceptance_2": 1.0,
    }  # fmt: skip


def test_both_kinds_of_figures_are_in_one_entry(tmp_path) -> None:
    target, data = tiny.llama(), tiny.answers(tmp_path)
    parts = hold_out(data, 3, seed=1)
    trainer = run(tmp_path, target, parts.train, eval_dataset=parts.held_out, eval_prompts=PROMPTS, max_steps=3)
    trainer.train()
    found = evaluations(trainer)
    assert list(found) == [2, 3]  # every second step, and the last
    for name in ("eval_loss", "eval_ce_loss", "eval_tau_estimate", "eval_acceptance_1_estimate", "eval_tau"):
        assert name in found[2]
    assert len([entry for entry in trainer.state.log_history if "eval_tau" in entry]) == 2


def test_evaluations_come_ten_times_by_default(tmp_path) -> None:
    target, data = tiny.llama(), tiny.answers(tmp_path)
    trainer = run(tmp_path, target, data, eval_prompts=PROMPTS[:1], eval_new_tokens=2, eval_every=0, max_steps=21)
    trainer.train()
    assert list(evaluations(trainer)) == [2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 21]


def test_held_out_sequences_are_drawn_by_the_seed_and_never_trained_on(tmp_path) -> None:
    data = tiny.answers(tmp_path)
    first, again, other = (hold_out(data, 5, seed) for seed in (1, 1, 2))
    assert first.held_out.indices == again.held_out.indices
    assert sorted(first.held_out.indices) != sorted(other.held_out.indices)
    assert sorted(first.train.indices + first.held_out.indices) == list(range(len(data)))
    assert first.train.lengths == [len(first.train[i]["input_ids"]) for i in range(len(first.train))]
    assert first.held_out.lengths == sorted(first.held_out.lengths)
    with pytest.raises(ValueError, match="16 sequences cannot be held out of 16"):
        hold_out(data, 16, 1)


class Snapshot(TrainerCallback):
    """Remembers the weights after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, model=None, **kwargs) -> None:
        if state.global_step == self.step:
            self.weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_the_best_weights_are_kept(tmp_path, monkeypatch) -> None:
    target, data, second = tiny.llama(), tiny.answers(tmp_path), Snapshot(2)
    how = {"eval_prompts": PROMPTS, "eval_every": 1, "keep_best": True, "save_strategy": "steps", "save_steps": 4}
    trainer = run(tmp_path, target, data, callbacks=[second], **how)
    measured = [1.0, 2.5, 1.5, 2.5, 2.0, 1.0]
    monkeypatch.setattr(trainer, "_decode", lambda: {"eval_tau": measured[trainer.state.global_step - 1]})
    trainer.train()
    best = {"metric": "eval_tau", "value": 2.5, "step": 2}
    assert trainer.best.note() == best  # the earlier of equals
    resumed = run(tmp_path, target, data, **how)
    monkeypatch.setattr(resumed, "_decode", lambda: {"eval_tau": 2.4})
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert list(evaluations(resumed)) == [1, 2, 3, 4, 5, 6]
    assert resumed.best.note() == best
    resumed.best.restore(resumed.drafter)
    assert all(torch.equal(second.weights[name], tensor) for name, tensor in resumed.drafter.state_dict().items())


def test_what_is_best_goes_by_what_was_measured(tmp_path) -> None:
    model = torch.nn.Linear(2, 2)
    best = BestWeights(tmp_path / "new")
    assert best.note() is None
    best.consider(model, {"eval_loss": 1.0, "eval_tau_estimate": 2.0, "eval_tau": 1.5}, 1)
    assert best.note() == {"metric": "eval_tau", "value": 1.5, "step": 1}
    best.forget()
    best.consider(model, {"eval_loss": 1.0}, 1)
    best.consider(model, {"eval_loss": 2.0}, 2)
    best.consider(model, {"eval_loss": 0.5}, 3)
    assert best.note() == {"metric": "eval_loss", "value": 0.5, "step": 3}
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["best.safetensors"]


def test_what_cannot_be_evaluated_is_named(tmp_path) -> None:
    target, data = tiny.llama(), tiny.answers(tmp_path)
    with pytest.raises(ValueError, match="`keep_best` needs something to evaluate"):
        run(tmp_path, target, data, keep_best=True)
    with pytest.raises(ValueError, match="eval_new_tokens"):
        run(tmp_path, target, data, eval_new_tokens=0)


def test_undisturbed_puts_back_after_an_error() -> None:
    model = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Linear(1, 1))
    model[0].eval()
    before = torch.get_rng_state()
    with pytest.raises(KeyError), undisturbed(model):
        assert not model.training
        torch.rand(3)
        raise KeyError
    assert (model.training, model[0].training) == (True, False)
    assert torch.equal(before, torch.get_rng_state())
