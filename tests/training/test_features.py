"""Features of the target and the folders that store them.

Catches: a tap on the wrong layer, the final norm missing or applied twice, padding that reaches real tokens, a second
run that trusts half-written files or features of something else, damaged or mixed-up shards that train silently.
"""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark.cpu import packed
from dspark.training import FeatureDataset, FeaturesError, capture_features, index_features, shards, write_features
from dspark.training.features import check_target, target_logsumexp

from . import tiny

LAYERS = [-1, 1, 4]


def batch() -> torch.Tensor:
    return torch.randint(3, tiny.VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("make", [tiny.llama, tiny.qwen3])
def test_taps_are_layer_outputs_and_last_is_after_the_norm(make) -> None:
    target, ids = make(), batch()
    states = capture_features(target, ids, LAYERS)
    assert not any(module._forward_hooks for module in target.modules())
    with torch.no_grad():
        whole = target(ids, output_hidden_states=True)
    assert torch.equal(states.hidden, torch.cat([whole.hidden_states[layer + 1] for layer in LAYERS], -1))
    torch.testing.assert_close(target.lm_head(states.last), whole.logits)
    assert not states.hidden.requires_grad


def test_padding_does_not_reach_real_tokens() -> None:
    target, ids = tiny.llama(), batch()
    padded = torch.nn.functional.pad(ids, (0, 7))
    one, other = capture_features(target, ids, LAYERS), capture_features(target, padded, LAYERS)
    torch.testing.assert_close(one.hidden, other.hidden[:, :9], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(one.last, other.last[:, :9], rtol=1e-5, atol=1e-6)


def test_logsumexp_is_the_normaliser_in_any_chunk(monkeypatch) -> None:
    target, ids = tiny.llama(), batch()
    last = capture_features(target, ids, LAYERS).last
    with torch.no_grad():
        expected = target(ids).logits.logsumexp(-1)
    monkeypatch.setattr("dspark.training.features._CHUNK", 4)
    torch.testing.assert_close(target_logsumexp(target, last), expected)
    needed = torch.zeros(2, 9, dtype=torch.bool)
    needed[1, 3] = True
    some = target_logsumexp(target, last, needed)
    torch.testing.assert_close(some[1, 3], expected[1, 3])
    assert some[~needed].isinf().all()


def test_target_that_scales_its_logits_is_refused() -> None:
    target = tiny.llama()
    check_target(target)
    forward = target.lm_head.forward

    class Scaled(type(target)):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = output.logits * 0.25
            return output

    target.__class__ = Scaled
    with pytest.raises(ValueError, match="not its LM head applied to its last hidden state"):
        check_target(target)
    assert target.lm_head.forward == forward


# --- folders ------------------------------------------------------------------------------------------------------


def written(tmp_path, count: int = 10, **how):
    target, data = tiny.llama(), tiny.answers(tmp_path, count)
    folder = tmp_path / "features"
    index = write_features(target, data, folder, LAYERS, **{"shard_bytes": 6000, "batch_size": 3, **how})
    return target, data, folder, index


def test_folder_holds_what_the_target_computed(tmp_path) -> None:
    target, data, folder, index = written(tmp_path, dtype="float32")
    stored = FeatureDataset(folder)
    assert (index["sequences"], index["tokens"]) == (10, sum(data.lengths))
    assert index["supervised_tokens"] == data.counts.supervised_tokens
    assert len(index["shards"]) > 2
    assert stored.lengths == data.lengths
    for i in range(10):
        item, alone = stored[i], data[i]
        states = capture_features(target, alone["input_ids"][None], LAYERS)
        assert torch.equal(item["input_ids"], alone["input_ids"])
        assert torch.equal(item["loss_mask"], alone["loss_mask"])
        torch.testing.assert_close(item["target_hidden_states"], states.hidden[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(item["target_last_hidden_states"], states.last[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(item["target_logsumexp"], target_logsumexp(target, states.last)[0])
    assert torch.equal(stored.answer_token_counts(tiny.VOCAB), data.answer_token_counts(tiny.VOCAB))
    tensors = load_file(folder / index["shards"][0]["file"])
    assert (tensors["input_ids"].dtype, tensors["loss_mask"].dtype) == (torch.int32, torch.bool)


def test_some_of_the_stored_layers_can_be_read(tmp_path) -> None:
    _, _, folder, _ = written(tmp_path)
    whole, some = FeatureDataset(folder), FeatureDataset(folder, target_layer_ids=[4])
    assert torch.equal(some[3]["target_hidden_states"], whole[3]["target_hidden_states"][:, 64:])
    with pytest.raises(FeaturesError, match=r"stores layers \[-1, 1, 4\], the drafter also reads \[2\]"):
        FeatureDataset(folder, target_layer_ids=[1, 2])


def test_interrupted_writing_goes_on_and_gives_the_same_files(tmp_path, monkeypatch) -> None:
    target, data, folder, _ = written(tmp_path)
    expected = {path.name: path.read_bytes() for path in folder.iterdir()}
    calls = []
    compute = shards._shard

    def dies_in_the_third(*args):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return compute(*args)

    monkeypatch.setattr(shards, "_shard", dies_in_the_third)
    second = tmp_path / "second"
    how = {"shard_bytes": 6000, "batch_size": 3}
    with pytest.raises(KeyboardInterrupt):
        write_features(target, data, second, LAYERS, **how)
    assert len(list(second.glob("*"))) == 3  # two shards and the index, nothing half-written
    with pytest.raises(FeaturesError, match="unfinished: 2 of"):
        FeatureDataset(second)
    write_features(target, data, second, LAYERS, **how)
    assert len(calls) == 3 + len(expected) - 1 - 2
    assert {path.name: path.read_bytes() for path in second.iterdir()} == expected


def test_folder_of_something_else_is_not_added_to(tmp_path) -> None:
    target, data, folder, _ = written(tmp_path)
    for changed in (
        (tiny.qwen3(), data, LAYERS),
        (target, tiny.answers(tmp_path, 10, seed=5), LAYERS),
        (target, data, [1, 2]),
    ):
        with pytest.raises(FeaturesError, match="features of something else"):
            write_features(*changed[:2], folder, changed[2], shard_bytes=6000)
    with pytest.raises(FeaturesError, match="float8"):
        write_features(target, data, tmp_path / "other", LAYERS, dtype="float8")
    assert not (tmp_path / "other").exists()


def test_size_is_said_first_and_a_full_disk_is_refused(tmp_path, monkeypatch, capsys) -> None:
    target, data, _, _ = written(tmp_path)
    bytes_per_token = 32 * 4 * 2 + 9
    assert f"{sum(data.lengths)} tokens of {bytes_per_token} bytes" in capsys.readouterr().err
    monkeypatch.setattr(shards.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(FeaturesError, match="are free"):
        write_features(target, data, tmp_path / "full", LAYERS)
    assert not (tmp_path / "full").exists()


def damage(folder, kind: str) -> None:
    shard = folder / "shard-00001.safetensors"
    index = json.loads((folder / "index.json").read_text())
    if kind == "one bit":
        data = bytearray(shard.read_bytes())
        data[-40] ^= 1
        shard.write_bytes(data)
    elif kind == "cut":
        shard.write_bytes(shard.read_bytes()[:-8])
    elif kind == "gone":
        shard.unlink()
    elif kind == "no index":
        (folder / "index.json").unlink()
    elif kind == "half an index":
        (folder / "index.json").write_text("{")
    else:
        index.update({"other layers": {"target_layer_ids": [1]}, "newer": {"version": 2}}[kind])
        (folder / "index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("one bit", r"shard-00001\.safetensors is not the file the index was made for"),
        ("cut", "is not the file the index was made for"),
        ("gone", "shard-00001.safetensors is missing"),
        ("no index", r"has no index\.json .* safetensors files found"),
        ("half an index", "is not an index"),
        ("other layers", r"`target_hidden_states` has shape .* layers \[1\]"),
        ("newer", "version 2; 'dspark-features' version 1 is read"),
    ],
)
def test_damaged_folders_are_named(tmp_path, kind, message) -> None:
    _, _, folder, _ = written(tmp_path)
    damage(folder, kind)
    with pytest.raises(FeaturesError, match=message):
        FeatureDataset(folder)


def test_verification_can_be_left_out(tmp_path) -> None:
    _, _, folder, _ = written(tmp_path)
    damage(folder, "one bit")
    assert len(FeatureDataset(folder, verify=False)) == 10


def test_features_of_another_target_or_width_are_refused(tmp_path) -> None:
    target, _, folder, _ = written(tmp_path)
    stored = FeatureDataset(folder)
    drafter = tiny.drafter_for(target, target_layer_ids=[0, 1])
    with pytest.raises(FeaturesError, match=r"features 96 wide .* takes 64"):
        tiny.trainer(tmp_path, drafter, target, stored)
    other = tiny.llama()
    other.get_input_embeddings().weight.data.add_(1)
    with pytest.raises(FeaturesError, match="embedding_hash"):
        tiny.trainer(tmp_path, tiny.drafter_for(other, target_layer_ids=LAYERS), other, stored)


def test_finished_shards_without_an_index_can_be_indexed(tmp_path) -> None:
    target, data, folder, index = written(tmp_path)
    (folder / "index.json").unlink()
    with pytest.raises(FeaturesError, match="index_features"):
        write_features(target, data, folder, LAYERS)
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        del tensors["target_logsumexp"]  # optional
        save_file(tensors, path)
    made = index_features(folder, target, LAYERS)
    assert {k: made[k] for k in ("sequences", "tokens", "supervised_tokens", "dtype")} == {
        k: index[k] for k in ("sequences", "tokens", "supervised_tokens", "dtype")
    }
    item = FeatureDataset(folder)[0]
    assert "target_logsumexp" not in item
    assert math.isfinite(float(item["target_hidden_states"].float().sum()))
    with pytest.raises(FeaturesError, match="holds no"):
        index_features(tmp_path, target, LAYERS)


def test_a_packed_target_is_noted_by_its_plain_weights(tmp_path) -> None:
    target, data, _, index = written(tmp_path)
    how = {"shard_bytes": 6000, "batch_size": 3}
    made = write_features(target, data, tmp_path / "packed", LAYERS, pack_target=True, **how)
    assert made["target"] == index["target"]
    assert made["target"]["layer_hashes"]
    # A folder written while the weights could not be read is still known by the rest.
    with packed(target):
        unread = write_features(target, data, tmp_path / "unread", LAYERS, **how)
    assert unread["target"]["layer_hashes"] is None
    assert write_features(target, data, tmp_path / "unread", LAYERS, **how)["shards"] == unread["shards"]


def test_target_that_cannot_be_packed_runs_unpacked_with_a_warning(monkeypatch) -> None:
    target = tiny.llama()
    weight = target.lm_head.weight
    with packed(target, wanted=False):
        assert target.lm_head.weight is weight
    with packed(target):
        assert target.lm_head.weight is not weight
    assert target.lm_head.weight is weight
    told = []
    monkeypatch.setattr("dspark.cpu.logger.warning", told.append)
    torch.nn.Module.to(target, torch.float64)
    with packed(target):
        assert "runs unpacked" in told[0]
