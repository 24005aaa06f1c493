"""Every snippet of the pages runs, and every command in them has the options it is given.

Catches: a snippet that was right once, an option that was renamed, a page that shows what nobody has run.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.docs.snippets import ROOT, Snippet, build_world, parse_dspark, run_bash, run_page, run_real, snippets

PAGES = [
    ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "conversion" / "README.md", *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("model_cards/*/README.md")), *sorted(ROOT.glob("examples/**/README.md")),
]  # fmt: skip
REAL = [one for page in PAGES for one in snippets(page) if one.needs == "real"]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    return build_world(tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize("page", [page for page in PAGES if snippets(page)], ids=lambda page: page.name)
def test_snippets_run(page, world, tmp_path) -> None:
    folder = tmp_path / "world"
    shutil.copytree(world, folder, symlinks=True)
    run_page(page, folder)


@pytest.mark.real
@pytest.mark.parametrize("snippet", REAL, ids=lambda snippet: f"{snippet.page}:{snippet.line}")
def test_snippets_that_need_the_real_pair_run_on_it(snippet) -> None:
    run_real(snippet)


def test_comments_are_known_ones() -> None:
    for page in PAGES:
        assert {one.needs for one in snippets(page)} <= {"", "real", "parsed"}
        written = re.findall(r"(?m)^<!-- snippet: .*-->$", page.read_text())
        assert len(written) == sum(1 for one in snippets(page) if one.needs), page


def test_the_harness_fails_on_what_is_wrong(world, tmp_path) -> None:
    for text in ("dspark train --no-such-option\n", "dspark nothing\n", "make nothing\n", "python examples/no.py\n",
                 "pip install -e '.[none]'\n", "rm -rf x\n"):  # fmt: skip
        with pytest.raises((AssertionError, Exception)):
            run_bash(Snippet("a page", 1, "bash", "parsed", text))
    parse_dspark(["train", "--target", "x", "--out", "y"])
    page = ROOT / "README.md"
    assert len(snippets(page)) > 5
    assert {one.language for one in snippets(page)} == {"python", "bash"}
