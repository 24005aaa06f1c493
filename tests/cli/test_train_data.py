"""`dspark data` and `dspark train` from the command line, on a tiny target with a tokenizer and a chat template.

Catches: answers that are not the target's, records that a restart repeats or loses, a half-written line that poisons a
file, bad input found only after work was done or under another exit code, results that do not load.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from dspark import DSparkDrafter
from tests.training import tiny

from . import words
from .words import prompt_file, records, run


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return words.target(tmp_path_factory.mktemp("target"))


# --- data ---------------------------------------------------------------------------------------------------------


def test_answers_are_the_targets_greedy_continuation(target, tmp_path) -> None:
    out = tmp_path / "answers.jsonl"
    code, stdout, _ = run(
        "data", "--target", target, "--prompts", prompt_file(tmp_path), "--out", out, "--max-new-tokens", 12,
        "--batch-size", 4, "--json",
    )  # fmt: skip
    assert code == 0
    told = json.loads(stdout)
    assert (told["written"], told["prompts"], told["present"]) == (6, 6, 0)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    for record in records(out):
        assert set(record) == {"source", "prompt_ids", "answer_ids", "temperature", "index"}
        assert (record["source"], record["temperature"]) == ("ask", 0.0)
        ids = record["prompt_ids"]
        assert (ids[0], ids[-1]) == (4, 5)  # <user> ... <model>
        expected = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :].tolist()
        assert record["answer_ids"] == expected
        assert len(expected) == 12 or expected[-1] == 2
    assert sorted(record["index"] for record in records(out)) == list(range(6))


def test_second_run_adds_what_is_missing(target, tmp_path) -> None:
    out, ask = tmp_path / "answers.jsonl", prompt_file(tmp_path)
    command = ("data", "--target", target, "--prompts", ask, "--out", out, "--max-new-tokens", 6, "--temperature", 0,
               "--temperature", 0.8, "--each", "--batch-size", 2)  # fmt: skip
    assert run(*command)[0] == 0
    whole = records(out)
    assert len(whole) == 12
    lines = out.read_text().splitlines(keepends=True)
    out.write_text("".join(lines[:5]) + lines[5][:20])  # killed while it wrote the sixth line
    code, stdout, _ = run(*command, "--json")
    told = json.loads(stdout)
    assert (code, told["present"], told["written"], told["dropped_lines"]) == (0, 5, 7, 1)
    parts = (whole, records(out))
    keys, greedy = (
        [sorted(pick(record) for record in part if wanted(record)) for part in parts]
        for pick, wanted in (
            (lambda record: (record["index"], record["temperature"]), lambda record: True),
            (lambda record: (record["index"], record["answer_ids"]), lambda record: not record["temperature"]),
        )
    )
    assert keys[0] == keys[1]
    assert greedy[0] == greedy[1]
    before = out.read_bytes()
    assert run(*command)[0] == 0
    assert out.read_bytes() == before


def test_prompts_with_the_same_ids_are_answered_once(target, tmp_path) -> None:
    out = tmp_path / "answers.jsonl"
    files = ("--prompts", prompt_file(tmp_path), "--prompts", prompt_file(tmp_path, "again", 8, offset=4))
    code, stdout, _ = run("data", "--target", target, *files, "--out", out, "--max-new-tokens", 2, "--json")
    told = json.loads(stdout)
    assert (code, told["prompts"], told["duplicates"], told["written"]) == (0, 14, 2, 12)
    assert len({tuple(record["prompt_ids"]) for record in records(out)}) == 12


def test_each_prompt_gets_one_temperature_by_the_seed(target, tmp_path) -> None:
    chosen = []
    for place, seed in enumerate((1, 1, 2)):
        out = tmp_path / f"answers-{place}.jsonl"
        run("data", "--target", target, "--prompts", prompt_file(tmp_path, count=40), "--out", out,
            "--max-new-tokens", 2, "--temperature", 0, "--temperature", 1.5, "--seed", seed,
            "--batch-size", 20)  # fmt: skip
        chosen.append({record["index"]: (record["temperature"], record["answer_ids"]) for record in records(out)})
    assert chosen[0] == chosen[1]
    temperatures = [[chosen[run][i][0] for i in range(40)] for run in (0, 2)]
    assert temperatures[0] != temperatures[1]
    assert 8 < temperatures[0].count(0.0) < 32


def test_sampling_is_plain(target, tmp_path) -> None:
    """The target's own top_k=1 must not turn sampling into greedy."""
    out = tmp_path / "answers.jsonl"
    run(
        "data", "--target", target, "--prompts", prompt_file(tmp_path, count=20), "--out", out, "--max-new-tokens", 8,
        "--temperature", 0, "--temperature", 5, "--each", "--batch-size", 20,
    )  # fmt: skip
    by_temperature: dict = {}
    for record in records(out):
        by_temperature.setdefault(record["temperature"], {})[record["index"]] = record["answer_ids"]
    assert sum(by_temperature[5.0][i] == by_temperature[0.0][i] for i in range(20)) < 5


