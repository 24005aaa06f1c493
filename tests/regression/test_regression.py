"""Drafters that released versions wrote load and draft as they did then.

Catches: a renamed field or tensor, a default that moved, a rule that changed what a stored drafter means.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dspark import DSparkDrafter, __version__
from dspark.heads import SEQUENTIAL_HEADS
from tests.regression.drafters import DRAFTERS, EXPECTED, ROOT, build, drafted, tensors

FOLDERS = sorted(path.parent for path in ROOT.glob("*/*/config.json"))


def name(folder: Path) -> str:
    return f"{folder.parent.name}-{folder.name}"


def test_every_head_of_every_version_is_kept() -> None:
    versions = {folder.parent.name for folder in FOLDERS}
    assert {(folder.parent.name, folder.name) for folder in FOLDERS} == {(v, h) for v in versions for h in DRAFTERS}
    assert set(DRAFTERS) == {"none", *SEQUENTIAL_HEADS}
    assert __version__ in versions, "write this version's: python -m tests.regression.drafters FOLDER"


@pytest.mark.parametrize("folder", FOLDERS, ids=name)
def test_it_loads_and_drafts_as_it_did(folder: Path) -> None:
    drafter = DSparkDrafter.from_pretrained(folder).eval()
    found, expected = tensors(drafted(drafter)), load_file(folder / EXPECTED)
    assert found.keys() == expected.keys()
    assert torch.equal(found["token_ids"], expected["token_ids"])
    for part, value in expected.items():
        torch.testing.assert_close(found[part], value, msg=lambda text, part=part: f"{part}: {text}")


@pytest.mark.parametrize("folder", FOLDERS, ids=name)
def test_it_is_saved_as_it_was_loaded(folder: Path, tmp_path: Path) -> None:
    drafter = DSparkDrafter.from_pretrained(folder)
    drafter.save_pretrained(tmp_path)
    before, after = (load_file(place / "model.safetensors") for place in (folder, tmp_path))
    assert before.keys() == after.keys()
    for part, tensor in before.items():
        assert torch.equal(tensor, after[part])
    assert (
        DSparkDrafter.from_pretrained(tmp_path).config.to_diff_dict().items()
        >= {
            key: value for key, value in drafter.config.to_diff_dict().items() if key != "transformers_version"
        }.items()
    )


@pytest.mark.parametrize("head", DRAFTERS)
def test_the_expectations_can_fail(head: str) -> None:
    """A drafter with one number changed drafts other logits: what is compared is sensitive to the files."""
    drafter = build(head)
    before = tensors(drafted(drafter))["logits"].clone()
    drafter.fc.weight.data[0, 0] += 1
    assert not torch.allclose(tensors(drafted(drafter))["logits"], before)
