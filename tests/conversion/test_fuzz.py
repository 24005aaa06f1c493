"""Damaged checkpoints of every format: each loads or is refused in words, and nothing is written beside the result.

Catches: any other exception, a file outside the destination, a result that is left half written.
"""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from dspark.conversion import WRITERS, convert

from tests.conversion import peers, toys

ODD = (None, True, -1, 0, 3, 2**70, 1.5, float("nan"), "", "7", "vanilla", [], [1, "2"], {}, {"a": 1}, [None], [[0]])
FORMATS = [name for name in WRITERS if not WRITERS[name].suffix]
KINDS = ("rnn", "reduced", "dflash", "windows per slot, dflash", "vanilla, silent anchor")


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Places of all keys and items below a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, inner in items for place in [(*path, key), *_paths(inner, (*path, key))]]


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def _config(folder: Path, rng: random.Random, change: Callable[[Any, Any, random.Random], None]) -> None:
    file = folder / "config.json"
    raw = json.loads(file.read_text())
    for _ in range(rng.choice((1, 1, 2, 5))):
        path = rng.choice(_paths(raw))
        change(_at(raw, path[:-1]), path[-1], rng)
        if not _paths(raw):
            break
    file.write_text(json.dumps(raw))


def remove(holder: Any, key: Any, rng: random.Random) -> None:
    del holder[key]


def rename(holder: Any, key: Any, rng: random.Random) -> None:
    if isinstance(holder, dict):
        holder[rng.choice((f"{key}_", str(key)[:-1], str(key).upper(), "x"))] = holder.pop(key)


def retype(holder: Any, key: Any, rng: random.Random) -> None:
    holder[key] = copy.deepcopy(rng.choice(ODD))


def nudge(holder: Any, key: Any, rng: random.Random) -> None:
    if isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
        holder[key] += rng.choice((-1, 1, -2, 7, 1000))
    else:
        retype(holder, key, rng)


def _weights(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[0]


def flip(folder: Path, rng: random.Random) -> None:
    """Change bytes of the header, which is short, or anywhere."""
    data = bytearray(_weights(folder).read_bytes())
    for _ in range(rng.choice((1, 2, 20))):
        data[rng.randrange(rng.choice((8, min(2000, len(data)), len(data))))] = rng.randrange(256)
    _weights(folder).write_bytes(bytes(data))


def truncate(folder: Path, rng: random.Random) -> None:
    file = rng.choice([_weights(folder), folder / "config.json"])
    file.write_bytes(file.read_bytes()[: rng.randrange(file.stat().st_size)])


def edit_header(folder: Path, rng: random.Random) -> None:
    """A header that is JSON and says something else."""
    data = _weights(folder).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    path = rng.choice(_paths(header))
    rng.choice((remove, rename, retype, nudge))(_at(header, path[:-1]), path[-1], rng)
    text = json.dumps(header).encode()
    _weights(folder).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def index(folder: Path, rng: random.Random) -> None:
    """An index that names files elsewhere, or is none."""
    names = [f"t{i}" for i in range(3)]
    place = rng.choice(("../outside.safetensors", "/etc/passwd", "a/b.safetensors", "model.safetensors", "", "..", 3))
    text = rng.choice(
        ("{", "[]", json.dumps({"weight_map": dict.fromkeys(names, place)}), json.dumps({"weight_map": 1}))
    )
    (folder / "model.safetensors.index.json").write_text(text)
    _weights(folder).rename(folder / "model-00001-of-00001.safetensors")


MUTATIONS: tuple[Callable[[Path, random.Random], None], ...] = (
    *(
        lambda folder, rng, change=change: _config(folder, rng, change)
        for change in (remove, rename, retype, retype, nudge)
    ),
    flip, truncate, edit_header, index,
)  # fmt: skip


@pytest.fixture(scope="module")
def seeds(tmp_path_factory) -> list[Path]:
    """Sound folders of every format that is written, and what others wrote."""
    root = tmp_path_factory.mktemp("seeds")
    target = toys.saved_target(root / "target")
    found = [peers.folder(name) for name in peers.WITH_NUMBERS[:8] if (peers.folder(name) / "config.json").is_file()]
    for kind in KINDS:
        source = toys.saved(kind, root / kind)
        for to in FORMATS:
            try:
                convert(source, root / "of" / to / kind, to=to, target=target)
            except ValueError:
                continue
            found.append(root / "of" / to / kind)
    return found


def snapshot(root: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()}


def run(seeds: list[Path], root: Path, seed: int) -> str:
    """One mutated folder; what became of it."""
    rng = random.Random(seed)
    folder = root / "work" / "source"
    shutil.rmtree(root / "work", ignore_errors=True)
    shutil.copytree(rng.choice(seeds), folder, copy_function=shutil.copyfile)
    folder.chmod(0o755)
    for _ in range(rng.choice((1, 1, 1, 2))):
        if (folder / "config.json").is_file() and list(folder.glob("*.safetensors")):
            # An earlier mutation may have left nothing to change there.
            with suppress(KeyError, IndexError, TypeError, ValueError):
                rng.choice(MUTATIONS)(folder, rng)
    before = snapshot(root)
    to = rng.choice(("dspark", rng.choice(FORMATS)))  # which refuses nothing that is whole
    words = None
    try:
        convert(folder, root / "work" / "out", to=to)
    except (ValueError, OSError) as error:
        words = str(error)
    if words is not None:
        assert len(words) > 20, f"seed {seed}: {words}"
        assert snapshot(root) == before, f"seed {seed}"
        assert sorted(os.listdir(root / "work")) == ["source"]
        return "refused"
    written = {path for path in snapshot(root) if path not in before}
    assert all(path.startswith(f"{root}/work/out/") for path in written), f"seed {seed}"
    assert {path: when for path, when in snapshot(root).items() if path in before} == before
    return "written"


def _fuzz(seeds: list[Path], root: Path, numbers: range) -> None:
    (root / "outside.safetensors").write_bytes(b"bait")
    found = {}
    for seed in numbers:
        try:
            found[seed] = run(seeds, root, seed)
        except Exception as error:
            raise AssertionError(f"seed {seed} ended in {error!r}") from error
    assert set(found.values()) == {"refused", "written"}


def test_a_hundred_damaged_folders(seeds, tmp_path) -> None:
    _fuzz(seeds, tmp_path, range(100))


@pytest.mark.slow
def test_two_thousand_damaged_folders(seeds, tmp_path) -> None:
    _fuzz(seeds, tmp_path, range(100, 2100))
