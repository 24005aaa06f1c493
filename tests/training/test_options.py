"""What a run can be asked for beyond its defaults: heads first, schedules, checkpointing, several folders.

Catches: a frozen backbone that moves or gathers moments, a resumed run that forgets where it stood, activations
computed again that differ, a schedule without its fall, folders that do not belong together.
"""

from __future__ import annotations

import pytest
import torch
from transformers import TrainerCallback
from transformers.integrations import integration_utils

from dspark.training import FeatureDataset, FeaturesError, write_features
from dspark.training.arguments import CHECKPOINTING
from dspark.training.collator import padding_share
from dspark.training.splits import JoinedFeatures, hold_out

from . import tiny
from .test_trainer import same_weights

HEADS = ("markov_head.", "confidence_head.")


def weights(drafter) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in drafter.state_dict().items()}


# --- heads first --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_size", [None, 4])
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_only_the_heads_learn_at_first(tmp_path, head, chunk_size) -> None:
    target, data = tiny.llama(), tiny.answers(tmp_path)
    drafter = tiny.drafter_for(target, markov_head_type=head, draft_vocab=list(range(60)))
    before = weights(drafter)
    how = {"head_only_steps": 2, "train_lm_head": True, "weight_decay": 0.1, "warmup_steps": 0}
    run = tiny.trainer(tmp_path, drafter, target, data, max_steps=2, **how)
    run.drafter.objective = tiny.objective(run, chunk_size)
    run.train()
    moved = {name for name, tensor in weights(drafter).items() if not torch.equal(before[name], tensor)}
    assert moved == {name for name in before if name.startswith(HEADS)}
    state = run.optimizer.state
    assert all((p in state) == name.startswith(HEADS) for name, p in drafter.named_parameters() if p.requires_grad)
    run = tiny.trainer(tmp_path, drafter, target, data, max_steps=3, **how)
    run.drafter.objective = tiny.objective(run, chunk_size)
    run.train()
    assert all(not torch.equal(before[name], tensor) for name, tensor in weights(drafter).items() if "lm_head" in name)
    assert not torch.equal(before["fc.weight"], drafter.fc.weight)


@pytest.mark.parametrize("saved_at", [2, 4])
def test_a_run_resumed_before_or_after_the_change_is_the_same(tmp_path, saved_at) -> None:
    target, data = tiny.llama(), tiny.answers(tmp_path)
    how = {"head_only_steps": 3, "save_strategy": "steps", "save_steps": saved_at}
    whole = tiny.trainer(tmp_path, tiny.drafter_for(target), target, data, **how)
    whole.train()
    resumed = tiny.trainer(tmp_path, tiny.drafter_for(target), target, data, **how)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{saved_at}"))
    assert same_weights(whole.drafter, resumed.drafter)


def test_a_drafter_without_heads_cannot_train_them_first(tmp_path) -> None:
    target, data = tiny.llama(), tiny.answers(tmp_path)
    bare = tiny.drafter_for(target, markov_rank=0, enable_confidence_head=False)
    with pytest.raises(ValueError, match="this drafter has none with a loss"):
        tiny.trainer(tmp_path, bare, target, data, head_only_steps=1)
    scored = tiny.drafter_for(target, markov_rank=0)
    with pytest.raises(ValueError, match="has none with a loss"):
        tiny.trainer(tmp_path, scored, target, data, head_only_steps=1, confidence=0.0)
    before = weights(scored)
    tiny.trainer(tmp_path, scored, target, data, head_only_steps=9, max_steps=2, warmup_steps=0).train()
    moved = {name for name, tensor in weights(scored).items() if not torch.equal(before[name], tensor)}
    assert moved == {name for name in before if name.startswith("confidence_head.")}


