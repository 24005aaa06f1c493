"""`DSparkTrainer` against what must not change a run: interruption, accumulation, where features come from.

Catches: an epoch order or anchors that a resumed run draws anew, micro-batch means averaged instead of one mean per
step, features of other layers or shifted by one, padding that leaks into a loss, a target that is trained or changed.
"""

from __future__ import annotations

import pytest
import torch

from dspark import DSparkDrafter
from dspark.context_cache import ContextCache
from dspark.objective import build_blocks
from dspark.training import FeatureDataset, expected_accepted_length, write_features
from dspark.training.trainer import DSparkTrainer
from dspark.training_forward import block_hidden

from . import tiny


def same_weights(one, other) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


class Interrupted(Exception):
    pass


def dies_at(step: int) -> type[DSparkTrainer]:
    class Dying(DSparkTrainer):
        def training_step(self, *args, **kwargs):
            if self.state.global_step == step:
                raise Interrupted
            return super().training_step(*args, **kwargs)

    return Dying


def test_resumed_run_equals_uninterrupted_run_bit_for_bit(tmp_path, monkeypatch) -> None:
    """Killed in the second epoch, after a checkpoint in the middle of it, with dropout and accumulation on."""
    target, data = tiny.llama(), tiny.answers(tmp_path, 12)
    how = {
        "max_steps": 8, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "save_strategy": "steps",
        "save_steps": 2, "save_total_limit": 1, "data_seed": 5,
    }  # fmt: skip

    def fresh() -> DSparkDrafter:
        drafter = tiny.drafter_for(target)
        for layer in drafter.layers:
            layer.self_attn.attention_dropout = 0.2
        return drafter

    whole = fresh()
    tiny.trainer(tmp_path / "whole", whole, target, data, **how).train()
    killed = tiny.trainer(tmp_path / "killed", fresh(), target, data, **how)
    killed.__class__ = dies_at(5)
    try:
        killed.train()
    except Interrupted:
        pass
    else:
        raise AssertionError("the run was not interrupted")
    assert [p.name for p in (tmp_path / "killed").iterdir()] == ["checkpoint-4"]
    torch.manual_seed(99)  # nothing of the first process may be needed
    resumed = fresh()
    second = tiny.trainer(tmp_path / "killed", resumed, target, data, **how)
    second.train(resume_from_checkpoint=True)
    assert same_weights(whole, resumed)
    assert not same_weights(whole, fresh())


def test_accumulation_equals_one_big_batch(tmp_path) -> None:
    """Micro-batches of very unequal loss weight, so that a mean of means would differ."""
    target = tiny.llama()
    data = tiny.answers(tmp_path, 16, shortest=2, longest=40)
    runs = []
    for rows, parts in ((8, 1), (2, 4)):
        drafter = tiny.drafter_for(target)
        run = tiny.trainer(
            tmp_path / str(parts), drafter, target, data, max_steps=1, per_device_train_batch_size=rows,
            gradient_accumulation_steps=parts, logging_steps=1, learning_rate=0.0,
        )  # fmt: skip
        run.train()
        runs.append(run.state.log_history[0])
    for name in ("loss", "grad_norm", "ce_loss", "l1_loss", "confidence_loss", "tau", "acceptance_1"):
        torch.testing.assert_close(runs[0][name], runs[1][name], rtol=2e-5, atol=1e-6)


def test_online_equals_offline(tmp_path) -> None:
    target, data = tiny.qwen3(), tiny.answers(tmp_path)
    vocab = sorted({2, *range(3, 60)})
    for name, draft_vocab in (("full", None), ("reduced", vocab)):
        logs = []
        drafter = tiny.drafter_for(target, draft_vocab=draft_vocab)
        folder = tmp_path / name
        write_features(target, data, folder, drafter.config.target_layer_ids, dtype="float32", shard_bytes=4096)
        stored = FeatureDataset(folder)
        assert len(stored.index["shards"]) > 2
        for source in (data, stored):
            run = tiny.trainer(tmp_path / "out", tiny.drafter_for(target, draft_vocab=draft_vocab), target, source)
            run.train()
            logs.append([entry for entry in run.state.log_history if "loss" in entry])
        for online, offline in zip(*logs, strict=True):
            for term in ("loss", "ce_loss", "l1_loss", "confidence_loss", "tau"):
                torch.testing.assert_close(online[term], offline[term], rtol=1e-5, atol=1e-5)


