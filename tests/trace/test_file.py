"""The file of traces: what is written comes back, and nothing else is taken for one."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dspark.trace import Trace, load, save
from tests.trace import made


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_what_is_written_comes_back(tmp_path: Path, name: str) -> None:
    traces = [made.trace(), made.trace(1, seed=1), made.trace(200, seed=2, text="\u2028 \U0001f642")]
    save(tmp_path / name, traces)
    assert load(tmp_path / name) == traces
    assert [path.name for path in tmp_path.iterdir()] == [name]  # nothing temporary is left


def test_gzip_is_smaller_and_the_same_every_time(tmp_path: Path) -> None:
    for name in ("a.json", "a.json.gz", "b.json.gz"):
        save(tmp_path / name, [made.trace(500)])
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert 3 * sizes["a.json.gz"] < sizes["a.json"]
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()


def test_a_trace_of_a_thousand_tokens_is_small(tmp_path: Path) -> None:
    save(tmp_path / "t.json.gz", [made.trace(1000)])
    assert (tmp_path / "t.json.gz").stat().st_size < 100_000


def write(path: Path, document: Any) -> Path:
    path.write_text(json.dumps(document))
    return path


def document(**fields: Any) -> dict[str, Any]:
    return {"format": "dspark-trace", "version": 1, "traces": [made.trace().to_json()], **fields}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "cannot be read as a trace"),
        (b"\xff\xfe", "cannot be read as a trace"),
        (b"[]", "it is no trace"),
        (b'{"format": "dspark-throughput-curve", "version": 1}', "it is no trace"),
        (json.dumps(document(version=2)).encode(), "`version` is 2, this release reads 1"),
        (json.dumps(document(version="1")).encode(), "`version` is '1'"),
        (json.dumps(document())[:-40].encode(), "cannot be read as a trace"),
        (json.dumps(document(traces={})).encode(), "`the file.traces` must be a list"),
        (json.dumps(document(traces=[3])).encode(), r"`traces\[0\]` must be an object, got 3"),
        (b"[" * 100_000, "cannot be read as a trace"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, data: bytes, words: str) -> None:
    (tmp_path / "t.json").write_bytes(data)
    with pytest.raises(ValueError, match=words) as caught:
        load(tmp_path / "t.json")
    assert "t.json" in str(caught.value)


@pytest.mark.parametrize("keep", [0, 10, -1, -20])
def test_broken_gzip_is_refused(tmp_path: Path, keep: int) -> None:
    whole = gzip.compress(json.dumps(document()).encode())
    for data in (whole[:keep], b"x" + whole[1:], whole[:20] + b"\0\0\0\0" + whole[24:]):
        (tmp_path / "t.json.gz").write_bytes(data)
        with pytest.raises(ValueError, match="cannot be read as a trace"):
            load(tmp_path / "t.json.gz")


def test_more_than_fits_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dspark.trace.file._MOST_BYTES", 1 << 20)
    (tmp_path / "t.json.gz").write_bytes(gzip.compress(b" " * (1 << 21)))
    with pytest.raises(ValueError, match="more than 1 MiB"):
        load(tmp_path / "t.json.gz")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"no\.json"):
        load(tmp_path / "no.json")


def refused_round(entry: dict[str, Any]) -> dict[str, Any]:
    return next(r for r in entry["rounds"] if r["rejection"] is not None)


Change = Callable[[dict[str, Any]], Any]
CHANGES: list[tuple[Change, str]] = [
    (lambda t: t.pop("texts"), "`trace.texts` is missing"),
    (lambda t: t["texts"].popitem(), "must have a text for token"),
    (lambda t: t["texts"].update({"-1": "x"}), "must have token ids as names"),
    (lambda t: t["texts"].update({"99999999999999999999": "x"}), "must have token ids as names"),
    (lambda t: t["texts"].update({"1": 5}), "`trace.texts` must be an object of texts"),
    (lambda t: t["texts"].update({"1": "\ud800"}), "`trace.texts` must be an object of texts"),
    (lambda t: t.update(target=None), "`trace.target` must be text, got None"),
    (lambda t: t.update(settings={"a": [1]}), "`trace.settings` must be an object of plain values"),
    (lambda t: t.update(prompt=[-1]), "`trace.prompt` must be a list of token ids"),
    (lambda t: t.update(prompt=[True]), "`trace.prompt` must be a list of token ids"),
    (lambda t: t.update(first=[1]), "`trace.first` must hold pairs"),
    (lambda t: t.update(prefill_seconds=float("nan")), "`trace.prefill_seconds` must be a number of seconds"),
    (lambda t: t.update(prefill_seconds=10**400), "`trace.prefill_seconds` must be a number of seconds"),
    (lambda t: t["rounds"].insert(0, []), r"`trace.rounds\[0\]` must be an object"),
    (lambda t: t["rounds"].pop(1), r"`trace.rounds\[1\].anchor` must be the last token's"),
    (lambda t: t["rounds"][0].update(verified=8), "must be a whole number from 0 to"),
    (lambda t: t["rounds"][0].update(verified=0.0), "must be a whole number"),
    (lambda t: t["rounds"][0].update(steps=[1, 2]), "`trace.rounds.0..steps` must be 7 numbers of seconds"),
    (lambda t: t["rounds"][0].update(emitted=[]), "must"),
    (lambda t: t["rounds"][0].update(probs=[2.0]), "probs` must be"),
    (lambda t: refused_round(t).update(rejection=None), "rejection` must be there iff one was refused"),
    (lambda t: refused_round(t).update(base=[0.5]), "base` must be"),
    (lambda t: refused_round(t)["confidence"].append(0.5), "confidence` must be"),
    (lambda t: refused_round(t)["rejection"].update(prob=1.5), "rejection.prob` must be a number from 0 to 1"),
    (lambda t: refused_round(t)["rejection"].update(head=[["<b>", 0.5]]), "rejection.head` must hold pairs"),
]


@pytest.mark.parametrize(("change", "words"), CHANGES)
def test_the_entry_that_is_wrong_is_named(change: Change, words: str) -> None:
    data = json.loads(json.dumps(made.trace(40).to_json()))
    assert Trace.from_json(data) == made.trace(40)
    change(data)
    with pytest.raises(ValueError, match=words):
        Trace.from_json(data)