# --- optimisation -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [tiny.llama, tiny.qwen3])
def test_checkpointed_activations_change_nothing(tmp_path, make) -> None:
    target, data = make(), tiny.answers(tmp_path)
    runs = []
    for is_on in (False, True):
        drafter = tiny.drafter_for(target)
        run = tiny.trainer(tmp_path, drafter, target, data, max_steps=4, logging_steps=1, **{CHECKPOINTING: is_on})
        run.train()
        assert all(layer.gradient_checkpointing == is_on for layer in drafter.layers)
        runs.append(run)
    for plain, checked in zip(*(run.state.log_history[:4] for run in runs), strict=True):
        for name in ("loss", "grad_norm", "ce_loss", "l1_loss", "confidence_loss", "tau"):
            torch.testing.assert_close(checked[name], plain[name], rtol=1e-5, atol=1e-6)
    for name, tensor in runs[0].drafter.state_dict().items():
        torch.testing.assert_close(runs[1].drafter.state_dict()[name], tensor, rtol=1e-4, atol=1e-5)


def test_checkpointed_layers_keep_no_context_alive(tmp_path) -> None:
    """What a layer saves for its backward pass grows with the context unless it is computed again."""
    target, data = tiny.llama(), tiny.answers(tmp_path)
    run = tiny.trainer(tmp_path, tiny.drafter_for(target), target, data)
    batch = run._with_features(run.data_collator([data[i] for i in range(4)]))
    run._add_anchors(batch, 0, 0)
    sizes = []
    for is_on in (False, True):
        run.drafter.train()
        (run.drafter.gradient_checkpointing_enable if is_on else run.drafter.gradient_checkpointing_disable)()
        kept = []

        def keep(tensor, kept=kept):
            kept.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            run.drafter(**batch)
        sizes.append(sum(kept))
    assert sizes[1] < sizes[0] / 2


def test_warm_up_stable_decay_falls_at_the_end(tmp_path) -> None:
    target, data = tiny.llama(), tiny.answers(tmp_path)
    how = {"lr_scheduler_type": "warmup_stable_decay", "warmup_steps": 0.2, "learning_rate": 1.0, "logging_steps": 1}
    run = tiny.trainer(tmp_path, tiny.drafter_for(target), target, data, max_steps=10, decay_share=0.3, **how)
    run.create_optimizer_and_scheduler(10)
    rates = []
    for _ in range(11):
        rates.append(run.lr_scheduler.get_last_lr()[0])
        run.optimizer.step()
        run.lr_scheduler.step()
    assert rates[:3] == [0.0, 0.5, 1.0]
    assert rates[2:8] == [1.0] * 6
    assert 1.0 > rates[8] > rates[9] > rates[10] == 0.0
    with pytest.raises(ValueError, match=r"`decay_share` must lie in \(0, 1\]"):
        tiny.trainer(tmp_path, tiny.drafter_for(target), target, data, decay_share=0.0)


# --- data ---------------------------------------------------------------------------------------------------------


def folders(tmp_path, target, **how):
    made = []
    for number, seed in enumerate((1, 2)):
        text = tmp_path / f"text-{number}"
        text.mkdir()
        settings = {"dtype": "float32", "layers": [1, 2, 4], **how.get(f"folder{number}", {})}
        layers = settings.pop("layers")
        write_features(target, tiny.answers(text, 5 + number, seed=seed), text / "features", layers, **settings)
        made.append(FeatureDataset(text / "features"))
    return made


def test_several_folders_are_one_data_set(tmp_path) -> None:
    target = tiny.llama()
    parts = folders(tmp_path, target)
    joined = JoinedFeatures(parts)
    assert len(joined) == 11
    assert joined.lengths == parts[0].lengths + parts[1].lengths
    assert (joined.counts.used, joined.counts.tokens) == (11, sum(joined.lengths))
    for i, expected in ((0, parts[0][0]), (4, parts[0][4]), (5, parts[1][0]), (-1, parts[1][5])):
        assert all(torch.equal(joined[i][name], tensor) for name, tensor in expected.items())
    counts = joined.answer_token_counts(tiny.VOCAB)
    assert torch.equal(counts, sum(part.answer_token_counts(tiny.VOCAB) for part in parts))
    with pytest.raises(IndexError):
        joined[11]
    split = hold_out(joined, 3, seed=1)
    drafter = tiny.drafter_for(target, target_layer_ids=[1, 2, 4])
    run = tiny.trainer(tmp_path, drafter, target, split.train, max_steps=3, extra={"eval_dataset": split.held_out})
    run.train()
    assert run.evaluate()["eval_loss"] > 0


