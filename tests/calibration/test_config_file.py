"""A field of a drafter's config.json changed in place or in a copy: all or nothing, and nothing else.

Catches: a file that is half written when the machine stops, other fields that are rewritten, weights that are stored
in another dtype, a broken config on disk, a folder of another format that is overwritten.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
import torch

from dspark import DSparkDrafter
from dspark.config_file import check_can_update, copy_with, update_config_file
from tests import small
from tests.conftest import golden_root

ROWS = {"0": [1.5, 1.0, 0.7, 2.25]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "drafter"
    small.drafter().bfloat16().save_pretrained(path)
    (path / "README.md").write_text("a card")
    return path


def hashes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_only_the_field_changes(folder: Path) -> None:
    before, lines = hashes(folder), (folder / "config.json").read_text().splitlines()
    os.chmod(folder / "config.json", 0o640)
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    update_config_file(folder, confidence_temperatures=ROWS)
    after = hashes(folder)
    assert {name for name in after if after[name] != before.get(name)} == {"config.json"}
    assert after.keys() == before.keys()
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    assert (folder / "config.json").stat().st_mode & 0o777 == 0o640
    written = (folder / "config.json").read_text()
    assert written.endswith("}\n")
    field = next(i for i, line in enumerate(lines) if "confidence_temperatures" in line)
    assert written.splitlines()[:field] == lines[:field]
    assert written.splitlines()[field - len(lines) + 1 :] == lines[field + 1 :]
    assert DSparkDrafter.from_pretrained(folder).config.confidence_temperatures == ROWS


def test_a_field_that_was_not_there_is_added_at_the_end(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    del raw["confidence_temperatures"]
    (folder / "config.json").write_text(json.dumps(raw))
    update_config_file(folder, confidence_temperatures=ROWS)
    assert json.loads((folder / "config.json").read_text()) == {**raw, "confidence_temperatures": ROWS}


@pytest.mark.parametrize("step", ["replace", "fsync"])
def test_a_crash_leaves_the_old_file_and_nothing_else(folder: Path, step: str, monkeypatch) -> None:
    before = hashes(folder)

    def breaks(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, step, breaks)
    with pytest.raises(OSError, match="disk full"):
        update_config_file(folder, confidence_temperatures=ROWS)
    assert hashes(folder) == before


def test_a_broken_config_is_not_written(folder: Path) -> None:
    before = hashes(folder)
    with pytest.raises(ValueError, match="must be 4 positive numbers"):
        update_config_file(folder, confidence_temperatures={"0": [1.0]})
    assert hashes(folder) == before


def test_a_folder_that_cannot_be_written_is_refused(folder: Path, monkeypatch) -> None:
    check_can_update(folder)
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    with pytest.raises(OSError, match=r"cannot be written to.*--out"):
        check_can_update(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "has no config.json"), ("{", "is not JSON"), ('{"model_type": "qwen3"}', "model_type 'qwen3', not"),
     ("[]", "model_type None")],
)  # fmt: skip
def test_other_folders_are_refused(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    for call in (check_can_update, update_config_file):
        with pytest.raises(ValueError, match=message):
            call(tmp_path)
    assert len(list(tmp_path.iterdir())) == (content is not None)


def test_a_copy_has_the_same_files_but_for_the_field(folder: Path) -> None:
    before = hashes(folder)
    copy = folder.parent / "deep" / "copy"
    copy_with(str(folder), copy, confidence_temperatures=ROWS)
    assert hashes(folder) == before
    after = hashes(copy)
    assert {name: value for name, value in after.items() if name != "config.json"} == {
        name: value for name, value in before.items() if name != "config.json"
    }
    assert DSparkDrafter.from_pretrained(copy).config.confidence_temperatures == ROWS
    assert [path.name for path in copy.parent.iterdir()] == ["copy"]
    with pytest.raises(OSError, match=r"exists already"):
        copy_with(str(folder), copy, confidence_temperatures=ROWS)


def test_a_copy_that_fails_leaves_nothing(folder: Path) -> None:
    with pytest.raises(ValueError, match="must be 4 positive numbers"):
        copy_with(str(folder), folder.parent / "copy", confidence_temperatures=[1.0])
    assert [path.name for path in folder.parent.iterdir()] == ["drafter"]


def test_a_copy_of_another_format_is_converted_in_its_own_dtype(tmp_path: Path) -> None:
    source = sorted((golden_root() / "drafts").iterdir())[0]
    theirs = DSparkDrafter.from_pretrained(source)
    rows = [2.0] * theirs.config.num_draft_tokens
    copy_with(str(source), tmp_path / "copy", confidence_temperatures=rows)
    ours = DSparkDrafter.from_pretrained(tmp_path / "copy", dtype="auto")
    assert ours.config.confidence_temperatures == rows
    for name, tensor in DSparkDrafter.from_pretrained(source, dtype="auto").state_dict().items():
        assert ours.state_dict()[name].dtype == tensor.dtype
        assert torch.equal(ours.state_dict()[name], tensor)
