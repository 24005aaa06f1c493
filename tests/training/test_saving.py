"""The finished folder: whole or not there, and loadable.

Catches: a save that leaves half a folder behind or takes the earlier one away before the new one is whole.
"""

from __future__ import annotations

import json

import pytest
import torch

from dspark import DSparkDrafter
from dspark.training import save_drafter
from dspark.training.saving import environment

from . import tiny


def test_folder_loads_and_says_how_it_was_made(tmp_path) -> None:
    drafter = tiny.drafter_for(tiny.llama())
    out = tmp_path / "deep" / "drafter"
    save_drafter(drafter, out, {"steps": 3, **environment()})
    again = DSparkDrafter.from_pretrained(out)
    assert torch.equal(again.fc.weight, drafter.fc.weight)
    told = json.loads((out / "training.json").read_text())
    assert told["steps"] == 3
    assert {"dspark", "torch", "transformers", "python"} == set(told["versions"])
    assert [p.name for p in out.parent.iterdir()] == ["drafter"]


def test_failed_save_leaves_the_earlier_folder(tmp_path, monkeypatch) -> None:
    drafter = tiny.drafter_for(tiny.llama())
    out = tmp_path / "drafter"
    save_drafter(drafter, out, {"run": 1})
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def breaks(folder) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(drafter, "save_pretrained", breaks)
    with pytest.raises(OSError, match="disk full"):
        save_drafter(drafter, out, {"run": 2})
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    with pytest.raises(OSError, match="disk full"):
        save_drafter(drafter, tmp_path / "new", {})
    assert [p.name for p in tmp_path.iterdir()] == ["drafter"]


def test_later_save_replaces_the_folder(tmp_path) -> None:
    drafter = tiny.drafter_for(tiny.llama())
    out = tmp_path / "drafter"
    save_drafter(drafter, out, {"run": 1})
    (out / "left over").touch()
    save_drafter(drafter, out, {"run": 2})
    assert json.loads((out / "training.json").read_text())["run"] == 2
    assert not (out / "left over").exists()


def test_weights_put_together_from_parts_are_what_is_saved(tmp_path) -> None:
    drafter = tiny.drafter_for(tiny.llama())
    whole = {name: tensor + 1 for name, tensor in drafter.state_dict().items()}
    save_drafter(drafter, tmp_path / "drafter", {}, whole)
    again = DSparkDrafter.from_pretrained(tmp_path / "drafter").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in whole.items())