def test_folders_share_the_layers_that_are_read(tmp_path) -> None:
    target = tiny.llama()
    parts = folders(tmp_path, target, folder1={"layers": [0, 2, 4]})
    joined = JoinedFeatures(parts)
    assert joined.target_layer_ids == [2, 4]
    assert torch.equal(
        joined[5]["target_hidden_states"], FeatureDataset(parts[1].folder)[0]["target_hidden_states"][:, 32:]
    )
    with pytest.raises(FeaturesError, match=r"stores layers \[1, 2, 4\], the drafter also reads \[0\]"):
        joined.read_layers([0, 2])


def test_folders_that_do_not_belong_together_are_refused(tmp_path) -> None:
    target = tiny.llama()
    for number, (how, message) in enumerate(
        [({"layers": [0, 3]}, "share no layer"), ({"dtype": "bfloat16"}, r"different dtypes: .*\(bfloat16\)")]
    ):
        place = tmp_path / str(number)
        place.mkdir()
        with pytest.raises(FeaturesError, match=message):
            JoinedFeatures(folders(place, target, folder1=how))
    other = tiny.llama()
    other.get_input_embeddings().weight.data.add_(1)
    place = tmp_path / "other"
    place.mkdir()
    parts = [folders(place, model)[0] for model in (target,)]
    (place / "b").mkdir()
    parts.append(folders(place / "b", other)[0])
    drafter = tiny.drafter_for(target, target_layer_ids=[1, 2, 4])
    with pytest.raises(FeaturesError, match="embedding_hash"):
        tiny.trainer(tmp_path, drafter, target, JoinedFeatures(parts))
    with pytest.raises(FeaturesError, match="embedding_hash"):
        tiny.trainer(tmp_path, drafter, target, hold_out(JoinedFeatures(parts), 2, 1).train)


def test_padding_of_worked_example() -> None:
    lengths = [4, 1, 2, 3]
    assert padding_share(lengths, [0, 1, 2, 3], 2) == pytest.approx(4 / 14)  # 4+4 and 3+3 positions, 10 tokens
    assert padding_share(lengths, [0, 3, 2, 1], 2) == pytest.approx(2 / 12)
    assert padding_share(lengths, [0, 1, 2], 1) == 0.0


# --- logs ---------------------------------------------------------------------------------------------------------


def test_trackers_are_told_loss_terms_tau_and_acceptance(tmp_path, monkeypatch) -> None:
    told = []

    class Tracker(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs) -> None:
            told.append(dict(logs))

    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "tensorboard", Tracker)
    target, data = tiny.llama(), tiny.answers(tmp_path)
    split = hold_out(data, 4, seed=1)
    tiny.trainer(
        tmp_path, tiny.drafter_for(target), target, split.train, max_steps=2, report_to="tensorboard",
        extra={"eval_dataset": split.held_out, "eval_prompts": [[5, 6, 7]]},
    ).train()  # fmt: skip
    terms = ("loss", "ce_loss", "l1_loss", "confidence_loss")
    logs = [entry for entry in told if "loss" in entry]
    assert {*terms, "tau", "acceptance_1", "acceptance_4", "tokens_per_second", "learning_rate"} <= set(logs[0])
    evaluated = next(entry for entry in told if "eval_loss" in entry)
    expected = {*(f"eval_{name}" for name in terms), "eval_tau", "eval_tau_estimate", "eval_acceptance_1_estimate"}
    assert expected <= set(evaluated)
