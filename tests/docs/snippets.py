"""Code blocks of Markdown pages, and running them where tiny models lie under the names the pages use.

A comment before a block says more. `<!-- snippet: real -->`: the real pair. `<!-- snippet: parsed -->`: is not run;
Python is compiled, commands are held against their options. All others run, in the order of the page, in one folder.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import typer
from typer.testing import CliRunner

from dspark.cli import app
from dspark.publishing import write_code
from dspark.scheduling import ThroughputCurve
from tests.cards import reports
from tests.cli import words
from tests.training import tiny

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"(?:^<!-- snippet: (\w+) -->\n)?^```(python|bash)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TARGETS = ("path/or/id", "Qwen/Qwen3-4B", "HuggingFaceTB/SmolLM2-135M-Instruct", "owner/target")
DRAFTERS = (
    "deepseek-ai/dspark_qwen3_4b_block7", "published-drafter", "model_cards/smollm2-135m-instruct-dspark",
)  # fmt: skip
_CPU = ("--device", "cpu")
# What makes a command small; options of the page win only where they are not repeated here.
SMALL = {
    "data": ("--max-new-tokens", "8", *_CPU), "train": ("--steps", "2", "--anchors", "4", "--save-every", "0", *_CPU),
    "calibrate": ("--set", "gsm8k", "--max-new-tokens", "64", "--threads", "1", *_CPU),
    "generate": ("--max-new-tokens", "6"), "eval": (*reports.SETTINGS, "--temperature", "0", *_CPU),
    "doctor": ("--limit", "2", "--max-new-tokens", "8", *_CPU), "trace": ("--max-new-tokens", "8", *_CPU),
    "profile": ("--slots", "0", "--slots", "1", "--contexts", "8", "--repeats", "1", "--threads", "1"),
}  # fmt: skip
_NEW = ("--layers", "1", "--block-size", "4", "--rank", "4")  # of a drafter that is not one to go on from
FINDS_SOMETHING = {"doctor"}  # exit code 1 is an answer


class Snippet(NamedTuple):
    """A block: where, in which language, what it needs ("" if nothing), and its text."""

    page: str
    line: int
    language: str
    needs: str
    text: str


def snippets(page: Path) -> list[Snippet]:
    text = page.read_text(encoding="utf-8")
    name = page.relative_to(ROOT).as_posix()
    return [
        Snippet(name, text.count("\n", 0, found.start(3)) + 1, found[2], found[1] or "", found[3])
        for found in _BLOCK.finditer(text)
    ]


def build_world(folder: Path) -> Path:
    """A folder with a target, drafters, prompts and answers under the names the pages use."""
    target, drafter = reports.pair(folder, tiny.qwen3)
    write_code(drafter)
    for name, place in (*((name, target) for name in TARGETS), *((name, drafter) for name in DRAFTERS)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(place)
    words.prompt_file(folder, "prompts", 4)
    words.prompt_file(folder, "more", 4, offset=20)
    tiny.write_answers(folder / "mine.jsonl", 8)
    curve = ThroughputCurve()
    for tokens in (1, 2, 4):
        curve.learn(tokens, 0.01)
    curve.save(folder / "curve.json")
    return folder


def run_page(page: Path, folder: Path) -> int:
    """Run all snippets of a page that need nothing, and hold the others against what they name; gives how many ran."""
    namespace: dict[str, Any] = {"__name__": page.stem}
    ran = 0
    with contextlib.chdir(folder):
        for snippet in snippets(page):
            run_python = snippet.language == "python" and not snippet.needs
            if snippet.language == "bash":
                run_bash(snippet)
            code = compile(snippet.text, f"{snippet.page}, line {snippet.line}", "exec") if run_python else None
            if code is not None:
                exec(code, namespace)
            elif snippet.language == "python":
                compile(snippet.text, snippet.page, "exec")
            ran += not snippet.needs
    return ran


def run_bash(snippet: Snippet) -> None:
    for line in snippet.text.replace("\\\n", " ").splitlines():
        command = shlex.split(line, comments=True)
        if command:
            known = {"dspark": run_dspark, "make": check_make, "python": check_python, "pip": check_pip}
            assert command[0] in known, f"{snippet.page}, line {snippet.line}: nobody knows how to check {line!r}"
            known[command[0]](command[1:], snippet)


def run_dspark(given: list[str], snippet: Snippet) -> None:
    parse_dspark(given)
    if snippet.needs:
        return
    name = given[0]
    more = [*SMALL.get(name, ()), *(_NEW if name == "train" and "--init" not in given else ())]
    if name in ("train", "convert") and "--out" in given:
        shutil.rmtree(given[given.index("--out") + 1], ignore_errors=True)
    result = CliRunner().invoke(app, [*given, *more])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    allowed = {0, 1} if name in FINDS_SOMETHING else {0}
    assert result.exit_code in allowed, f"{snippet.page}: dspark {shlex.join(given)}\n{result.output}"


def parse_dspark(given: list[str]) -> None:
    """Have the command line read the words, without running anything."""
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands"):
        name, *given = given
        assert name in command.commands, f"there is no command {name}"
        command = command.commands[name]
    command.make_context(command.name, list(given))


def check_make(given: list[str], _snippet: Snippet) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in (word for word in given if "=" not in word):
        assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE), f"the Makefile has no {target}"


def check_python(given: list[str], _snippet: Snippet) -> None:
    script = ROOT / given[0]
    assert script.is_file(), f"there is no {given[0]}"
    for option in (word for word in given if word.startswith("--")):
        assert option.lstrip("-") in script.read_text() + (ROOT / "examples/models.py").read_text(), option


def check_pip(given: list[str], _snippet: Snippet) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for names in re.findall(r"\[([\w,]+)\]", " ".join(given)):
        assert set(names.split(",")) <= extras.keys(), names


def run_real(snippet: Snippet) -> None:
    """Run a snippet on the real pair, in the checkout."""
    threads = os.environ.get("OMP_NUM_THREADS")
    with contextlib.chdir(ROOT):
        exec(compile(snippet.text, f"{snippet.page}, line {snippet.line}", "exec"), {"__name__": snippet.page})
    assert os.environ.get("OMP_NUM_THREADS") == threads