def test_stored_bfloat16_features_agree_to_rounding(tmp_path) -> None:
    target, data = tiny.llama(), tiny.answers(tmp_path)
    write_features(target, data, tmp_path / "features", tiny.drafter_for(target).config.target_layer_ids)
    losses = []
    for source in (data, FeatureDataset(tmp_path / "features")):
        run = tiny.trainer(tmp_path / "out", tiny.drafter_for(target), target, source, max_steps=2)
        run.train()
        losses.append(run.state.log_history[0]["loss"])
    torch.testing.assert_close(losses[0], losses[1], rtol=5e-3, atol=5e-3)


def test_reduced_law_from_the_normaliser_equals_the_law_from_all_logits(tmp_path) -> None:
    target, data = tiny.llama(), tiny.answers(tmp_path, 4)
    drafter = tiny.drafter_for(target, draft_vocab=list(range(0, tiny.VOCAB, 2)))
    run = tiny.trainer(tmp_path, drafter, target, data)
    batch = run._with_features(run.data_collator([data[i] for i in range(4)]))
    run._add_anchors(batch, 0, 0)
    assert "target_logsumexp" in batch
    drafter.eval()
    with torch.no_grad():
        fast = drafter(**batch)
        slow = drafter(**{**batch, "target_logsumexp": None})
    torch.testing.assert_close(fast.loss, slow.loss, rtol=1e-5, atol=1e-6)
    live = fast.supervised
    torch.testing.assert_close(fast.acceptance[live], slow.acceptance[live], rtol=1e-5, atol=1e-6)


def test_anchors_depend_on_the_sequence_not_on_its_padding(tmp_path) -> None:
    target, data = tiny.llama(), tiny.answers(tmp_path, 6, longest=30)
    run = tiny.trainer(tmp_path, tiny.drafter_for(target), target, data)
    together = run.data_collator([data[i] for i in range(6)])
    run._add_anchors(together, 7, 0)
    for row in range(6):
        alone = run.data_collator([data[row]])
        run._add_anchors(alone, 7, row)
        kept = together["anchor_positions"][row][together["anchor_keep_mask"][row]]
        assert torch.equal(kept, alone["anchor_positions"][0])
    other = run.data_collator([data[i] for i in range(6)])
    run._add_anchors(other, 8, 0)
    assert not torch.equal(other["anchor_positions"], together["anchor_positions"])


def test_target_and_borrowed_modules_stay_as_they_were(tmp_path) -> None:
    target = tiny.llama()
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    drafter = tiny.drafter_for(target, draft_vocab=list(range(50)))
    head = drafter.lm_head.weight.clone()
    tiny.trainer(tmp_path, drafter, target, tiny.answers(tmp_path), max_steps=3, num_train_epochs=1).train()
    assert all(torch.equal(before[name], tensor) for name, tensor in target.state_dict().items())
    assert torch.equal(head, drafter.lm_head.weight)
    assert not any(parameter.grad is not None for parameter in target.parameters())
    trained = tiny.drafter_for(target, draft_vocab=list(range(50)))
    tiny.trainer(tmp_path, trained, target, tiny.answers(tmp_path), max_steps=3, train_lm_head=True).train()
    assert not torch.equal(head, trained.lm_head.weight)


def test_evaluation_repeats_and_reports_acceptance(tmp_path) -> None:
    target, data = tiny.llama(), tiny.answers(tmp_path)
    run = tiny.trainer(tmp_path, tiny.drafter_for(target), target, data)
    run.eval_dataset = data
    first, second = run.evaluate(), run.evaluate()
    assert first["eval_loss"] == second["eval_loss"]
    assert 1 <= first["eval_tau_estimate"] == second["eval_tau_estimate"] <= 5
    assert "eval_tau" not in first  # nothing was decoded


