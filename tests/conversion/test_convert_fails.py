"""Conversions that fail: nothing is overwritten, left behind, or kept although it is another drafter.

Catches: a half-written or overwritten folder, a source that is written over, a result that drafts otherwise and is
kept, a setting that comes back otherwise and is not noticed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from dspark.conversion import VerificationError, convert, flat_writer, verifying, writing

from dspark import DSparkDrafter
from dspark.hub import read_record
from tests.conversion import toys


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return toys.saved_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def source(tmp_path) -> Path:
    return toys.saved("vanilla", tmp_path / "source")


# --- destinations -------------------------------------------------------------------------------------------------


def test_what_is_there_stays_unless_it_is_to_be_replaced(source, tmp_path) -> None:
    out = tmp_path / "out"
    convert(source, out, to="vllm")
    (out / "README.md").write_text("mine")
    before = (out / "config.json").read_bytes()
    with pytest.raises(ValueError, match=r"out exists already\. .*`--overwrite`"):
        convert(source, out, to="speculators")
    assert (out / "config.json").read_bytes() == before
    convert(source, out, to="speculators", overwrite=True)
    assert read_record(out).format == "speculators"
    assert not (out / "README.md").exists()
    assert sorted(os.listdir(tmp_path)) == ["out", "source"]


@pytest.mark.parametrize("extra", ["run.sh", "checkpoints/"])
def test_a_folder_of_other_things_is_never_replaced(extra, source, tmp_path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / extra).mkdir() if extra.endswith("/") else (out / extra).write_text("")
    with pytest.raises(ValueError, match=rf"not replaced: it holds {extra.rstrip('/')}"):
        convert(source, out, to="vllm", overwrite=True)
    assert os.listdir(out) == [extra.rstrip("/")]


@pytest.mark.parametrize("place", ["source", "source/../source", ".", "link"])
def test_the_source_is_never_written_over(place, source, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.symlink("source", "link")
    before = (source / "config.json").read_bytes()
    with pytest.raises(ValueError, match="is what is read, or holds it"):
        convert(source, place, to="vllm", overwrite=True)
    assert (source / "config.json").read_bytes() == before


def test_nor_is_the_target(source, tmp_path) -> None:
    target = toys.saved_target(tmp_path / "target")
    with pytest.raises(ValueError, match="is what is read"):
        convert(source, target, to="vllm", target=target, overwrite=True)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_failed_run_leaves_nothing(overwrite, source, tmp_path, monkeypatch) -> None:
    out = tmp_path / "new" / "deep" / "out"
    if overwrite:
        convert(source, out, to="dspark")
    before = sorted(str(path) for path in tmp_path.rglob("*"))

    def fail(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, out, to="vllm", overwrite=overwrite, progress=fail)
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before
    if overwrite:
        assert read_record(out).format == "dspark"


def test_a_rename_that_fails_brings_the_old_one_back(source, tmp_path, monkeypatch) -> None:
    out, real, calls = tmp_path / "out", os.rename, []
    convert(source, out, to="dspark")

    def rename(one: Any, other: Any) -> None:
        calls.append(other)
        if len(calls) == 2:
            raise OSError("disk full")
        real(one, other)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(OSError, match="disk full"):
        convert(source, out, to="vllm", overwrite=True)
    assert read_record(out).format == "dspark"
    assert sorted(os.listdir(tmp_path)) == ["out", "source"]


# --- verification -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fc.weight", "markov_head.markov_w2.weight", "confidence_head.proj.bias"])
def test_another_drafter_is_not_kept(name, source, target, tmp_path, monkeypatch) -> None:
    """A writer that gets one tensor wrong."""

    def spoilt(folder: Path, tensors: Any, **how: Any) -> Any:
        stored = tensors[name]
        tensors = {**tensors, name: stored.transformed("spoilt", stored[...] + 1e-3)}
        return real(folder, tensors, **how)

    real = writing.write_tensors
    monkeypatch.setattr(writing, "write_tensors", spoilt)
    with pytest.raises(VerificationError, match=r"(draft|confidence) logits .*Nothing was kept"):
        convert(source, tmp_path / "out", to="vllm", target=target, verify=True)
    assert os.listdir(tmp_path) == ["source"]
    convert(source, tmp_path / "out", to="vllm", target=target, verify=True, tolerance=100.0)


@pytest.mark.parametrize(("key", "value", "field"), [
    ("sample_from_anchor", False, "sample_from_anchor"), ("block_size", 5, "block_size"), ("rope_theta", ..., "rope"),
    ("rms_norm_eps", 1e-5, "rms_norm_eps"),
])  # fmt: skip
def test_a_setting_that_comes_back_otherwise_stops_it_without_being_asked(
    key, value, field, source, tmp_path, monkeypatch
) -> None:
    real = flat_writer.superset

    def spoilt(record: Any) -> dict[str, Any]:
        config = real(record)
        if key == "rope_theta":
            config["rope_theta"] = config["rope_parameters"]["rope_theta"] = 5.0
        else:
            config[key] = value
        return config

    monkeypatch.setattr(flat_writer, "superset", spoilt)
    with pytest.raises(ValueError, match=rf"would be read as flat with `{field}\w*` "):
        convert(source, tmp_path / "out", to="vllm")
    assert os.listdir(tmp_path) == ["source"]


def test_windows_matter_to_the_contexts_that_are_compared(tmp_path) -> None:
    """The contexts are longer than the window, so that a result without it would be another."""
    one, other = (toys.saved(kind, tmp_path / kind) for kind in ("windows from anchor", "vanilla"))

    def loads(folder: Path) -> Any:
        return lambda: DSparkDrafter.from_pretrained(folder)

    with pytest.raises(VerificationError):
        verifying.verify(loads(one), loads(other), None, tolerance=1e-4)
