"""SGLang's file of confidence temperatures (`--speculative-dspark-confidence-sts-path`): one list for one server.

`{"temperatures": [T_0, ...], "dataset": str, "num_samples": int, "ece_before": [...], "ece_after": [...]}`, where
confidence k is `sigmoid(logit_k / T_k)` as here. SGLang itself leaves out keys that are empty, and asks for as many
temperatures as its block has drafts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class SglangSts:
    """Contents of the file.

    Attributes:
        temperatures: One per draft position, positive.
        dataset: What they were fitted on.
        num_samples: Rounds they were fitted on.
        ece_before: ECE of survival per position, raw; empty: not known.
        ece_after: The same, calibrated.

    Raises:
        ValueError: A value breaks a rule; names the field.
    """

    temperatures: tuple[float, ...]
    dataset: str = ""
    num_samples: int = 0
    ece_before: tuple[float, ...] = ()
    ece_after: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for field in ("temperatures", "ece_before", "ece_after"):
            object.__setattr__(self, field, _numbers(getattr(self, field), field))
        if not self.temperatures:
            raise ValueError("`temperatures` must have one positive number per draft position, got none.")
        # SGLang divides in float32, where 1e-46 is 0 and 1e39 infinite.
        if bad := [t for t in self.temperatures if not 1e-37 <= t <= 1e38]:
            raise ValueError(f"`temperatures` must be positive numbers that float32 can hold, got {bad[0]!r}.")
        for field in ("ece_before", "ece_after"):
            if len(values := getattr(self, field)) not in (0, len(self.temperatures)):
                raise ValueError(
                    f"`{field}` must have one number per temperature ({len(self.temperatures)}) or none, got "
                    f"{len(values)}."
                )
        if not isinstance(self.dataset, str):
            raise ValueError(f"`dataset` must be a text, got {self.dataset!r}.")
        if not isinstance(self.num_samples, int) or isinstance(self.num_samples, bool) or self.num_samples < 0:
            raise ValueError(f"`num_samples` must be an integer of at least 0, got {self.num_samples!r}.")


def to_json(sts: SglangSts) -> str:
    """Text of the file."""
    return json.dumps(asdict(sts), indent=2, ensure_ascii=False) + "\n"


def from_json(text: str, *, num_draft_tokens: int | None = None) -> SglangSts:
    """Contents of a file's text.

    Args:
        text: JSON; keys SGLang does not know are passed over, as it does.
        num_draft_tokens: Draft positions of the drafter it is for; None: any.

    Raises:
        ValueError: Not such a file, or temperatures for another block.
    """
    try:
        raw = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"Not a file of confidence temperatures: it is no JSON ({error}).") from error
    if not isinstance(raw, dict) or "temperatures" not in raw:
        raise ValueError(f"Not a file of confidence temperatures: expected a key `temperatures`, got {text[:80]!r}.")
    sts = SglangSts(**{key: raw[key] for key in SglangSts.__dataclass_fields__ if key in raw})
    if num_draft_tokens is not None and len(sts.temperatures) != num_draft_tokens:
        raise ValueError(
            f"The file has {len(sts.temperatures)} temperatures, the drafter {num_draft_tokens} draft positions: it "
            "was made for another block size. Calibrate again."
        )
    return sts


def _numbers(values: Any, field: str) -> tuple[float, ...]:
    is_list = isinstance(values, Sequence) and not isinstance(values, str)
    if not is_list or not all(
        isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) for v in values
    ):
        raise ValueError(f"`{field}` must be a list of finite numbers, got {values!r}.")
    return tuple(float(v) for v in values)


__all__ = ["SglangSts", "from_json", "to_json"]
