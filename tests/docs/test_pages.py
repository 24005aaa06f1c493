"""Generated parts of the pages are what they are generated from."""

from __future__ import annotations

import importlib.util
import re

import dspark
from tests.docs.snippets import ROOT
from tests.test_layers import MAY_IMPORT


def layers() -> str:
    """The table of import directions."""
    rows = [
        f"| `{name}` | {', '.join(f'`{one}`' for one in sorted(may)) or '–'} |" for name, may in MAY_IMPORT.items()
    ]
    return "\n".join(["| package | may import |", "|---|---|", *rows])


def test_the_table_of_layers_is_the_tests_own() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    found = re.search(r"<!-- layers -->\n(.*?)<!-- end -->", page, re.DOTALL)
    assert found is not None
    assert found[1].strip() == layers(), "print it: python -m tests.docs.test_pages"


def make_api():
    spec = importlib.util.spec_from_file_location("make_api", ROOT / "docs" / "make_api.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_api_page_is_up_to_date() -> None:
    assert (ROOT / "docs" / "api.md").read_text(encoding="utf-8") == make_api().page(), "run: python docs/make_api.py"


def test_every_public_name_is_on_the_api_page() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    for name in set(dspark.__all__) - {"__version__"}:
        assert f"\n### {name}\n" in page, name
    for method in ("draft", "from_pretrained", "push_to_hub", "decode"):
        assert f"#### DSparkDrafter.{method}\n" in page, method


if __name__ == "__main__":
    print(layers())
