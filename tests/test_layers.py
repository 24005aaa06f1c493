"""Imports point one way, and the names a config allows are the classes that exist.

Catches: a head that knows the loop, a pure scheduler that imports a model, a converter that needs the drafter to run,
an import hidden in a function, a family or head added on one side only.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, get_args

import dspark.conversion

from dspark.configuration_dspark import Family, MarkovHeadType
from dspark.families import FAMILIES
from dspark.heads import SEQUENTIAL_HEADS

SOURCE = Path(dspark.__file__).resolve().parent
CONVERSION = Path(dspark.conversion.__file__).resolve().parent
# What each package may import of ours, besides itself. "modeling" stands for the single files beside the packages.
MAY_IMPORT: dict[str, set[str]] = {
    "ops": set(),
    "scheduling": set(),
    "calibration": set(),
    "objective": {"ops"},
    "heads": {"ops"},
    "families": {"ops", "heads"},
    "modeling": {"ops", "heads", "families", "objective", "scheduling"},
    "simulation": {"scheduling"},
    "trace": {"modeling"},
    # The names of a target's tables are those of its class: reading them needs no drafter.
    "conversion": {
        "modeling.configuration_dspark",
        "modeling.any_format",
        "modeling.target",
        "modeling.borrowing",
        "families",
        "modeling.files",
        "modeling.rope_rules",
    },
    "decoding": {"ops", "heads", "modeling", "scheduling", "calibration"},
    "training": {"ops", "heads", "families", "objective", "modeling", "calibration", "decoding.capture"},
    # What was picked and why is the dispatch's to say; ops are called by the loop.
    "evaluation": {"modeling", "decoding", "scheduling", "calibration", "objective", "simulation", "ops.dispatch"},
    "cards": {"modeling", "evaluation", "conversion"},
    "publishing": {"modeling", "scheduling", "conversion", "cards", "evaluation", "decoding.repository"},
}
ON_TOP = {"cli", "dspark"}  # the command line and `dspark/__init__.py` may import everything
# Imports inside functions that go up, each for a reason given where it stands.
INSIDE_FUNCTIONS = {
    ("modeling.configuration_dspark", "conversion"),
    ("conversion.converting", "modeling.modeling_dspark"),
    ("modeling.any_format", "conversion"),
    ("modeling.hub", "conversion"),
    ("modeling.hub", "publishing"),
    ("modeling.modeling_dspark", "decoding.generate"),
}


class Import(NamedTuple):
    """Module `of` imports our module `what`, in a function or not; both as `package.file`."""

    of: str
    what: str
    is_inside_function: bool


def place(parts: list[str]) -> str:
    """`package.file` of a dotted path below `dspark`: files beside the packages belong to "modeling"."""
    if parts in ([], ["__main__"]):
        return "dspark"
    if parts[0] == "conversion" or (SOURCE / parts[0]).is_dir():
        return ".".join(parts[:2])
    return f"modeling.{parts[0]}"


def modules() -> Iterator[tuple[list[str], Path]]:
    for root, prefix in ((SOURCE, []), (CONVERSION, ["conversion"])):
        for path in sorted(root.rglob("*.py")):
            parts = prefix + list(path.relative_to(root).with_suffix("").parts)
            yield (parts[:-1] if parts[-1] == "__init__" else parts), path


def imported(node: ast.AST, parts: list[str], *, is_package: bool) -> Iterator[list[str]]:
    """Paths below `dspark` that one import statement names."""
    if isinstance(node, ast.Import):
        yield from (name.name.split(".")[1:] for name in node.names if name.name.split(".")[0] == "dspark")
    elif isinstance(node, ast.ImportFrom):
        path = (node.module or "").split(".") if node.module else []
        if node.level == 0:
            if path[0] != "dspark":
                return
            base = path[1:]
        else:
            base = parts[: len(parts) - node.level + (1 if is_package else 0)] + path
        # `from . import x` and `from dspark import x` name modules or what a package re-exports.
        yield from ([*base, name.name] for name in node.names) if not base or base == parts else [base]


def imports() -> Iterator[Import]:
    for parts, path in modules():
        tree = ast.parse(path.read_text())
        inside = {
            id(node)
            for function in ast.walk(tree)
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
            for node in ast.walk(function)
        }
        for node in ast.walk(tree):
            for what in imported(node, parts, is_package=path.name == "__init__.py"):
                yield Import(place(parts), place(what), id(node) in inside)


def test_every_package_has_its_place() -> None:
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")} | {"conversion"}
    unknown = packages - MAY_IMPORT.keys() - ON_TOP
    assert not unknown, f"say in this file what {unknown} may import"


def test_imports_point_one_way() -> None:
    found = list(imports())
    assert len(found) > 100
    for entry in found:
        package, other = entry.of.split(".")[0], entry.what.split(".")[0]
        if package in ON_TOP or package == other or (entry.is_inside_function and is_excused(entry)):
            continue
        allowed = MAY_IMPORT[package]
        assert other in allowed or entry.what in allowed, f"{entry.of} imports {entry.what}"


def is_excused(entry: Import) -> bool:
    return (entry.of, entry.what) in INSIDE_FUNCTIONS or (entry.of, entry.what.split(".")[0]) in INSIDE_FUNCTIONS


def test_the_walk_sees_imports() -> None:
    # The test above passes when nothing is found, so what it must find is named.
    found = {(entry.of, entry.what, entry.is_inside_function) for entry in imports()}
    assert ("decoding.loop", "decoding.commit", False) in found
    assert ("decoding.confidence", "modeling.modeling_dspark", False) in found
    assert ("modeling.modeling_dspark", "decoding.generate", True) in found
    assert ("conversion.record", "modeling.configuration_dspark", False) in found
    assert ("modeling.modeling_dspark", "heads", False) in found


def test_literals_of_the_config_are_the_classes_that_exist() -> None:
    assert set(get_args(Family)) == set(FAMILIES)
    assert set(get_args(MarkovHeadType)) == {"none", *SEQUENTIAL_HEADS}