def test_answers_of_other_prompts_are_not_mixed(target, tmp_path) -> None:
    out = tmp_path / "answers.jsonl"
    assert (
        run("data", "--target", target, "--prompts", prompt_file(tmp_path), "--out", out, "--max-new-tokens", 2)[0]
        == 0
    )
    other = prompt_file(tmp_path, offset=30)
    before = out.read_bytes()
    code, _, stderr = run("data", "--target", target, "--prompts", other, "--out", out, "--max-new-tokens", 2)
    assert code == 2
    assert "another prompt under source 'ask'" in stderr
    assert out.read_bytes() == before


@pytest.mark.parametrize(
    ("line", "options", "message"),
    [
        ("", (), "No prompt"),
        ("{", (), "is not JSON"),
        ('{"text": "hi"}', (), '"turns"'),
        ('{"prompt": "w1"}', ("--temperature", -1), "Temperatures must be at least 0"),
        ('{"prompt": "w1"}', ("--temperature", 1, "--temperature", 1), "each named once"),
        ('{"prompt": "w1"}', ("--max-new-tokens", 0), "max_new_tokens"),
        ('{"prompt": "w1"}', ("--template-args", "[]"), "JSON object"),
        ('{"prompt": "w1"}', ("--dtype", "int8"), "dtype"),
    ],
)
def test_bad_requests_for_data_exit_with_2(target, tmp_path, line, options, message) -> None:
    path = tmp_path / "ask.jsonl"
    path.write_text(line + "\n")
    code, _, stderr = run("data", "--target", target, "--prompts", path, "--out", tmp_path / "out.jsonl", *options)
    assert code == 2
    assert message in stderr
    assert not (tmp_path / "out.jsonl").exists()


def test_missing_files_and_targets_exit_with_2(target, tmp_path) -> None:
    code, _, stderr = run(
        "data", "--target", target, "--prompts", tmp_path / "no.jsonl", "--out", tmp_path / "out.jsonl"
    )
    assert (code, "no.jsonl is not a file" in stderr) == (2, True)
    ask = prompt_file(tmp_path)
    code, _, stderr = run(
        "data", "--target", tmp_path / "no-target", "--prompts", ask, "--out", tmp_path / "out.jsonl"
    )
    assert (code, "no-target" in stderr) == (2, True)
    code, _, stderr = run(
        "data", "--target", target, "--prompts", ask, "--prompts", ask, "--out", tmp_path / "out.jsonl"
    )
    assert (code, "ask is given twice" in stderr) == (2, True)


def test_prompt_and_template_options(target, tmp_path) -> None:
    out = tmp_path / "answers.jsonl"
    command = ("data", "--target", target, "--prompts", prompt_file(tmp_path), "--out", out, "--max-new-tokens", 2)
    code, stdout, _ = run(*command, "--raw", "--limit", 2, "--json")
    assert (code, json.loads(stdout)["written"]) == (0, 2)
    assert all(len(record["prompt_ids"]) == 3 for record in records(out))
    code, stdout, _ = run(*command[:-4], "--out", tmp_path / "b", "--max-prompt-tokens", 4, "--json")
    assert (code, json.loads(stdout)["too_long"]) == (0, 6)


# --- train --------------------------------------------------------------------------------------------------------

