"""Write `docs/api.md` from the docstrings of the public names.

    python docs/make_api.py            # writes it; a test holds the page up to date

Only what stands in this package's own source goes in, so that the page does not depend on versions of anything else.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("api.md")
MODULES = (
    "dspark", "dspark.scheduling", "dspark.calibration", "dspark.training", "dspark.evaluation", "dspark.simulation",
    "dspark.trace", "dspark.cards", "dspark.publishing", "dspark.conversion", "dspark.decoding.rejection",
    "dspark.ops.markov_step", "dspark.ops.rejection", "dspark.ops.confidence", "dspark.ops.training_loss",
)  # fmt: skip
_HEAD = """# API

Every public name with its docstring. Written by `docs/make_api.py`: change the docstrings, not this page.
"""


def page() -> str:
    """The whole page."""
    modules = [importlib.import_module(name) for name in MODULES]
    contents = "\n".join(f"- [`{module.__name__}`](#{module.__name__.replace('.', '')})" for module in modules)
    return "\n".join([_HEAD, contents, "", *(line for module in modules for line in _module(module))]).rstrip() + "\n"


def _module(module: Any) -> Iterator[str]:
    yield from (f"## {module.__name__}", "", _text(inspect.getdoc(module)), "")
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isclass(value):
            yield from _class(name, value)
        elif callable(value):
            yield from (f"### {name}", "", _code(f"{name}{_signature(value)}"), "", _text(inspect.getdoc(value)), "")
        elif not name.startswith("__"):
            yield from (f"### {name}", "", f"A {type(value).__name__}.", "")


def _class(name: str, value: type) -> Iterator[str]:
    """A class with the public methods and properties its own source has."""
    own = vars(value)
    has_signature = "__init__" in own and "__dataclass_fields__" not in own
    shown = f"{name}{_signature(own['__init__'], skip=1)}" if has_signature else f"class {name}"
    yield from (f"### {name}", "", _code(shown), "", _text(value.__doc__ and inspect.cleandoc(value.__doc__)), "")
    for base in value.__mro__:
        if base is not value and not base.__module__.startswith("dspark"):
            continue
        for method, attribute in vars(base).items():
            function = getattr(attribute, "__func__", attribute)
            if method.startswith("_") or (base is not value and method not in _INHERITED.get(name, ())):
                continue
            if isinstance(attribute, property) and attribute.__doc__:
                yield from (f"#### {name}.{method}", "", _text(inspect.getdoc(attribute)), "")
            elif inspect.isfunction(function) and function.__doc__:
                code = _code(f"{method}{_signature(function, skip=0 if isinstance(attribute, staticmethod) else 1)}")
                yield from (f"#### {name}.{method}", "", code, "", _text(inspect.getdoc(function)), "")


# Methods of mixins of ours that belong to the page of a class.
_INHERITED = {"DSparkDrafter": ("from_pretrained", "save_pretrained", "push_to_hub", "load_adapter", "set_adapter",
                                "merge_and_unload")}  # fmt: skip


def _signature(function: Any, skip: int = 0) -> str:
    """As it is written: annotations are texts, defaults that are objects are shown by their name."""
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())[skip:]
    parts, is_keyword = [], False
    for one in parameters:
        if one.kind is one.KEYWORD_ONLY and not is_keyword:
            parts.append("*")
        is_keyword |= one.kind in (one.KEYWORD_ONLY, one.VAR_POSITIONAL)
        text = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "") + one.name
        parts.append(text + ("" if one.default is one.empty else f"={_default(one.default)}"))
    return f"({', '.join(parts)})"


def _default(value: Any) -> str:
    plain = value is None or isinstance(value, bool | int | float | str | tuple | list | dict)
    return repr(value) if plain else getattr(value, "__name__", type(value).__name__)


def _code(text: str) -> str:
    return f"```text\n{text}\n```"


def _text(text: str | None) -> str:
    """A docstring as Markdown: sections as lists, examples as code, references to names as code."""
    lines, out, section, in_code = (text or "").splitlines(), [], False, False
    for line in lines:
        stripped = line.strip()
        if stripped.startswith("```"):
            # A docstring's example is a part of a program: names in it are explained around it.
            out += ["<!-- snippet: parsed -->"] if stripped == "```python" else []
            in_code = not in_code
            out.append(line)
        elif in_code or stripped.startswith("|"):
            out.append(line)
        elif stripped in ("Args:", "Attributes:", "Returns:", "Raises:", "Yields:"):
            out += [f"**{stripped[:-1]}**", ""]
            section = True
        elif section and re.match(r"    \S", line) and re.match(r"[\w*, `()|.\[\]]+: ", stripped):
            name, _, rest = stripped.partition(": ")
            out.append(f"- `{name.strip('`')}`: {rest}")
        elif section and line.startswith("    "):
            out.append(f"  {stripped}")
        else:
            section = section and not stripped
            out.append(line)
    joined = "\n".join(out).strip()
    return re.sub(r"\[`?([\w.]+)`?\](?!\()", r"`\1`", joined)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"{PAGE}: {len(page().splitlines())} lines\n")
