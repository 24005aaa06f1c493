"""What we write, read by the frameworks' own code: the same proposals as ours.

They need packages that contradict ours, so each runs in a process of its own. Install them apart from the project
(`pip install --no-deps --target DIR speculators==0.9.0 mlx-dspark==0.20.3 mlx mlx-cpu specforge==0.2.0 ...`, with what
they ask for but torch and engines), and name that folder in DSPARK_PEERS; without it the tests are skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from dspark.conversion import convert
from safetensors.torch import load_file, save_file

from tests import small
from tests.conversion import toys

pytestmark = pytest.mark.peer
PEERS = os.environ.get("DSPARK_PEERS", "")
TOLERANCE = {"atol": 2e-4, "rtol": 2e-4}
SPECULATORS = ("vanilla", "gated", "rnn", "rank 0, confidence", "dflash", "vanilla, silent anchor",
               "rnn, silent anchor", "gated, silent anchor", "plain confidence", "no confidence", "reduced",
               "reduced rnn", "reduced dflash", "embedding tap", "windows from anchor",
               "windows from anchor, both ways", "bias", "yarn")  # fmt: skip
MLX = ("vanilla", "rank 0", "rank 0, confidence", "dflash", "vanilla, silent anchor", "plain confidence",
       "no confidence", "reduced", "own tables", "bias")  # fmt: skip
MLX_NATIVE = tuple(kind for kind in MLX if not {"dflash", "reduced", "vanilla, silent anchor"} & {kind})
SPECFORGE = ("vanilla", "gated", "rnn", "rank 0", "rank 0, confidence", "dflash", "plain confidence", "no confidence",
             "windows per slot", "windows per slot, dflash", "bias", "yarn", "gelu", "as many key heads")  # fmt: skip


@lru_cache
def missing(module: str) -> str | None:
    """Why a peer cannot run here; None: it can."""
    if not PEERS:
        return "DSPARK_PEERS does not name a folder with the peers' packages"
    done = run(["-c", f"import {module}"])
    return None if done.returncode == 0 else f"{module} cannot be imported: {done.stderr.splitlines()[-1]}"


def run(words: list[Any]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": PEERS, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, *map(str, words)], env=environment, capture_output=True, text=True, check=False
    )


def ask(script: str, module: str, folders: dict[str, Path], root: Path) -> dict[str, dict[str, torch.Tensor]]:
    """What a peer drafts from each folder, in one process; skips where it cannot run."""
    if (reason := missing(module)) is not None:
        pytest.skip(reason)
    words: list[Any] = [Path(__file__).with_name(script)]
    for kind, folder in folders.items():
        given = root / f"{kind} given.safetensors"
        tables = {
            "embedding": small.target().get_input_embeddings().weight.detach().clone(),
            "head": small.target().get_output_embeddings().weight.detach().clone(),
        }
        save_file({"context": context(kind)[0].contiguous(), "anchor": torch.tensor(3), **tables}, given)
        words += [folder, given, root / f"{kind} found.safetensors"]
    done = run(words)
    assert done.returncode == 0, done.stderr[-3000:]
    return {kind: load_file(root / f"{kind} found.safetensors") for kind in folders}


def context(kind: str) -> torch.Tensor:
    return small.states(1, 11, len(toys.drafter(kind).config.target_layer_ids) * small.WIDTH)


def assert_same(kind: str, found: dict[str, torch.Tensor]) -> None:
    ours = toys.drafter(kind).draft(torch.tensor([3]), context(kind), target=small.target())
    assert torch.equal(found["tokens"].long(), ours.token_ids[0])
    torch.testing.assert_close(found["logits"], ours.logits[0], **TOLERANCE)
    assert ("confidence" in found) == (ours.confidence_logits is not None)
    if ours.confidence_logits is not None:
        torch.testing.assert_close(found["confidence"], ours.confidence_logits[0], **TOLERANCE)


def written(to: str, kinds: tuple[str, ...], root: Path) -> dict[str, Path]:
    target = toys.saved_target(root / "target")
    for kind in kinds:
        convert(toys.saved(kind, root / "source" / kind), root / "out" / kind, to=to, target=target)
    return {kind: root / "out" / kind for kind in kinds}


@pytest.fixture(scope="module")
def by_speculators(tmp_path_factory) -> dict[str, dict[str, torch.Tensor]]:
    root = tmp_path_factory.mktemp("speculators")
    folders = written("speculators", SPECULATORS, root)
    return ask("speculators_side.py", "speculators.models.dspark", folders, root)


@pytest.fixture(scope="module", params=["mlx-dspark", "deepspec"])
def by_mlx(request, tmp_path_factory) -> tuple[tuple[str, ...], dict[str, dict[str, torch.Tensor]]]:
    root, kinds = tmp_path_factory.mktemp("mlx"), MLX if request.param == "mlx-dspark" else MLX_NATIVE
    return kinds, ask("mlx_side.py", "mlx_dspark.load", written(request.param, kinds, root), root)


@pytest.fixture(scope="module")
def by_specforge(tmp_path_factory) -> dict[str, dict[str, torch.Tensor]]:
    root = tmp_path_factory.mktemp("specforge")
    folders = written("specforge", SPECFORGE, root)
    return ask("specforge_side.py", "specforge.modeling.draft.dspark", folders, root)


@pytest.mark.parametrize("kind", SPECULATORS)
def test_speculators_drafts_as_we_do(kind: str, by_speculators) -> None:
    assert_same(kind, by_speculators[kind])


@pytest.mark.parametrize("kind", SPECFORGE)
def test_specforge_drafts_as_we_do(kind: str, by_specforge) -> None:
    assert_same(kind, by_specforge[kind])


@pytest.mark.parametrize("kind", MLX)
def test_mlx_dspark_drafts_as_we_do(kind: str, by_mlx) -> None:
    kinds, found = by_mlx
    if kind not in kinds:
        pytest.skip("DeepSpec's layout does not hold it")
    assert_same(kind, found[kind])
