"""`dspark data` without prompts of one's own, and with features kept.

Catches: turns that carry the template's marks, repeat or never end, a second run that writes other turns, features
nobody can train from, requests that contradict themselves.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from dspark.training import DataError, FeatureDataset
from dspark.training.prompts import AnswerSettings
from dspark.training.self_prompts import _frame, write_self_prompts
from tests.training import tiny

from . import words
from .words import records, run


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return words.target(tmp_path_factory.mktemp("target"))


def test_the_target_writes_its_own_prompts_and_answers_them(target, tmp_path) -> None:
    out, features = tmp_path / "answers.jsonl", tmp_path / "features"
    command = ("data", "--target", target, "--self-prompts", 6, "--out", out, "--max-new-tokens", 5, "--batch-size", 4)
    code, stdout, stderr = run(*command, "--features", features, "--target-layers", "0,1,3", "--json")
    assert code == 0, stderr
    assert json.loads(stdout)["written"] == 6
    turns = [record["prompt"] for record in records(tmp_path / "answers-prompts.jsonl")]
    assert len(set(turns)) == 6
    assert all(turn and set(turn.split()) <= set(words.WORDS) for turn in turns)
    tokenizer = AutoTokenizer.from_pretrained(target)
    for record in records(out):
        assert record["source"] == "answers-prompts"
        assert record["prompt_ids"] == [4, *tokenizer(turns[record["index"]]).input_ids, 5]
    before = out.read_bytes()
    assert run(*command)[0] == 0
    assert out.read_bytes() == before
    assert len(FeatureDataset(features)) == 6
    where = ("--target", target, "--features", features, "--out", tmp_path / "drafter")
    small = ("--layers", 1, "--block-size", 3, "--rank", 4, "--anchors", 4, "--steps", 2, "--device", "cpu")
    assert run("train", *where, *small)[0] == 0


def test_an_interrupted_run_keeps_its_turns(target, tmp_path) -> None:
    command = ("data", "--target", target, "--self-prompts", 5, "--max-new-tokens", 2, "--batch-size", 4, "--out")
    run(*command, tmp_path / "a.jsonl")
    turns = (tmp_path / "a-prompts.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "b-prompts.jsonl").write_text("".join(turns[:2]) + turns[2][:10])
    assert run(*command, tmp_path / "b.jsonl")[0] == 0
    assert (tmp_path / "b-prompts.jsonl").read_text().splitlines(keepends=True)[:2] == turns[:2]
    assert len(records(tmp_path / "b-prompts.jsonl")) == 5


def test_what_is_no_record_is_left_alone(target, tmp_path) -> None:
    command = ("data", "--target", target, "--self-prompts", 3, "--max-new-tokens", 2, "--batch-size", 4, "--out")
    own, notes = tmp_path / "mine-prompts.jsonl", tmp_path / "notes.jsonl"
    own.write_text('{"prompt": "w1 \u2028 w2"}\n{"prompt": "w3"}')  # a line break within a text, none at the end
    code, _, stderr = run(*command, tmp_path / "mine.jsonl")
    assert code == 0, stderr
    assert [json.loads(line)["prompt"] for line in own.read_text().split("\n")[:2]] == ["w1 \u2028 w2", "w3"]
    assert len(own.read_text().split("\n")) == 4
    for name in ("notes.jsonl", "other-prompts.jsonl"):
        (tmp_path / name).write_text("what I have to do")
    for out in (notes, tmp_path / "other.jsonl"):
        code, _, stderr = run(*command, out)
        assert (code, "which is no JSON record" in " ".join(stderr.split())) == (2, True), stderr
    assert notes.read_text() == (tmp_path / "other-prompts.jsonl").read_text() == "what I have to do"
    code, _, _ = run("data", "--target", target, "--prompts", tmp_path / "mine-prompts.jsonl", "--out", own)
    assert code == 2
    assert '"w3"}' in own.read_text()


def test_a_template_is_cut_where_the_user_speaks(target) -> None:
    tokenizer = AutoTokenizer.from_pretrained(target)
    assert _frame(tokenizer, AnswerSettings()) == ([4], {5})
    tokenizer.chat_template = "{{ messages[0]['content'] | length }}"
    with pytest.raises(DataError, match="no text in front"):
        _frame(tokenizer, AnswerSettings())


def test_a_target_that_repeats_itself_is_named(target, tmp_path) -> None:
    tokenizer, settings = AutoTokenizer.from_pretrained(target), AnswerSettings(batch_size=4, max_prompt_tokens=6)
    with pytest.raises(DataError, match=r"different user turns and then none in 20 batches of 4"):
        write_self_prompts(tiny.llama(), tokenizer, tmp_path / "p.jsonl", 3, settings, temperature=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--self-prompts", 0), "1 user turn or more"),
        (("--self-prompts", 3, "--raw"), "cannot be --raw"),
        (("--self-prompts", 3, "--features", "f", "--target-layers", "1;2"), "must look like 1,9,17"),
        (("--self-prompts", 3, "--features", "f", "--target-layers", "5"), "must lie in -1..4"),
        (("--self-prompts", 3, "--features", "f", "--feature-dtype", "int8"), "got 'int8'"),
        ((), "Nothing to answer: give --prompts"),
    ],
)
def test_bad_requests_exit_with_2(target, tmp_path, monkeypatch, options, message) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, stderr = run("data", "--target", target, "--out", tmp_path / "out.jsonl", *options)
    assert code == 2
    assert message in stderr
    assert not list(tmp_path.iterdir())
