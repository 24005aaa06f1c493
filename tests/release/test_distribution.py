"""What is built holds what the code needs, works where nothing else of the checkout is, and says one version.

Catches: a package or data file missing from the lists in pyproject.toml, an import that works in a checkout only, a
file that was never added to git, leftovers of another build, versions that differ, a card whose door does not open.
"""

from __future__ import annotations

import json
import os
import re
import site
import subprocess
import tarfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest

import dspark
from dspark.cards import write_card
from dspark.evaluation.prompt_sets import SETS
from dspark.publishing import code_files, write_code
from tests.cards import reports
from tests.publishing.test_push import LOCAL, WITHOUT_PACKAGE, assert_all_open
from tests.release import distribution
from tests.release.distribution import ROOT, released, tracked

PLACES = {"src/dspark/": "dspark/", "conversion/": "dspark/conversion/"}  # in the checkout, in the wheel
SAMPLES = "dspark/evaluation/prompts/README.md"  # says where they are from, so it goes along


def in_wheel(name: str) -> str | None:
    """Where a tracked file lies in the wheel; None: it is no part of it. Pages for readers of the source are none."""
    for place, to in PLACES.items():
        if name.startswith(place):
            name = to + name.removeprefix(place)
            return None if name.endswith("README.md") and name != SAMPLES else name
    return None


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    given = os.environ.get("DSPARK_DIST")
    return distribution.files(Path(given)) if given else distribution.build(tmp_path_factory.mktemp("dist") / "out")