def test_bfloat16_autocast_trains(tmp_path) -> None:
    target, data = tiny.llama(), tiny.answers(tmp_path)
    drafter = tiny.drafter_for(target)
    run = tiny.trainer(tmp_path, drafter, target, data, bf16=True, max_steps=2, logging_steps=1)
    run.train()
    assert all(entry["grad_norm"] > 0 for entry in run.state.log_history if "grad_norm" in entry)
    assert drafter.fc.weight.dtype == torch.float32


def test_expected_accepted_length_of_worked_example() -> None:
    acceptance = torch.tensor([[0.5, 0.5, 1.0], [1.0, 1.0, 0.9], [0.0, 1.0, 1.0]])
    supervised = torch.tensor([[True, True, True], [True, True, False], [True, True, True]])
    assert expected_accepted_length(acceptance, supervised).tolist() == [2.0, 3.0, 1.0]


def test_tau_in_the_log_is_the_mean_over_supervised_anchors(tmp_path) -> None:
    target, data = tiny.llama(), tiny.answers(tmp_path, 4)
    run = tiny.trainer(tmp_path, tiny.drafter_for(target), target, data, max_steps=1, logging_steps=1, num_anchors=50)
    seen = []
    run.drafter.register_forward_hook(lambda module, args, output: seen.append(output))
    run.train()
    blocks = seen[0].supervised.any(-1)
    expected = expected_accepted_length(seen[0].acceptance, seen[0].supervised)[blocks].mean()
    log = run.state.log_history[0]
    torch.testing.assert_close(log["tau"], float(expected), rtol=1e-5, atol=1e-5)
    live = seen[0].supervised[..., 1]
    torch.testing.assert_close(log["acceptance_2"], float(seen[0].acceptance[..., 1][live].mean()))


def test_block_widths_take_turns_and_cost_alike(tmp_path) -> None:
    target = tiny.llama()
    drafter = tiny.drafter_for(target)
    data = tiny.answers(tmp_path, shortest=40, longest=50)
    made = tiny.trainer(
        tmp_path / "run", drafter, target, data, {"eval_dataset": data}, block_widths=[1, 4, 2], num_anchors=3
    )
    seen = []
    forward = drafter.forward

    def spy(*args, **kwargs):
        output = forward(*args, **kwargs)
        seen.append((drafter.objective.num_drafts, output.supervised.shape[1:]))
        return output

    drafter.forward = spy
    made.train()
    assert [each for each in seen if each[0]] == [(1, (12, 1)), (4, (3, 4)), (2, (6, 2))] * 2
    seen.clear()
    metrics = made.evaluate()
    assert {width for width, _ in seen} == {None}
    assert all(shape[1] == 4 for _, shape in seen)
    assert any("acceptance_4" in name for name in metrics)
    for wrong in ([0], [5], [2, -1]):
        with pytest.raises(ValueError, match="block_widths"):
            tiny.trainer(tmp_path / "other", tiny.drafter_for(target), target, data, block_widths=wrong)


def test_a_narrow_training_block_is_the_narrow_block_of_decoding(tmp_path) -> None:
    target = tiny.llama()
    drafter = tiny.drafter_for(target)
    drafter.share_with(target)
    ids = torch.randint(3, tiny.VOCAB - 1, (1, 30), generator=torch.Generator().manual_seed(0))
    states = torch.randn(1, 30, drafter.config.context_width, generator=torch.Generator().manual_seed(1))
    anchors = torch.tensor([[9, 17]])
    shared = drafter.shared_modules(target)
    for width in (1, 2, 3, 4):
        blocks = build_blocks(ids, torch.ones_like(ids), anchors, torch.ones_like(anchors).bool(), width)
        with torch.no_grad():
            trained = block_hidden(drafter, ids, states, blocks, shared)
            for n, anchor in enumerate(anchors[0].tolist()):
                cache = ContextCache(len(drafter.layers), [0])
                drafter.extend_context(cache, drafter.project_context(states[:, :anchor]))
                drafted = drafter.draft_block(ids[:, anchor], cache, shared, width).hidden
                torch.testing.assert_close(trained[:, n], drafted, atol=1e-5, rtol=1e-5)
