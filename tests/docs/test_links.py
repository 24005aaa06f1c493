"""Relative links of all pages point at files that are there, and at headings that are in them."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.docs.snippets import ROOT

PAGES = sorted(
    path
    for path in [*ROOT.glob("*.md"), *ROOT.glob("*/**/*.md")]
    if not any(part.startswith(".") or part in ("fixtures", "build") for part in path.relative_to(ROOT).parts)
    and path.name != "template.md"
)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def links(page: Path) -> list[str]:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return [link for link in _LINK.findall(text) if not re.match(r"[a-z]+:", link)]


def anchors(page: Path) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    found: dict[str, int] = {}
    names = set()
    for heading in re.findall(r"^#+ +(.+?)#*$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        anchor = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        names.add(anchor if anchor not in found else f"{anchor}-{found[anchor]}")
        found[anchor] = found.get(anchor, 0) + 1
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page) -> None:
    for link in links(page):
        path, _, anchor = unquote(link).partition("#")
        place = (page.parent / path).resolve() if path else page
        assert place.exists(), f"{link}: there is no {path}"
        assert place.is_relative_to(ROOT), link
        if anchor:
            assert anchor in anchors(place), f"{link}: {place.name} has no such heading"


def test_every_page_of_the_docs_is_reached_from_the_index() -> None:
    linked = {link.partition("#")[0] for link in links(ROOT / "docs" / "index.md")}
    assert {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"} <= linked


def test_links_are_found() -> None:
    assert {"../CONTRIBUTING.md", "exactness.md"} <= set(links(ROOT / "docs" / "index.md"))
    assert "the-tests-map" in anchors(ROOT / "CONTRIBUTING.md")