SMALL = (
    "--layers", 1, "--block-size", 3, "--rank", 4, "--anchors", 4, "--batch-size", 4, "--log-every", 2,
    "--device", "cpu",
)  # fmt: skip


def answer_file(folder: Path) -> Path:
    return tiny.write_answers(folder / "answers.jsonl", 12)


@pytest.mark.parametrize("stored", [False, True])
def test_training_gives_a_drafter_that_loads(target, tmp_path, stored) -> None:
    out = tmp_path / "drafter"
    where = ("--features", tmp_path / "features") if stored else ()
    code, stdout, stderr = run(
        "train", "--target", target, "--data", answer_file(tmp_path), *where, "--out", out, *SMALL, "--steps", 4,
        "--draft-vocab-size", 40, "--save-every", 2, "--keep", 1, "--target-name", "org/tiny", "--json",
    )  # fmt: skip
    assert code == 0
    assert "special token '<spare>'" in stderr
    assert "tau" in stderr
    told = json.loads(stdout)
    assert told["steps"] == 4
    assert 1 <= told["final"]["tau"] <= 4
    drafter = DSparkDrafter.from_pretrained(out)
    assert drafter.config.mask_token_id == 6
    assert drafter.config.target["name"] == "org/tiny"
    assert {0, 1, 2, 3, 4, 5, 6} <= set(drafter.draft_token_ids.tolist())
    notes = json.loads((out / "training.json").read_text())
    assert notes["data"]["used"] == 12
    assert notes["steps"] == 4
    assert notes["request"]["config"]["learning_rate"] == 6e-4
    assert [p.name for p in (tmp_path / "drafter-checkpoints").iterdir() if p.is_dir()] == ["checkpoint-4"]
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    ids = torch.tensor([[4, 10, 11, 5]])
    greedy = {"do_sample": False, "max_new_tokens": 8}
    assert torch.equal(model.generate(ids, assistant_model=drafter, **greedy), model.generate(ids, **greedy))


def test_resumed_command_equals_uninterrupted_one(target, tmp_path) -> None:
    def command(name: str, *more):
        return (
            "train", "--target", target, "--data", answer_file(tmp_path), "--out", tmp_path / name, *SMALL,
            "--steps", 6, "--save-every", 2, "--keep", 3, *more,
        )  # fmt: skip

    assert run(*command("whole"))[0] == 0
    assert run(*command("cut"))[0] == 0
    checkpoints = tmp_path / "cut-checkpoints"
    for step in (4, 6):
        for path in sorted((checkpoints / f"checkpoint-{step}").iterdir()):
            path.unlink()
        (checkpoints / f"checkpoint-{step}").rmdir()
    code, _, stderr = run(*command("cut"))
    assert (code, "exists" in stderr) == (2, True)
    code, _, stderr = run(*command("cut", "--resume", "--overwrite", "--lr", 1e-3))
    assert (code, "learning_rate was 0.0006, is 0.001" in stderr) == (2, True)
    code, _, stderr = run(*command("cut", "--resume", "--overwrite"))
    assert code == 0, stderr
    same = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "cut")]
    assert same[0] == same[1]
    assert json.loads((tmp_path / "cut" / "training.json").read_text())["resumed_from"].endswith("checkpoint-2")


def test_features_alone_train_and_a_drafter_can_be_trained_on(target, tmp_path) -> None:
    features = tmp_path / "features"
    where = ("--target", target, "--features", features)
    assert run("train", *where, "--data", answer_file(tmp_path), "--features-only", "--target-layers", "0,1,3")[0] == 0
    code, _, _ = run("train", *where, "--out", tmp_path / "one", *SMALL, "--steps", 2)
    assert code == 0
    assert DSparkDrafter.from_pretrained(tmp_path / "one").config.target_layer_ids == [0, 1, 3]
    again = ("--init", tmp_path / "one", "--device", "cpu")
    code, _, stderr = run("train", *where, "--out", tmp_path / "two", *again, "--steps", 2)
    assert code == 0
    assert "step 2/2" in stderr  # fewer steps than between two log entries
    assert "tau" in stderr
    code, _, stderr = run("train", *where, "--out", tmp_path / "three", *again, "--layers", 2)
    assert (code, "leave out --layers" in stderr) == (2, True)


