"""`Reader`: takes fields out of a checkpoint for a record, each with the place it was found in.

A value at several places must be the same everywhere. What is absent has no default of ours: the reader's caller names
the format's own rule, or the field is reported as missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .checkpoint import Checkpoint
from .record import SEMANTIC_FIELDS, Field, Record
from .stored import StoredTensor

# Rotary keys a config inherits from the target's, which no drafter reads.
_TARGETS_ROPE = ("mrope_section", "mrope_interleaved", "partial_rotary_factor", "type")
# Sizes that are reckoned with before a config holds them to its rules, and the largest that can be meant.
_SIZES = {"hidden_size": 2**24, "target_hidden_size": 2**24, "vocab_size": 2**31, "num_hidden_layers": 10_000}


class Reader:
    """Reads one checkpoint.

    Args:
        format_name: Name in the registry.
        checkpoint: What to read.
        choices: Fields the caller has decided, by name of the record's field; they win over the file.
    """

    def __init__(self, format_name: str, checkpoint: Checkpoint, choices: Mapping[str, Any]) -> None:
        self.format, self.checkpoint, self.choices = format_name, checkpoint, choices
        self.source, self.config = checkpoint.source, checkpoint.config
        self.fields: dict[str, Field] = {}
        self.ignored: dict[str, str] = {}
        self.warnings: list[str] = []
        self.tensors: dict[str, StoredTensor] | None = None  # by canonical name, set by the importer

    def get(self, path: str) -> Any:
        """Value at a path of keys (`dflash_config.mask_token_id`; GGUF keys are whole); None if there is none."""
        if self.checkpoint.is_gguf:
            return self.config.get(path)
        value: Any = self.config
        for key in path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def flag(self, path: str) -> bool | None:
        """True or False at a path; None if there is neither.

        Raises:
            ValueError: It is something else: "false" is no False.
        """
        value = self.get(path)
        if not isinstance(value, bool | None):
            raise ValueError(f"{self.source}: `{path}` must be true or false, got {value!r}.")
        return value

    def count(self, path: str) -> int | None:
        """A positive integer at a path; None if there is none.

        Raises:
            ValueError: It is something else.
        """
        value = self.get(path)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f"{self.source}: `{path}` must be a positive integer, got {value!r}.")
        return value

    @property
    def file(self) -> str:
        """What paths are keys of, for provenance."""
        return "GGUF" if self.checkpoint.is_gguf else "config.json"

    def require(self, paths: Iterable[str | tuple[str, ...]]) -> None:
        """Refuse a config that lacks fields; a tuple is met by any of its paths.

        Raises:
            ValueError: Names all that are missing.
        """
        wanted = [(path,) if isinstance(path, str) else path for path in paths]
        lacking = [some[0] for some in wanted if all(self.get(path) is None for path in some)]
        if missing := [name for name in lacking if name.rsplit(".", 1)[-1] not in self.choices]:
            raise ValueError(
                f"{self.source} is a drafter in the format {self.format}, and its {self.file} lacks "
                f"{', '.join(missing)}. "
                "These decide what the tensors mean and have no safe default: restore them from the training config."
            )

    def set(self, name: str, value: Any, source: str) -> None:
        """Give a field a value, unless the caller chose one.

        Raises:
            ValueError: It is a size that is reckoned with while reading, and no positive integer.
        """
        if name in self.choices:
            value, source = self.choices[name], "the caller"
        if (most := _SIZES.get(name)) is not None and value is not None:
            is_size = isinstance(value, int) and not isinstance(value, bool) and 0 < value <= most
            if not is_size:
                raise ValueError(
                    f"{self.source}: `{name}` must be an integer in 1..{most}, got {value!r} (from {source})."
                )
        self.fields[name] = Field(value, source)

    def take(self, name: str, *paths: str, rule: tuple[Any, str] | None = None) -> Any:
        """Read a field from the first path that has it; all that have it must agree.

        Args:
            name: The record's field.
            *paths: Keys it may be under; none: its own name.
            rule: Value where no path has it, and the format's rule that says so.

        Raises:
            ValueError: The paths disagree, or nothing says what it is.
        """
        places = paths or (name,)
        found = [(path, value) for path in places if (value := self.get(path)) is not None]
        if name in self.choices:
            self.set(name, None, "")
            return self.fields[name].value
        if any(value != found[0][1] for _, value in found):
            listed = ", ".join(f"`{path}` {value!r}" for path, value in found)
            raise ValueError(f"{self.source}: {listed} of its {self.file} disagree on `{name}`. Correct one of them.")
        if found:
            self.set(name, found[0][1], f"{self.file}: {found[0][0]}")
        elif rule is not None:
            self.set(name, rule[0], f"rule of the format: {rule[1]}")
        else:
            self.require([places])
        return self.fields[name].value

    def layer_ids(self, path: str, shift: int, rule: str) -> None:
        """`target_layer_ids` from a list of integers, `shift` added to each."""
        ids = self.get(path)
        is_list = isinstance(ids, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
        if shift and not is_list:
            raise ValueError(f"{self.source}: `{path}` must be a list of integers, got {ids!r}.")
        where = f"{self.file}: {path}" + (f" {ids}, {rule}" if shift else "")
        self.set("target_layer_ids", [i + shift for i in ids] if shift else ids, where)

    def rope(self, parts: Mapping[str, Any], *, under: str = "") -> None:
        """`rope_parameters` from the transformers 4 keys (`rope_theta`, `rope_scaling`), the 5 key, or both.

        Raises:
            ValueError: They disagree, or none names the base.
        """
        merged: dict[str, Any] = {}
        named = []
        for key in ("rope_theta", "rope_scaling", "rope_parameters"):
            value = {key: parts.get(key)} if key == "rope_theta" else parts.get(key)
            if not isinstance(value, dict | None):
                raise ValueError(f"{self.source}: `{under}{key}` must be an object of rotary settings, got {value!r}.")
            part = _set_keys(value)
            if any(merged.get(name, value) != value for name, value in part.items()):
                raise ValueError(
                    f"{self.source}: `{key}` gives {part}, other keys of the config {merged}: they disagree. Only one "
                    "can be what the drafter was trained with: correct the config."
                )
            merged |= part
            named += [under + key] if part else []
        if "rope_theta" not in merged:
            raise ValueError(
                f"{self.source}: no `rope_theta`, neither flat nor under `rope_parameters`. A default would only be "
                "noticed at long context: add the value the drafter was trained with."
            )
        kept = {key: value for key, value in merged.items() if key not in _TARGETS_ROPE}
        for key in merged.keys() - kept.keys() - {"type"}:
            self.ignored[f"rope.{key}"] = "describes the target's positions; the drafter rotates whole heads"
        self.set("rope_parameters", {"rope_type": "default", **kept}, f"{self.file}: {', '.join(named)}")

    def fill(self, rules: Mapping[str, tuple[Any, str]]) -> None:
        """Give fields that are not set yet the value of a rule of the format."""
        for name, (value, why) in rules.items():
            if name not in self.fields:
                self.set(name, value, f"rule of the format: {why}")

    def record(self) -> Record:
        """The finished record."""
        ordered = {name: self.fields[name] for name in SEMANTIC_FIELDS if name in self.fields}
        return Record(self.format, self.source, ordered, self.tensors, self.ignored, self.warnings)


def _set_keys(part: dict[str, Any] | None) -> dict[str, Any]:
    """Set keys only, `type` (transformers 4) under its later name."""
    named: dict[str, Any] = {}
    for key, value in (part or {}).items():
        if value is not None and not (key == "type" and (part or {}).get("rope_type") is not None):
            named["rope_type" if key == "type" else key] = value
    return named


__all__ = ["Reader"]
