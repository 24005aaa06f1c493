"""Checked reading of a JSON object: every value comes out as the type asked for, or an error names its place."""

from __future__ import annotations

from typing import Any

_MOST_ID = 1 << 31
_TOO_MUCH = 1e300  # an integer beyond what a float holds would fail later


class Fields:
    """The fields of one object.

    Args:
        value: What stands there.
        place: Where, as errors name it.

    Raises:
        ValueError: It is no object. Every method raises it too, for a field that is missing or something else.
    """

    def __init__(self, value: Any, place: str) -> None:
        if not isinstance(value, dict):
            raise ValueError(f"`{place}` must be an object, got {_short(value)}")
        self._value, self._place = value, place

    def require(self, holds: bool, name: str, rule: str) -> None:
        """Refuse field `name` unless `holds`."""
        if not holds:
            raise ValueError(f"`{self._place}.{name}` {rule}, got {_short(self._value.get(name))}")

    def _get(self, name: str) -> Any:
        if name not in self._value:
            raise ValueError(f"`{self._place}.{name}` is missing")
        return self._value[name]

    def is_null(self, name: str) -> bool:
        """Whether the field is there and null."""
        return self._get(name) is None

    def inside(self, name: str) -> Fields:
        """The object in a field."""
        return Fields(self._get(name), f"{self._place}.{name}")

    def items(self, name: str) -> list[Any]:
        """A list of anything."""
        value = self._get(name)
        self.require(isinstance(value, list), name, "must be a list")
        return value

    def text(self, name: str) -> str:
        """Text that UTF-8 can write."""
        value = self._get(name)
        self.require(_is_text(value), name, "must be text")
        return value

    def texts(self, name: str) -> dict[str, str]:
        """An object of texts."""
        value = self._get(name)
        is_right = isinstance(value, dict) and all(map(_is_text, [*value, *value.values()]))
        self.require(is_right, name, "must be an object of texts")
        return value

    def settings(self, name: str) -> dict[str, Any]:
        """An object of texts, numbers, truth values and nulls."""
        value = self._get(name)
        is_right = isinstance(value, dict) and all(map(_is_text, value))
        is_right = is_right and all(
            v is None or isinstance(v, bool) or _is_text(v) or _is_number(v) for v in value.values()
        )
        self.require(is_right, name, "must be an object of plain values")
        return value

    def count(self, name: str, *, most: int = _MOST_ID) -> int:
        """A whole number from 0 to `most`."""
        value = self._get(name)
        self.require(type(value) is int and 0 <= value <= most, name, f"must be a whole number from 0 to {most}")
        return value

    def ids(self, name: str) -> list[int]:
        """Token ids."""
        value = self._get(name)
        self.require(isinstance(value, list) and all(map(_is_id, value)), name, "must be a list of token ids")
        return value

    def id_of(self, text: str) -> int:
        """A token id that is the name of a field."""
        is_right = text.isascii() and text.isdecimal() and _is_id(int(text[:12]))
        self.require(is_right, "texts", f"must have token ids as names, not {text[:40]!r}")
        return int(text)

    def prob(self, name: str) -> float:
        """A probability."""
        value = self._get(name)
        self.require(_is_prob(value), name, "must be a number from 0 to 1")
        return float(value)

    def probs(self, name: str, count: int) -> list[float]:
        """So many probabilities."""
        value = self._get(name)
        is_right = isinstance(value, list) and len(value) == count and all(map(_is_prob, value))
        self.require(is_right, name, f"must be {count} numbers from 0 to 1")
        return [float(v) for v in value]

    def seconds(self, name: str) -> float:
        """A time."""
        value = self._get(name)
        self.require(_is_number(value) and value >= 0, name, "must be a number of seconds")
        return float(value)

    def times(self, name: str, count: int) -> list[float]:
        """So many times."""
        value = self._get(name)
        is_right = isinstance(value, list) and len(value) == count and all(_is_number(v) and v >= 0 for v in value)
        self.require(is_right, name, f"must be {count} numbers of seconds")
        return [float(v) for v in value]

    def candidate(self, name: str) -> tuple[int, float]:
        """A token id with its probability."""
        return self.pair(self._get(name), name)

    def pair(self, value: Any, name: str) -> tuple[int, float]:
        """An entry of field `name` that is a token id with its probability."""
        is_right = isinstance(value, list) and len(value) == 2 and _is_id(value[0]) and _is_prob(value[1])
        self.require(is_right, name, "must hold pairs of token id and probability")
        return value[0], float(value[1])


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < _TOO_MUCH  # NaN is not


def _is_prob(value: Any) -> bool:
    return _is_number(value) and 0 <= value <= 1


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST_ID


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


__all__ = ["Fields"]
