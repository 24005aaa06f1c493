"""Features kept while the target writes answers, against features computed from the finished text.

Catches: states of padding or of other rows, a token short or one too many, ends of texts that are lost or run on,
answers that change because features are kept, interrupted runs that repeat, lose or reorder sequences.
"""

from __future__ import annotations

import json

import pytest
import torch

from dspark.training import FeatureDataset, FeaturesError, write_features
from dspark.training.answers import write_answers
from dspark.training.continuations import GenerationTap, continue_prompts
from dspark.training.data import read_answers
from dspark.training.feature_writer import FeatureWriter
from dspark.training.prompts import AnswerSettings, Prompt

from . import tiny

LAYERS = [-1, 1, 4]
SETTINGS = AnswerSettings(temperatures=(0.0, 1.3), max_new_tokens=24, batch_size=3, raw=True)


class Numbers:
    """A tokenizer of texts that are ids."""

    def __call__(self, text: str):
        return type("Encoding", (), {"input_ids": [int(part) for part in text.split()]})


PROMPTS = [Prompt("tiny", i, " ".join(str(3 + (7 * i + k) % 80) for k in range(2 + i % 4))) for i in range(11)]


def write(folder, target, prompts=PROMPTS, **how):
    how = {"dtype": "float32", "shard_bytes": 12000, **how}
    writer = FeatureWriter(target, folder / "features", LAYERS, **how)
    counts = write_answers(target, Numbers(), prompts, folder / "answers.jsonl", SETTINGS, writer)
    return counts, read_answers([folder / "answers.jsonl"], max_length=99, vocab_size=tiny.VOCAB)


@pytest.mark.parametrize("make", [tiny.llama, tiny.qwen3])
def test_they_are_those_of_the_finished_text(tmp_path, make) -> None:
    target = make()
    _, answers = write(tmp_path, target)
    plain = tmp_path / "plain"
    write_answers(target, Numbers(), PROMPTS, plain, SETTINGS)
    assert plain.read_bytes() == (tmp_path / "answers.jsonl").read_bytes()
    lines = [json.loads(line)["answer_ids"] for line in plain.read_text().splitlines()]
    assert {len(line) == 24 for line in lines} == {True, False}  # cut ones, and ones that ended
    write_features(target, answers, tmp_path / "computed", LAYERS, dtype="float32", shard_bytes=12000)
    kept, computed = FeatureDataset(tmp_path / "features"), FeatureDataset(tmp_path / "computed")
    assert len(kept) == len(computed) == 11
    assert len(kept.index["shards"]) > 2
    for ours, theirs in zip((kept[i] for i in range(11)), (computed[i] for i in range(11)), strict=True):
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=1e-4)
    differing = {k for k, v in kept.index.items() if v != computed.index[k]} - {"shards"}
    assert not differing


def test_training_takes_the_folder_as_it_is(tmp_path) -> None:
    target = tiny.llama()
    _, answers = write(tmp_path, target)
    folder = tmp_path / "features"
    before = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.safetensors")}
    write_features(target, answers, folder, LAYERS, dtype="float32", shard_bytes=12000)
    assert {path.name: path.stat().st_mtime_ns for path in folder.glob("*.safetensors")} == before
    logs = []
    for data in (answers, FeatureDataset(folder)):
        drafter = tiny.drafter_for(target, target_layer_ids=LAYERS)
        run = tiny.trainer(tmp_path / "out", drafter, target, data, max_steps=3, logging_steps=3)
        run.train()
        logs.append(run.state.log_history[0])
    for name in ("loss", "ce_loss", "l1_loss", "confidence_loss", "tau"):
        torch.testing.assert_close(logs[0][name], logs[1][name], rtol=1e-4, atol=1e-4)


def test_interrupted_run_goes_on(tmp_path, monkeypatch) -> None:
    target = tiny.llama()
    write(tmp_path, target)
    expected = (tmp_path / "answers.jsonl").read_bytes()
    for dies_at, before in ((3, True), (4, False)):  # before or after the batch's answers are in the file
        folder = tmp_path / f"cut-{dies_at}"
        calls = []

        def dying(self, *args, calls=calls, dies_at=dies_at, before=before, add=FeatureWriter.add_answers):
            calls.append(args)
            if len(calls) == dies_at and before:
                raise KeyboardInterrupt
            add(self, *args)
            if len(calls) == dies_at:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(FeatureWriter, "add_answers", dying)
            with pytest.raises(KeyboardInterrupt):
                write(folder, target)
        with pytest.raises(FeaturesError, match=r"unfinished|has no index"):
            FeatureDataset(folder / "features")
        with (folder / "answers.jsonl").open("a") as file:
            file.write('{"source": "ti')
        counts, answers = write(folder, target)
        assert counts.dropped_lines == 1
        assert (folder / "answers.jsonl").read_bytes() == expected
        kept, whole = FeatureDataset(folder / "features"), FeatureDataset(tmp_path / "features")
        assert kept.lengths == answers.lengths == whole.lengths
        for i in range(len(kept)):
            for name, tensor in whole[i].items():
                torch.testing.assert_close(kept[i][name], tensor, rtol=1e-4, atol=1e-4)


def test_more_prompts_add_to_the_folder(tmp_path) -> None:
    target = tiny.llama()
    write(tmp_path, target, PROMPTS[:5])
    first = FeatureDataset(tmp_path / "features")[0]
    counts, answers = write(tmp_path, target)
    stored = FeatureDataset(tmp_path / "features")
    assert (counts.present, counts.written, len(stored)) == (5, 6, 11)
    assert stored.lengths == answers.lengths
    assert torch.equal(stored[0]["target_hidden_states"], first["target_hidden_states"])


def test_folder_of_something_else_is_refused(tmp_path) -> None:
    target = tiny.llama()
    write(tmp_path, target)
    (tmp_path / "answers.jsonl").unlink()
    with pytest.raises(FeaturesError, match="features of other text"):
        write(tmp_path, target, PROMPTS[3:])
    with pytest.raises(FeaturesError, match="features of something else"):
        FeatureWriter(tiny.qwen3(), tmp_path / "features", LAYERS, dtype="float32")
    with pytest.raises(FeaturesError, match="float8"):
        FeatureWriter(target, tmp_path / "new", LAYERS, dtype="float8")
    with pytest.raises(FeaturesError, match=r"must lie in -1\.\.4"):
        FeatureWriter(target, tmp_path / "new", [1, 5])


def test_generation_goes_one_token_further_and_says_nothing_of_it(tmp_path) -> None:
    target, prompts = tiny.llama(), [[5, 6, 7], [8, 9]]
    how = {"temperature": 1.5, "max_new_tokens": 30, "seed": 3}
    plain = continue_prompts(target, prompts, **how)
    ends = {plain[0][4]}  # an id the first row writes: it now ends there
    tap = GenerationTap(target, LAYERS, torch.float32)
    short = continue_prompts(target, prompts, ends=ends, tap=tap, **how)
    assert short[0] == plain[0][:5]
    assert tap.states.last.shape[1] >= 3 + max(map(len, short))
    assert not any(module._forward_hooks for module in target.modules())
