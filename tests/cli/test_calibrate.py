"""`dspark calibrate` end to end on a tiny target: what is fitted, what is written where, what is refused before work.

Catches: temperatures fitted on the prompts that judge them, a file that is changed though the run failed, a list for
another decoding temperature that is lost, a copy that changes its original, work done before bad input is found.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from dspark.conversion.sglang_sts import from_json
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from typer.testing import CliRunner

import dspark.cli.calibrate  # noqa: F401 - so that the module is found below; the package has a command of its name
from dspark import DSparkDrafter
from dspark.calibration import LinearHead, fit_positions, position_reliability
from dspark.cli import app
from dspark.config_file import update_config_file
from dspark.evaluation.calibrate import held_out_places
from dspark.evaluation.refit import HeadRounds, _head_rounds, refit
from dspark.evaluation.rounds import collect_rounds, stack_rounds
from dspark.stats import SpeculationStats
from tests.training import tiny

WORDS = [f"w{i}" for i in range(12)]
PROMPTS = 8
TOKENS = 60
NOTE = "calibrated_on.json"


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Path:
    """Folder with a target of sixteen tokens that never ends its texts, a drafter that is often right about it when it
    samples, and prompts."""
    root = tmp_path_factory.mktemp("pair")
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["<unk>", "<pad>", *WORDS, "a", "b"])}, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", pad_token="<pad>").save_pretrained(
        root / "target"
    )
    target = tiny.llama(vocab_size=16, bos_token_id=None, eos_token_id=None, pad_token_id=1)
    target.lm_head.weight.data.mul_(8)
    target.save_pretrained(root / "target")
    drafter = tiny.drafter_for(target, mask_token_id=15)
    with torch.no_grad():
        drafter.confidence_head.proj.weight.mul_(20)
        drafter.confidence_head.proj.bias.fill_(3.0)
    drafter.save_pretrained(root / "drafter")
    lines = [json.dumps({"prompt": f"{WORDS[i]} {WORDS[(3 * i) % 12]} a"}) for i in range(PROMPTS)]
    (root / "ask.jsonl").write_text("\n".join(lines) + "\n")
    return root


@pytest.fixture
def drafter(pair: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pair / "drafter", tmp_path / "drafter"))


def run(*words: Any) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["calibrate", *map(str, words)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, " ".join(result.stderr.split())


def command(pair: Path, drafter: Path, *more: Any) -> list[Any]:
    return [
        "--target", pair / "target", "--drafter", drafter, "--prompts", pair / "ask.jsonl", "--max-new-tokens", TOKENS,
        "--device", "cpu", "--dtype", "fp32", *more,
    ]  # fmt: skip


def hashes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def rows_of(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())["confidence_temperatures"]


def test_the_fit_is_that_of_the_prompts_that_do_not_judge_it(pair: Path, drafter: Path, tmp_path: Path) -> None:
    before = hashes(drafter)
    files = ("--report", tmp_path / "report.json", "--sglang", tmp_path / "sts.json")
    code, stdout, stderr = run(*command(pair, drafter, "--temperature", 1, "--no-pack", "--json", *files))
    assert code == 0, stderr
    after = hashes(drafter)
    assert {name for name in before if after[name] != before[name]} == {"config.json"}
    assert after.keys() - before.keys() == {NOTE}
    figures = json.loads(stdout)
    assert figures == json.loads((tmp_path / "report.json").read_text())
    (found,) = figures["calibrations"]
    assert rows_of(drafter) == {"1": found["temperatures"]} == figures["confidence_temperatures"]

    model = AutoModelForCausalLM.from_pretrained(pair / "target", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(pair / "target")
    texts = [json.loads(line)["prompt"] for line in (pair / "ask.jsonl").read_text().splitlines()]
    ids = [tokenizer(text, return_tensors="pt").input_ids for text in texts]
    stats = collect_rounds(model, DSparkDrafter.from_pretrained(drafter), ids, temperature=1.0, max_new_tokens=TOKENS)
    places = held_out_places([PROMPTS], 0.3, 0)
    fitted = stack_rounds([s for s, out in zip(stats, places, strict=True) if not out], 4)
    expected = fit_positions(fitted.logits, fitted.accepted, verified_lengths=fitted.verified)
    assert found["temperatures"] == [round(fit.temperature, 4) for fit in expected]
    assert found["fit"]["num_rounds"] == len(fitted.logits) > 100
    assert found["held_out"]["num_rounds"] == sum(len(s.scored_rounds()) for s in stats) - len(fitted.logits)
    assert figures["num_held_out_prompts"] == sum(places) == 2
    assert [part["bins"] != [] for part in found["held_out"]["after"]] == [True] * 4
    # The head was made far too sure.
    assert found["temperatures"][0] > 1.5
    raw, calibrated = (sum(row["ece"] for row in found["held_out"][part]) for part in ("before", "after"))
    assert calibrated < 0.7 * raw

    sts = from_json((tmp_path / "sts.json").read_text(), num_draft_tokens=4)
    assert list(sts.temperatures) == found["temperatures"]
    assert (sts.dataset, sts.num_samples) == ("ask", found["fit"]["num_rounds"])
    assert list(sts.ece_after) == [part["ece"] for part in found["held_out"]["after"]]


def test_each_temperature_gets_a_list_and_others_are_kept(pair: Path, drafter: Path, tmp_path: Path) -> None:
    sts = tmp_path / "sts.json"
    code, stdout, stderr = run(*command(pair, drafter, "--temperature", 1, "--temperature", 0.5, "--sglang", sts))
    assert code == 0, stderr
    first = rows_of(drafter)
    assert list(first) == ["0.5", "1"]
    assert first["0.5"] != first["1"]
    assert sorted(path.name for path in tmp_path.glob("sts*")) == ["sts-t0.5.json", "sts-t1.json"]
    assert from_json((tmp_path / "sts-t1.json").read_text()).temperatures == tuple(first["1"])
    assert "reached" in stdout
    assert "…" not in stdout  # nothing is cut off in 80 columns
    for temperature in ("1", "0.5"):
        assert re.search(rf"for decoding at {temperature} fitted at (all 4|[1-3] of 4) positions", stderr)
    assert run(*command(pair, drafter, "--temperature", 0.5, "--seed", 3))[0] == 0
    second = rows_of(drafter)
    assert second["1"] == first["1"]
    assert second["0.5"] != first["0.5"]
    loaded = DSparkDrafter.from_pretrained(drafter).config
    assert loaded.temperatures_at(0.6) == second["0.5"]


def test_what_was_fitted_is_said_in_the_words_of_the_table(pair: Path, drafter: Path) -> None:
    code, stdout, stderr = run(*command(pair, drafter, "--temperature", 1, "--max-new-tokens", 30))
    assert code == 0, stderr
    rows = re.findall(r"│ +(\d) +│ +([\d.]+) │ +(\d+) │", stdout)
    reached = {int(position): int(count) for position, _, count in rows}
    notes = dict(re.findall(r"position (\d): (\d+) rounds reached it, fewer than 50", stdout))
    assert notes
    assert {int(position): int(count) for position, count in notes.items()}.items() <= reached.items()
    fitted = [position for position, count in reached.items() if count >= 50]
    named = ", ".join(map(str, fitted))
    assert f"fitted at {len(fitted)} of 4 positions ({named}); each other keeps the one before it" in stderr
    temperatures = rows_of(drafter)["1"]
    assert temperatures[len(fitted) :] == [temperatures[len(fitted) - 1]] * (4 - len(fitted))


def test_where_nothing_can_be_fitted_nothing_is_written(pair: Path, drafter: Path, monkeypatch) -> None:
    before = hashes(drafter)

    def rejects_all(stats: Any, positions: int) -> Any:
        rounds = stack_rounds(stats, positions)
        return rounds._replace(accepted=torch.zeros_like(rounds.accepted))

    monkeypatch.setattr("dspark.evaluation.calibrate.stack_rounds", rejects_all)
    code, _, stderr = run(*command(pair, drafter, "--temperature", 1))
    assert code == 2
    assert "No temperature could be fitted for decoding at temperature 1, so nothing is written" in stderr
    assert "rounds that reached it rejected it" in stderr
    assert hashes(drafter) == before


def test_eval_says_that_it_runs_the_prompts_that_were_calibrated_on(pair: Path, drafter: Path, tmp_path: Path) -> None:
    assert run(*command(pair, drafter, "--temperature", 1, "--limit", 5))[0] == 0
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"prompt": f"{WORDS[3]} b"}) + "\n")
    short = (
        "--temperature",
        0,
        "--max-new-tokens",
        4,
        "--no-speed",
        "--threads",
        1,
        "--device",
        "cpu",
        "--dtype",
        "fp32",
    )
    models = ("--target", pair / "target", "--drafter", drafter)
    told = []
    for file in (pair / "ask.jsonl", other):
        out = tmp_path / f"of {file.stem}"
        words = ["eval", *models, "--prompts", file, *short, "--out", out]
        result = CliRunner().invoke(app, [str(word) for word in words])
        assert result.exit_code == 0, result.output
        told.append(" ".join(result.stderr.split()))
        notes = json.loads((out / "report.json").read_text())["notes"]
        assert [note in told[-1] for note in notes if "was calibrated" in note] == [True] * (file != other)
    assert "drafter was calibrated on 5 of these 8 prompts" in told[0]
    assert "calibrated" not in told[1]
    noted = json.loads((drafter / NOTE).read_text())["prompt_hashes"]
    assert {key: {name: len(each) for name, each in sets.items()} for key, sets in noted.items()} == {"1": {"ask": 5}}


def test_greedy_and_sampling_are_the_default_and_unfitted_positions_are_named(pair: Path, drafter: Path) -> None:
    # Greedy, this untrained drafter is nearly always wrong.
    code, stdout, stderr = run(*command(pair, drafter))
    assert code == 0, stderr
    assert list(rows_of(drafter)) == ["0", "1"]
    assert "kept the temperature before it" in " ".join(stdout.split())


def test_a_copy_leaves_the_drafter_as_it_is(pair: Path, drafter: Path, tmp_path: Path) -> None:
    before = hashes(drafter)
    code, _, stderr = run(*command(pair, drafter, "--temperature", 1, "--out", tmp_path / "copy"))
    assert code == 0, stderr
    assert hashes(drafter) == before
    after = hashes(tmp_path / "copy")
    assert {name for name in before if after[name] != before[name]} == {"config.json"}
    assert after.keys() - before.keys() == {NOTE}
    assert all(math.isfinite(t) for t in rows_of(tmp_path / "copy")["1"])


def test_the_head_is_fitted_in_the_copy_and_temperatures_to_its_logits(
    pair: Path, drafter: Path, tmp_path: Path
) -> None:
    update_config_file(drafter, confidence_temperatures={"0.5": [3.0] * 4})
    for path in drafter.iterdir():
        path.chmod(0o444)
    before = hashes(drafter)
    options = ("--temperature", 1, "--max-new-tokens", 150, "--held-out", 0.4, "--json")
    code, stdout, stderr = run(*command(pair, drafter, *options, "--refit-head", "--out", tmp_path / "copy"))
    assert code == 0, stderr
    assert hashes(drafter) == before
    after = hashes(tmp_path / "copy")
    assert {name for name in before if after[name] != before[name]} == {"config.json", "model.safetensors"}
    old, new = (DSparkDrafter.from_pretrained(path) for path in (drafter, tmp_path / "copy"))
    moved = {name for name, value in new.state_dict().items() if not torch.equal(value, old.state_dict()[name])}
    assert moved == {"confidence_head.proj.weight", "confidence_head.proj.bias"}
    assert list(rows_of(tmp_path / "copy")) == ["1"]  # the other list was fitted to the head as it was
    assert all(path.stat().st_mode & 0o200 for path in (tmp_path / "copy").iterdir())
    figures = json.loads(stdout)
    assert figures["confidence_head"]["log_loss_after"] < 0.8 * figures["confidence_head"]["log_loss_before"]
    (found,) = figures["calibrations"]

    # The figures are those of the copy as it loads, on the same text.
    model = AutoModelForCausalLM.from_pretrained(pair / "target", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(pair / "target")
    texts = [json.loads(line)["prompt"] for line in (pair / "ask.jsonl").read_text().splitlines()]
    ids = [tokenizer(text, return_tensors="pt").input_ids for text in texts]
    places = held_out_places([PROMPTS], 0.4, 0)
    stats = collect_rounds(model, new, ids, temperature=1.0, max_new_tokens=150)
    judged = stack_rounds([s for s, out in zip(stats, places, strict=True) if out], 4)
    rows = position_reliability(
        judged.logits, judged.accepted, verified_lengths=judged.verified, temperatures=rows_of(tmp_path / "copy")["1"]
    )
    told = found["held_out"]["after"]
    assert [row.predicted for row in rows] == pytest.approx([row["predicted"] for row in told], abs=0.02)
    raw = found["held_out"]["before"]
    assert raw[0]["predicted"] > told[0]["predicted"] + 0.03  # the head was far too sure
    assert sum(row["brier"] for row in told) < sum(row["brier"] for row in raw)


def test_a_packed_half_width_head_is_fitted(pair: Path, drafter: Path, tmp_path: Path) -> None:
    options = ("--temperature", 1, "--max-new-tokens", 150, "--dtype", "bf16", "--refit-head", "--json")
    code, stdout, stderr = run(*command(pair, drafter, *options, "--out", tmp_path / "copy"))
    assert code == 0, stderr
    told = json.loads(stdout)["confidence_head"]
    assert told["log_loss_after"] < 0.8 * told["log_loss_before"]
    old, new = (DSparkDrafter.from_pretrained(path).confidence_head.proj for path in (drafter, tmp_path / "copy"))
    assert new.bias < old.bias - 0.5  # far too sure before: more than a rounding


def test_a_fitted_head_is_not_written_in_place(pair: Path, drafter: Path) -> None:
    before = hashes(drafter)
    code, _, stderr = run(*command(pair, drafter, "--refit-head"))
    assert (code, hashes(drafter)) == (2, before)
    assert "`--refit-head` changes weights, so it writes a copy: name it with --out." in stderr


def test_prompts_without_rounds_and_overflowing_heads_in_a_refit() -> None:
    drafter = tiny.drafter_for(tiny.llama())
    head = drafter.confidence_head.proj
    generator = torch.Generator().manual_seed(0)

    def prompt(rounds: int) -> HeadRounds:
        inputs = torch.randn(rounds, 4, head.in_features, generator=generator)
        accepted = torch.randint(5, (rounds,), generator=generator).tolist()
        logits = head(inputs).squeeze(-1).tolist()
        return HeadRounds(SpeculationStats([4] * rounds, [4] * rounds, accepted, logits), inputs)

    parts = [[prompt(n) for n in (80, 80, 0, 80, 80, 60, 0)], [prompt(n) for n in (80, 80, 80, 80, 0, 60, 0)]]
    fit, logits = refit(drafter, parts, [False] * 5 + [True, False])
    assert [[len(row) for row in part] for part in logits] == [[80, 80, 0, 80, 80, 60, 0], [80, 80, 80, 80, 0, 60, 0]]
    torch.testing.assert_close(logits[0][5], fit.head.logits(parts[0][5].inputs))
    torch.testing.assert_close(logits[1][3], fit.folds[3].logits(parts[1][3].inputs))

    stats = SpeculationStats([4], [4], [1], [[0.0, -math.inf, 0.0, 0.0]])
    with pytest.raises(ValueError, match="must be finite"):
        _head_rounds(stats, [torch.zeros(4, head.in_features)], LinearHead(torch.zeros(head.in_features), 0.0))


def test_packing_gives_the_same_temperatures_and_stored_weights(pair: Path, drafter: Path, tmp_path: Path) -> None:
    weights = hashes(drafter)["model.safetensors"]
    assert run(*command(pair, drafter, "--temperature", 1, "--pack"))[0] == 0
    packed = rows_of(drafter)["1"]
    assert run(*command(pair, drafter, "--temperature", 1, "--no-pack"))[0] == 0
    assert rows_of(drafter)["1"] == pytest.approx(packed, rel=0.3)  # a draw near a boundary may fall to its other side
    assert hashes(drafter)["model.safetensors"] == weights


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--drafter", "someone/some-drafter"), "is not a local folder, so nothing can be written into it"),
        (("--drafter", "{target}"), "has model_type 'llama', not 'dspark'"),
        (("--drafter", "{headless}"), "has no confidence head"),
        (("--out", "{drafter}"), "exists already"),
        (("--out", "{drafter}/config.json/copy"), "is no folder that can be written to"),
        (("--out", "{drafter}-copy", "--refit-head", "--limit", "4"), "that are not held out, got 3 of 4"),
        (("--held-out", "0"), "must lie between 0 and 1"),
        (("--held-out", "0.01"), "leave no prompt on one side"),
        (("--limit", "1"), "Give at least 4 prompts, or another share (--held-out)."),
        (("--max-new-tokens", "5"), "24 rounds at most from 8 prompts of 5 new tokens are too few"),
        (("--temperature", "-1"), "`temperatures` must be at least 0"),
        (("--temperature", "1", "--temperature", "1"), "must name each value once"),
        (("--set", "gsm9k"), "No shipped prompt set 'gsm9k'"),
        (("--prompts", "no.jsonl"), "no.jsonl"),
        (("--report", "/no/such/folder/r.json"), "must be a file in a folder that exists"),
        (("--sglang", "{drafter}"), "must be a file in a folder that exists"),
        (("--dtype", "int4"), "`--dtype` must be one of"),
    ],
)  # fmt: skip
def test_bad_requests_exit_with_2_before_any_model_is_loaded(
    pair: Path, drafter: Path, tmp_path: Path, monkeypatch, options: tuple[str, ...], message: str
) -> None:
    headless = tmp_path / "headless"
    tiny.drafter_for(tiny.llama(), enable_confidence_head=False).save_pretrained(headless)
    before = hashes(drafter)

    def loads(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("dspark.cli.loading.AutoModelForCausalLM.from_pretrained", loads)
    names = {"target": pair / "target", "headless": headless, "drafter": drafter}
    code, _, stderr = run(*command(pair, drafter), *(option.format(**names) for option in options))
    assert code == 2
    assert message in stderr
    assert hashes(drafter) == before


def test_too_few_rounds_change_nothing(pair: Path, drafter: Path, tmp_path: Path) -> None:
    # Enough tokens for fifty rounds of one token each, but sampling accepts more than that.
    before = hashes(drafter)
    options = ("--temperature", 1, "--max-new-tokens", 10, "--report", tmp_path / "report.json")
    code, _, stderr = run(*command(pair, drafter), *options)
    assert code == 2
    assert "rounds at temperature 1 are too few" in stderr
    assert hashes(drafter) == before
    assert not (tmp_path / "report.json").exists()


def test_help_names_every_option_s_meaning() -> None:
    result = CliRunner().invoke(app, ["calibrate", "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 0
    for word in ("--held-out", "--sglang", "--report", "sequential temperature", "Exit codes"):
        assert word in result.output