def test_features_and_drafters_of_a_wider_vocabulary_are_named(target, tmp_path) -> None:
    wide = tmp_path / "wide"
    shutil.copytree(target, wide)
    tiny.llama(vocab_size=160, bos_token_id=1, eos_token_id=2, pad_token_id=3).save_pretrained(wide)
    path = tmp_path / "wide.jsonl"
    path.write_text(json.dumps({"prompt_ids": [4, 7, 5], "answer_ids": [7, 150, 151, 152, 153, 154]}) + "\n")
    features = ("--features", tmp_path / "features")
    code, _, stderr = run("train", "--target", wide, "--data", path, *features, "--out", tmp_path / "a", *SMALL)
    assert code == 0, stderr
    where = ("train", "--target", target, "--out", tmp_path / "b", "--device", "cpu")
    for more in ((), ("--draft-vocab-size", 40)):
        code, _, stderr = run(*where, *features, *more)
        assert (code, "Train with the target the features" in stderr) == (2, True), stderr
    # Said before anything is made for that drafter.
    made = ("--data", answer_file(tmp_path), "--features", tmp_path / "new")
    code, _, stderr = run(*where, *made, "--init", tmp_path / "a")
    assert (code, "160" in stderr) == (2, True), stderr
    assert not (tmp_path / "new").exists()
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "Nothing to train on"),
        (("--features-only", "--features", "f"), "takes both --data"),
        (("--data", "no.jsonl"), "no.jsonl is not a file"),
        (("--features", "nowhere"), "has no index.json"),
        (("--data", "DATA", "--precision", "int4"), "--precision must be"),
        (("--data", "DATA", "--batch-size", "0"), "--batch-size must be at least 1"),
        (("--data", "DATA", "--decay", "-1"), "`decay` must be positive"),
        (("--data", "DATA", "--max-length", "2"), "`max_length` must be at least 3"),
        (("--data", "DATA", "--max-length", "9", "--too-long", "error"), "more than max_length=9"),
        (("--data", "DATA", "--init", "/no/such/drafter"), "/no/such/drafter"),
        (("--data", "DATA", "--target-layers", "1;2"), "--target-layers must look like"),
        (("--data", "DATA", "--target-layers", "5"), "`target_layer_ids` must lie in"),
        (("--data", "DATA", "--mask-token-id", "2"), "end-of-sequence"),
        (("--data", "DATA", "--draft-vocab-size", "3"), "between 7"),
        (("--data", "DATA", "--resume"), "no checkpoint"),
        (("--data", "DATA", "--device", "tpu"), "--device must be"),
        (("--data", "DATA", "--head", "lstm"), "markov_head_type"),
        (("--data", "DATA", "--schedule", "zigzag"), "zigzag"),
    ],
)
def test_bad_requests_for_training_exit_with_2(target, tmp_path, options, message) -> None:
    path = answer_file(tmp_path)
    options = [str(path) if word == "DATA" else word for word in options]
    code, _, stderr = run("train", "--target", target, "--out", tmp_path / "drafter", *options)
    assert code == 2
    assert message in stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["answers.jsonl"]


def test_record_of_another_tokenizer_is_named(target, tmp_path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt_ids": [4], "answer_ids": [7, 500]}) + "\n")
    code, _, stderr = run("train", "--target", target, "--out", tmp_path / "drafter", "--data", path)
    assert (code, "a.jsonl:1 holds token id 500" in stderr) == (2, True)


def test_mask_token_in_the_text_is_warned_of(target, tmp_path) -> None:
    where = ("--target", target, "--out", tmp_path / "drafter", "--data", answer_file(tmp_path))
    command = ("train", *where, *SMALL, "--steps", 1)
    assert "the answers hold the mask token" in run(*command, "--mask-token-id", 50)[2]
    assert "the answers hold" not in run(*command, "--overwrite", "--mask-token-id", 6)[2]


def test_help_names_defaults_and_their_sources() -> None:
    code, stdout, _ = run("train", "--help")
    assert code == 0
    for word in ("0.0006", "reference", "paper"):
        assert word in stdout
