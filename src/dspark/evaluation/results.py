"""What every prompt gave, in integers and seconds, one JSON object a line: an evaluation goes on where it stopped.

The first line of `rounds.jsonl` says what the figures were taken with, each other one holds all runs of one prompt at
one temperature, so that times that are compared were always taken next to each other. Files of several processes
merge by putting their lines together.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..files import whole_lines
from ..stats import SpeculationStats
from .prompt_sets import SETS
from .provenance import differences

ROUNDS_FILE = "rounds.jsonl"

Key = tuple[str, int, float]


@dataclass(frozen=True)
class PlainRun:
    """A plain `generate` call.

    Attributes:
        seconds: Wall time, the prompt's pass included.
        num_new_tokens: Tokens generated.
    """

    seconds: float
    num_new_tokens: int


@dataclass(frozen=True)
class DraftedRun:
    """A `generate` call with a drafter.

    Attributes:
        drafter: Its label.
        threshold: Confidence threshold.
        seconds: Wall time, the prompt's pass included.
        num_new_tokens: Tokens generated.
        is_equal: Whether the new ids equal the plain ones; None when sampled or without a plain run.
        divergence: Index of the first differing new token, or None.
        stats: Counts and times of the call.
    """

    drafter: str
    threshold: float
    seconds: float
    num_new_tokens: int
    is_equal: bool | None
    divergence: int | None
    stats: SpeculationStats


@dataclass(frozen=True)
class PromptResult:
    """All runs of one prompt at one temperature.

    Attributes:
        set_name: Prompt set.
        index: Place in the set, 0-based.
        temperature: 0 is greedy.
        prompt_hash: Of the prompt's ids.
        num_prompt_tokens: Length of the prompt, chat template included.
        plain: The plain run, or None when only counts were wanted.
        runs: One per drafter and threshold.
    """

    set_name: str
    index: int
    temperature: float
    prompt_hash: str
    num_prompt_tokens: int
    plain: PlainRun | None
    runs: list[DraftedRun]

    @property
    def key(self) -> Key:
        """What tells it from all others."""
        return self.set_name, self.index, self.temperature

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> PromptResult:
        """Inverse of `to_dict`.

        Raises:
            KeyError, TypeError: Not such a record.
        """
        plain = record["plain"]
        runs = [DraftedRun(**{**run, "stats": SpeculationStats(**run["stats"])}) for run in record["runs"]]
        return cls(**{**record, "plain": None if plain is None else PlainRun(**plain), "runs": runs})


@dataclass
class Results:
    """An evaluation's results.

    Attributes:
        configuration: What they were taken with (`provenance`).
        date: Day the first was taken, ISO.
        prompts: By key.
    """

    configuration: dict[str, Any]
    date: str
    prompts: dict[Key, PromptResult] = field(default_factory=dict)

    def in_order(self) -> list[PromptResult]:
        """By set (shipped ones first, then by name), place and temperature, whatever order they were taken in."""
        return sorted(self.prompts.values(), key=lambda r: (_rank(r.set_name), r.index, r.temperature))

    def header(self) -> dict[str, Any]:
        """First line of a file."""
        return {"configuration": self.configuration, "date": self.date}


class ResultsLog:
    """Results that grow, in a file line by line or only in memory.

    Args:
        folder: Made if missing. A results file in it is gone on with; a half-written last line is cut off. None keeps
            results in memory only.
        configuration: What will be run.
        date: Of today, ISO.

    Raises:
        ValueError: The folder holds results of another configuration (each difference is named) or another file.
    """

    def __init__(self, folder: str | Path | None, configuration: dict[str, Any], date: str) -> None:
        self.path = None if folder is None else Path(folder) / ROUNDS_FILE
        if self.path is not None and self.path.is_file() and whole_lines(self.path)[0]:
            self.results = read_results(self.path)
            if found := differences(self.results.configuration, configuration):
                raise ValueError(
                    f"{folder} holds results of another configuration, and figures of both would be mixed:\n"
                    + "\n".join(f"- {line}" for line in found)
                    + "\nName another folder with --out, or repeat that configuration to go on with it."
                )
            return
        self.results = Results(configuration, date)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        self._write(self.results.header())

    def append(self, result: PromptResult) -> None:
        """Keep a result; it is in the file when this returns."""
        self.results.prompts[result.key] = result
        self._write(result.to_dict())

    def _write(self, record: dict[str, Any]) -> None:
        if self.path is None:
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, separators=(",", ":"), ensure_ascii=False) + "\n")


def read_results(path: str | Path) -> Results:
    """Results of a `rounds.jsonl` file.

    Raises:
        ValueError: A line is not what an evaluation writes; names file and line.
        OSError: The file cannot be read.
    """
    results: Results | None = None
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").split("\n"), start=1):
        if not line:
            continue
        try:
            record = json.loads(line)
            if results is None:
                results = Results(record["configuration"], record["date"])
            else:
                result = PromptResult.from_dict(record)
                results.prompts[result.key] = result
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: not a line of `dspark eval` ({error!r}).") from error
    if results is None:
        raise ValueError(f"{path} is empty: `dspark eval` writes a line about the run first.")
    return results


def merge_results(folders: Sequence[str | Path]) -> Results:
    """Results of several folders, as if one process had taken them all.

    Raises:
        ValueError: Configurations differ, or one prompt is in several folders, which would count it twice.
        OSError: A folder holds no results.
    """
    if not folders:
        raise ValueError("Nothing to merge: name at least one folder of results.")
    parts = [read_results(Path(folder) / ROUNDS_FILE) for folder in folders]
    merged = Results(parts[0].configuration, min(part.date for part in parts))
    for folder, part in zip(folders, parts, strict=True):
        if found := differences(merged.configuration, part.configuration):
            listed = "\n".join(f"- {line}" for line in found)
            raise ValueError(f"{folders[0]} (there) and {folder} (now) differ, so they do not merge:\n{listed}")
        if twice := sorted(part.prompts.keys() & merged.prompts.keys()):
            key = twice[0]
            raise ValueError(
                f"Set {key[0]!r}, prompt {key[1]}, temperature {key[2]} is in {folder} and in a folder before it, and "
                "would count twice. Give the processes prompts of their own (--part)."
            )
        merged.prompts.update(part.prompts)
    return merged


def write_results(results: Results, folder: str | Path) -> None:
    """A results file of its own in `folder`.

    Raises:
        ValueError: There is one already.
    """
    if (Path(folder) / ROUNDS_FILE).exists():
        raise ValueError(f"{folder} holds results already. Name another folder with --out.")
    log = ResultsLog(folder, results.configuration, results.date)
    for result in results.in_order():
        log.append(result)


def set_names(results: Iterable[PromptResult]) -> list[str]:
    """Names of the sets, in the order of reports."""
    return sorted({result.set_name for result in results}, key=_rank)


def _rank(name: str) -> tuple[int, str]:
    return (SETS.index(name), "") if name in SETS else (len(SETS), name)


__all__ = [
    "ROUNDS_FILE", "DraftedRun", "PlainRun", "PromptResult", "Results", "ResultsLog", "merge_results", "read_results",
    "set_names", "write_results",
]  # fmt: skip
