"""What must not be pushed: a folder that does not load or has no card, texts with local paths, names or secrets."""

from __future__ import annotations

import getpass
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from huggingface_hub import ModelCard
from yaml import YAMLError

from dspark.conversion import check_finite, check_tensors

from ..hub import read_record

if TYPE_CHECKING:
    from .contents import RepositoryFile

# An absolute path of two parts or more, on any system; not the path of an URL, nor a slash between words.
_LOCAL_PATH = re.compile(
    r"(?<![\w.:/~<>)\]-])/[\w.@+-]+/[\w./@+-]*[\w@+-]|\bfile://[^\s\"')]+|\b[A-Za-z]:\\{1,2}[\w.-]+(?:\\{1,2}[\w.-]+)*"
    r"|(?<![\w/.])~/[\w./-]+"
)
_SECRETS = {
    "a Hugging Face token": re.compile(r"\bhf_[A-Za-z0-9]{20,}\b"),
    "a GitHub token": re.compile(r"\b(?:gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{30,})\b"),
    "an AWS key": re.compile(r"\bAKIA[0-9A-Z]{16}\b"),
    "an API key": re.compile(r"\bsk-[A-Za-z0-9_-]{20,}\b"),
    "a private key": re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----"),
}
_TEXTS = (".json", ".md", ".txt", ".py", ".svg")
# Names of accounts that tell nothing about anyone.
_ANYONE = {"root", "user", "users", "home", "admin", "ubuntu", "debian", "runner", "jovyan", "nobody", "guest", "test"}


class Found(NamedTuple):
    """Something in a text: 1-based line, what it is, and the text itself."""

    line: int
    what: str
    text: str


def findings(folder: Path, files: Sequence[RepositoryFile], repo_id: str | None) -> Iterator[str]:
    """Why these files must not be pushed, one sentence each.

    Args:
        folder: The drafter's.
        files: What would be sent.
        repo_id: Where to; a user name in it is public.
    """
    paths = {file.path for file in files}
    yield from _unloadable(folder)
    if "README.md" not in paths:
        yield f"{folder.name} has no card (README.md). Write one: `dspark card {folder.name} --report report.json`."
    for file in files:
        if file.path.endswith(".json"):
            yield from _broken(file)
        if file.path == "README.md":
            yield from _bad_card(file)
        if file.path.endswith(_TEXTS):
            text = file.read().decode("utf-8", errors="replace")
            for found in private_parts(text, _names(repo_id)):
                yield f"{file.path}, line {found.line} holds {found.what}: {found.text}. Take it out and push again."


def private_parts(text: str, names: Sequence[str] = ()) -> Iterator[Found]:
    """Local paths, user names and secrets in a text, line by line; secrets are shown by their first letters only.

    Args:
        text: Of a card, a JSON file, ...
        names: User names to look for.
    """
    for number, line in enumerate(text.splitlines(), start=1):
        for found in _LOCAL_PATH.finditer(line):
            yield Found(number, "a local path", found[0])
        for what, pattern in _SECRETS.items():
            for found in pattern.finditer(line):
                yield Found(number, what, f"{found[0][:6]}...")
        for name in names:
            if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", line):
                yield Found(number, "a user name", name)


def shortened_paths(content: bytes) -> bytes | None:
    """A JSON text with every local path cut to its last part; None: it holds none.

    `training.json` keeps the command a drafter was trained by, whose folders mean nothing elsewhere.
    """
    text = content.decode("utf-8", errors="replace")
    changed = _LOCAL_PATH.sub(lambda found: re.split(r"[/\\]+", found[0])[-1], text)
    return None if changed == text else changed.encode()


def _names(repo_id: str | None) -> list[str]:
    try:
        names = {getpass.getuser(), Path.home().name}
    except (OSError, KeyError, RuntimeError):  # an account without a name
        return []
    return sorted(n for n in names if len(n) > 3 and n.lower() not in _ANYONE and n not in (repo_id or "").split("/"))


def _unloadable(folder: Path) -> Iterator[str]:
    """Whether what a user would load can be loaded; tensors are checked by their headers and for finite numbers."""
    if (folder / "adapter_config.json").is_file():
        yield (
            f"{folder.name} is a PEFT adapter, not a drafter. Merge it first (`DSparkDrafter.from_pretrained(folder)"
            ".merge_and_unload().save_pretrained(...)`), or push the adapter itself with PEFT."
        )
        return
    try:
        record = read_record(folder)
        check_tensors(record, record.to_config())
        for tensor in (record.tensors or {}).values():
            tensor[...]
        check_finite(record)
    except (ValueError, OSError) as error:
        yield f"{folder.name} does not load as a drafter: {error}"


def _broken(file: RepositoryFile) -> Iterator[str]:
    try:
        json.loads(file.read())
    except ValueError as error:
        yield f"{file.path} is not JSON ({error}). Write it again."


def _bad_card(file: RepositoryFile) -> Iterator[str]:
    try:
        data = ModelCard(file.read().decode("utf-8")).data
    except (YAMLError, ValueError, TypeError) as error:
        yield f"The head of README.md is not YAML ({' '.join(str(error).split())}). `dspark card` writes one."
        return
    lacking = [name for name in ("base_model", "license") if not getattr(data, name, None)]
    if lacking:
        yield (
            f"The card names no {' and no '.join(lacking)}, which its readers need. `dspark card` takes --base-model "
            "and --license."
        )


__all__ = ["Found", "findings", "private_parts", "shortened_paths"]
