"""Conversions that fail: nothing is overwritten, left behind, or kept although it is another drafter.

Catches: a half-written or overwritten folder, a source that is written over, a result that drafts otherwise and is
kept, a setting that comes back otherwise and is not noticed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
from dspark.conversion import VerificationError, convert, flat_writer, verifying, writing

from dspark import DSparkDrafter
from dspark.hub import read_record
from tests import small
from tests.conversion import peers, toys


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
    with pytest.raises(ValueError, match="is what is read, holds it or is one of its files"):
        convert(source, place, to="vllm", overwrite=True)
    assert (source / "config.json").read_bytes() == before


def test_nor_is_the_target(source, tmp_path) -> None:
    target = toys.saved_target(tmp_path / "target")
    with pytest.raises(ValueError, match="is what is read"):
        convert(source, target, to="vllm", target=target, overwrite=True)


def test_what_is_read_inside_a_folder_is_not_written_over_either(source, tmp_path) -> None:
    """A subfolder and a GGUF file of a folder are sources as much as the folder."""
    os.rename(source, tmp_path / "sub")
    os.makedirs(tmp_path / "all")
    os.rename(tmp_path / "sub", tmp_path / "all" / "sub")
    held = (tmp_path / "all" / "sub" / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match="is what is read"):
        convert(tmp_path / "all", tmp_path / "all" / "sub", to="vllm", subfolder="sub", overwrite=True)
    assert (tmp_path / "all" / "sub" / "model.safetensors").read_bytes() == held
    convert(tmp_path / "all", tmp_path / "all" / "beside", to="vllm", subfolder="sub")
    for how in ({}, {"gguf_file": "d.gguf"}):
        folder = tmp_path / f"gguf {len(how)}"
        folder.mkdir()
        shutil.copyfile(peers.folder("gguf_dflash") / "drafter.gguf", folder / "d.gguf")
        with pytest.raises(ValueError, match="is what is read"):
            convert(folder, folder / "d.gguf", to="dspark", overwrite=True, **how)


def test_only_a_drafter_is_replaced(source, target, tmp_path) -> None:
    """A target's folder, or one of notes, has no file that a drafter's could not have."""
    shutil.copytree(target, tmp_path / "model")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "work.py").write_text("mine")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "config.json").write_text('{"model_type": "dsp')
    (tmp_path / "text.gguf").write_text("mine")
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "qwen3")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    for name, words in (("model", "a config.json that is no drafter's"), ("notes", "work.py and no config.json"),
                        ("half", "a config.json that is no drafter's"), ("text.gguf", "is no GGUF file"),
                        ("model.gguf", r"a model \('qwen3'\)")):  # fmt: skip
        before = _contents(tmp_path / name)
        with pytest.raises(ValueError, match=rf"{name} is not replaced: it .*{words}.*move it away yourself"):
            convert(source, tmp_path / name, to="vllm", overwrite=True)
        assert _contents(tmp_path / name) == before


def _contents(place: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in [place, *place.rglob("*")] if path.is_file()}


def test_what_appears_there_meanwhile_stays(source, tmp_path) -> None:
    def appear(done: int, total: int) -> None:
        if done == total:
            shutil.copytree(source, tmp_path / "out")

    with pytest.raises(ValueError, match="out exists already"):
        convert(source, tmp_path / "out", to="vllm", progress=appear)
    assert read_record(tmp_path / "out").format == "dspark"
    assert sorted(os.listdir(tmp_path)) == ["out", "source"]


@pytest.mark.parametrize("place", ["file/out", "long" * 64, "new/deep/" + "long" * 64])
def test_a_place_that_cannot_be_written_is_named(place, source, tmp_path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OSError, match=r"cannot be written: .*\. Name a place .* Nothing was kept"):
        convert(source, tmp_path / place, to="vllm")
    assert sorted(os.listdir(tmp_path)) == ["file", "source"]


@pytest.mark.parametrize("name", ["n" * 255, "\u5b57" * 85, "a" * 250 + ".gguf"])
def test_the_longest_names_can_be_written(name, source, tmp_path) -> None:
    convert(source, tmp_path / name, to="vllm")
    assert read_record(tmp_path / name).format == "flat"


@pytest.mark.parametrize("to", ["vllm", "gguf-dflash"])
def test_a_full_disk_is_named(to, tmp_path) -> None:
    """A limit of the size of files stands for it; in a process of its own."""
    small.drafter(vocab_size=toys.ROWS).save_pretrained(tmp_path / "source")
    target = toys.saved_target_with_tokenizer(tmp_path / "target")
    code = (
        "import resource, sys; from dspark.conversion import convert\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))\n"
        "try: convert(*sys.argv[1:3], to=sys.argv[3], target=sys.argv[4])\n"
        "except OSError as error: sys.stdout.write(str(error))\n"
    )
    out = tmp_path / ("out.gguf" if to != "vllm" else "out")
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "source", out, to, target], capture_output=True, text=True, check=True
    )
    assert re.search(r"out(\.gguf)? cannot be written: .*\. Make room, or name a place on another disk", done.stdout)
    assert sorted(os.listdir(tmp_path)) == ["source", "target"]


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
