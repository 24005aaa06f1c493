"""Wheel and sdist, built in a copy of what git tracks: no leftover of an earlier build gets in, no file is missed.

`python -m tests.release.distribution FOLDER` (`make dist`) builds those of a commit; with `DSPARK_DIST=FOLDER` the
tests beside this file look at them instead of building their own.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from dspark import __version__

ROOT = Path(__file__).parents[2]
_BUILD = "import sys; from setuptools import build_meta as build; build.build_sdist(sys.argv[1])"
_NO_NETWORK = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check")


def tracked() -> list[str]:
    """Files of the checkout; of a tree without git, all that a fresh clone would have."""
    if not (ROOT / ".git").exists():
        found = (path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file())
        made = re.compile(r"\.venv|build|dist|__pycache__|.*\.egg-info|\..*_cache")
        return [path.as_posix() for path in found if not any(map(made.fullmatch, path.parts))]
    listed = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def build(out: Path) -> tuple[Path, Path]:
    """Wheel and sdist in `out`, which holds nothing else afterwards."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    with TemporaryDirectory() as copy:
        for name in tracked():
            (Path(copy) / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, Path(copy) / name)
        _quietly([sys.executable, "-c", _BUILD, out.resolve()], copy)
        _quietly([sys.executable, "-m", "pip", "wheel", *_NO_NETWORK, "--wheel-dir", out.resolve(), copy], copy)
    return files(out)


def files(out: Path) -> tuple[Path, Path]:
    """The wheel and the sdist of this version in a folder.

    Raises:
        ValueError: One is not there, or something else is.
    """
    found = sorted(path.name for path in out.iterdir())
    expected = [f"dspark-{__version__}-py3-none-any.whl", f"dspark-{__version__}.tar.gz"]
    if found != expected:
        raise ValueError(f"{out} must hold {' and '.join(expected)}, has {', '.join(found) or 'nothing'}.")
    return out / expected[0], out / expected[1]


def install(python: Path, source: Path) -> None:
    """Install a wheel or an sdist beside `python`, whose environment has its requirements already."""
    pip = [sys.executable, "-m", "pip", "--python", python]
    _quietly([*pip, "install", "--ignore-installed", *_NO_NETWORK, source], source.parent)


def released() -> list[str]:
    """Versions with a section of their own in the changelog, newest first."""
    return re.findall(r"^## \[(\d[^]]*)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)


def _quietly(command: list[object], folder: object) -> None:
    done = subprocess.run(
        [str(word) for word in command], cwd=str(folder), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}")


def main(out: Path) -> int:
    """Build what is committed."""
    changes = subprocess.run(["git", "-C", ROOT, "status", "--porcelain"], capture_output=True, text=True, check=True)
    if changes.stdout:
        print(f"Commit or remove these first, so that a tag says what is in the files:\n{changes.stdout}", end="")
        return 2
    for path in build(out):
        print(f"{path}: {path.stat().st_size:,} bytes")
    if __version__ not in released():
        print(f"No release yet: CHANGELOG.md has no section [{__version__}].")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