@pytest.fixture(scope="module")
def requirements(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of links to all that is installed here, but for this package: what its requirements bring along."""
    folder = tmp_path_factory.mktemp("requirements")
    for entry in (entry for place in site.getsitepackages() for entry in Path(place).iterdir()):
        if "dspark" not in entry.name and entry.suffix != ".pth" and not (folder / entry.name).exists():
            (folder / entry.name).symlink_to(entry)
    return folder


@pytest.fixture(scope="module")
def bare(requirements: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment that has the requirements only."""
    return environment(tmp_path_factory.mktemp("bare"), requirements)


@pytest.fixture(scope="module")
def python(built: tuple[Path, Path], requirements: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment with the wheel, inside a project of someone's own."""
    project = tmp_path_factory.mktemp("project")
    for words in (("init",), ("-c", "user.name=a", "-c", "user.email=a", "commit", "--allow-empty", "-m", "a")):
        subprocess.run(["git", *words], cwd=project, check=True, capture_output=True)
    made = environment(project / "wheel", requirements)
    distribution.install(made, built[0])
    return made


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    target, drafter = reports.pair(tmp_path_factory.mktemp("pair"))
    write_code(drafter)
    write_card(drafter, drafter / "README.md", license="mit")
    return target, drafter


def environment(folder: Path, requirements: Path) -> Path:
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "requirements.pth").write_text(f"{requirements}\n")
    return folder / "bin" / "python"


def run(python: Path, *words: Any, code: int = 0) -> str:
    """What it says, run where nothing of the checkout is."""
    kept = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HOME": str(python.parent)}
    done = subprocess.run(
        [str(word) for word in (python, *words)],
        cwd=python.parent, env=kept, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr[-3000:]
    return done.stdout


def test_the_wheel_holds_every_file_of_the_package_and_no_other(built: tuple[Path, Path]) -> None:
    wheel = zipfile.ZipFile(built[0])
    about = f"dspark-{dspark.__version__}.dist-info/"
    expected = {place: name for name in tracked() if (place := in_wheel(name))}
    assert {name for name in wheel.namelist() if not name.startswith(about)} == expected.keys()
    for place, name in expected.items():
        assert wheel.read(place) == (ROOT / name).read_bytes(), name
    assert wheel.read(f"{about}licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()


def test_one_version(built: tuple[Path, Path]) -> None:
    version = dspark.__version__
    about = Parser().parsestr(zipfile.ZipFile(built[0]).read(f"dspark-{version}.dist-info/METADATA").decode())
    assert about["Version"] == version
    assert released()[:1] in ([], [version]), "the changelog's newest section is of another version"
    least = re.fullmatch(r"dspark>=([\d.]+)\n", code_files()["custom_generate/requirements.txt"].decode())
    assert least is not None
    assert [int(part) for part in least[1].split(".")] <= [int(part) for part in version.split(".")[:3]]


def test_the_sdist_installs_the_same_files(built: tuple[Path, Path], requirements: Path, tmp_path: Path) -> None:
    with tarfile.open(built[1]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml"} < names
    assert not any(name.startswith("tests") for name in names), "some tests without what they import"
    made = environment(tmp_path / "sdist", requirements)
    distribution.install(made, built[1])
    (packages,) = (tmp_path / "sdist").glob("lib/python*/site-packages")
    wheel = zipfile.ZipFile(built[0])
    files = {path.relative_to(packages).as_posix(): path for path in (packages / "dspark").rglob("*")}
    found = {name: path for name, path in files.items() if path.is_file() and path.suffix != ".pyc"}
    assert found.keys() == {name for name in wheel.namelist() if name.startswith("dspark/")}
    for name, path in found.items():
        assert path.read_bytes() == wheel.read(name), name


def test_everything_imports_and_every_data_file_is_read(python: Path, pair: tuple[Path, Path], tmp_path: Path) -> None:
    program = tmp_path / "installed.py"
    program.write_text((ROOT / "tests/release/installed.py").read_text())
    found = json.loads(run(python, "-I", program, *pair, tmp_path).splitlines()[-1])
    assert found["versions"] == [dspark.__version__] * 2
    inside = str(python.parents[1])
    assert found["file"].startswith(inside)
    assert found["conversion"].startswith(inside)
    assert not [place for place in found["path"] if Path(place).is_relative_to(ROOT / "src")]
    modules = {
        re.sub(r"(/__init__)?\.py$", "", place).replace("/", ".")
        for name in tracked()
        if (place := in_wheel(name)) and place.endswith(".py") and "custom_generate" not in place
    }
    assert set(found["modules"]) == {name for name in modules - {"dspark"} if not name.endswith("__main__")}
    assert found["commit"] is None, "that of the project around it"
    data = found["data"]
    assert data["is_exact"]
    assert data["rounds"] > 0
    assert data["prompts"].keys() == set(SETS)
    assert min(data["prompts"].values()) > 0
    assert data["curve"] > 0
    assert "name one with --drafter" in data["demo"]  # the shipped drafter is no part of the package
    assert "license: mit" in data["card"]
    assert data["page"] > 10_000
    assert set(data["code"]) < set(data["planned"])


def test_the_command_is_installed(python: Path) -> None:
    told = run(python.parent / "dspark", "--help")
    for command in ("convert", "demo", "generate", "push", "trace", "train"):
        assert command in told


def test_every_door_to_a_folder_opens_with_what_its_card_says(python: Path, pair: tuple[Path, Path]) -> None:
    assert "pip install dspark" in (pair[1] / "README.md").read_text()
    assert_all_open(json.loads(run(python, "-c", LOCAL, *pair).splitlines()[-1]))


def test_without_the_package_the_folder_names_it(bare: Path, pair: tuple[Path, Path]) -> None:
    assert "dspark>=" in run(bare, "-c", WITHOUT_PACKAGE, *pair)


def test_a_build_looks_at_tracked_files_only_and_names_what_is_missing(tmp_path: Path) -> None:
    assert {"pyproject.toml", "MANIFEST.in", "src/dspark/py.typed"} < set(tracked())
    (tmp_path / "dspark-0.0.0.tar.gz").touch()
    with pytest.raises(ValueError, match=r"must hold dspark-.*\.whl and .*, has dspark-0\.0\.0\.tar\.gz\."):
        distribution.files(tmp_path)
