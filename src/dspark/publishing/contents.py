"""What of a drafter's folder goes to a repository: folder = repository, with the code for `custom_generate` beside.

Files that are no part of a drafter (checkpoints, logs) stay behind and are named; `findings.py` says what must not go.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

from ..scheduling import ThroughputCurve
from .findings import findings, shortened_paths

CARD, CONFIG, TRAINING, CURVE, CODE = "README.md", "config.json", "training.json", "curve.json", "custom_generate"
WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
_PARTS = re.compile(
    r"[^/]+\.(safetensors|json|md|png|svg|gguf)|LICEN[CS]E[^/]*|NOTICE[^/]*|custom_generate/(generate\.py|requirements\.txt)"
)
_PICKLES = re.compile(r"[^/]+\.(bin|pt|pth|pkl|pickle|ckpt)")


@dataclass(frozen=True)
class RepositoryFile:
    """A file as it will be in the repository.

    Attributes:
        path: In the repository, with `/`.
        content: The file to send, or its bytes where they are not those of a file in the folder.
        note: What was done to it; empty: nothing.
    """

    path: str
    content: Path | bytes
    note: str = ""

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.content) if isinstance(self.content, bytes) else self.content.stat().st_size

    def read(self) -> bytes:
        """Its bytes."""
        return self.content if isinstance(self.content, bytes) else self.content.read_bytes()


@dataclass
class Plan:
    """What a push would send.

    Attributes:
        files: In the order of their paths.
        left_out: Paths in the folder that are no part of a drafter.
        refusals: Why nothing is sent, one sentence each; empty: nothing stands in the way.
    """

    files: list[RepositoryFile]
    left_out: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


def code_files() -> dict[str, bytes]:
    """Files of transformers' custom generation layout, by their path in a repository."""
    folder = resources.files("dspark.publishing") / CODE
    return {f"{CODE}/{name}": (folder / name).read_bytes() for name in ("generate.py", "requirements.txt")}


def write_code(folder: str | Path) -> None:
    """Write `custom_generate/` into a drafter's folder, so that it decodes as the repository will."""
    for path, content in code_files().items():
        (Path(folder) / path).parent.mkdir(parents=True, exist_ok=True)
        (Path(folder) / path).write_bytes(content)


def plan_push(folder: str | Path, repo_id: str | None = None, *, curve: str | Path | None = None) -> Plan:
    """Look through a drafter's folder; nothing is sent or changed.

    Args:
        folder: As `save_pretrained`, `dspark train` and `dspark card` left it.
        repo_id: Where it would go.
        curve: A step curve of `dspark profile`, to go along as `curve.json`.

    Raises:
        ValueError: It is not a folder, or the curve is none.
        OSError: The curve cannot be read.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder. Save the drafter first: `drafter.save_pretrained(folder)`.")
    found = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    shown = [path for path in found if not any(part.startswith(".") for part in path.split("/"))]
    parts = [path for path in shown if _PARTS.fullmatch(path)]
    files = {path: RepositoryFile(path, folder / path) for path in parts}
    for path, content in code_files().items():
        files.setdefault(path, RepositoryFile(path, content, "added"))
    if curve is not None:
        ThroughputCurve.load(curve)  # says what is wrong with a file that is none
        files[CURVE] = RepositoryFile(CURVE, Path(curve), f"from {Path(curve).name}")
    if TRAINING in files and (changed := shortened_paths(files[TRAINING].read())) is not None:
        files[TRAINING] = RepositoryFile(TRAINING, changed, "local paths shortened to their last part")
    plan = Plan([files[path] for path in sorted(files)])
    pickles = [path for path in shown if _PICKLES.fullmatch(path)]
    plan.left_out = [path for path in shown if path not in files and path not in pickles]
    plan.refusals = [*_pickles(pickles), *findings(folder, plan.files, repo_id)]
    return plan


def _pickles(paths: list[str]) -> list[str]:
    return [
        f"{path} is a pickle, which can run code when it is opened. Save the drafter as safetensors "
        "(`save_pretrained` does) and delete it."
        for path in paths
    ]


__all__ = ["CARD", "WEIGHTS", "Plan", "RepositoryFile", "code_files", "plan_push", "write_code"]
