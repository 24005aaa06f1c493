"""Training text: prompts with answers the target wrote, as token ids with a mask of what is supervised.

The input is what `dspark data` writes: one JSON object a line with `prompt_ids` and `answer_ids`. Only the answer is
supervised, since a drafter is only ever asked to continue text its target writes.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import torch
from torch.utils.data import Dataset

TooLong = Literal["truncate", "drop", "error"]
SHORTEST_ANSWER = 2  # an anchor needs a supervised token and a supervised next one


class DataError(ValueError):
    """Training records that cannot be used; the message names the file and line, what was found, and the way out."""


class AnswerRecord(NamedTuple):
    """One prompt with its answer, as stored ids."""

    prompt_ids: list[int]
    answer_ids: list[int]
    where: str


@dataclass
class DataCounts:
    """What became of the records.

    Attributes:
        records: Lines read.
        used: Records in the data set.
        truncated: Used records that lost tokens at their end.
        dropped_long: Records left out because they exceed the limit (`too_long="drop"`).
        dropped_short: Records left out because no anchor fits: fewer than two answer tokens within the limit.
        tokens: Tokens of the used records.
        supervised_tokens: Answer tokens among them.
    """

    records: int = 0
    used: int = 0
    truncated: int = 0
    dropped_long: int = 0
    dropped_short: int = 0
    tokens: int = 0
    supervised_tokens: int = 0


class AnswerDataset(Dataset[dict[str, torch.Tensor]]):
    """Sequences `prompt + answer`, kept as 32-bit ids; items are `{"input_ids": int64 [S], "loss_mask": bool [S]}`."""

    def __init__(self) -> None:
        self.counts = DataCounts()
        self._ids = array("i")
        self._starts = [0]
        self._answer_starts: list[int] = []

    def add(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> None:
        """Append one sequence; the caller has checked and cut it."""
        self._ids.extend(prompt_ids)
        self._ids.extend(answer_ids)
        self._starts.append(len(self._ids))
        self._answer_starts.append(len(prompt_ids))
        self.counts.used += 1
        self.counts.tokens += len(prompt_ids) + len(answer_ids)
        self.counts.supervised_tokens += len(answer_ids)

    def __len__(self) -> int:
        return len(self._answer_starts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start, end = self._starts[index], self._starts[index + 1]
        mask = torch.zeros(end - start, dtype=torch.bool)
        mask[self._answer_starts[index] :] = True
        return {"input_ids": torch.tensor(self._ids[start:end], dtype=torch.long), "loss_mask": mask}

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return [end - start for start, end in zip(self._starts, self._starts[1:], strict=False)]

    def answer_token_counts(self, vocab_size: int) -> torch.Tensor:
        """How often each token is written by the target: int64 `[vocab_size]`."""
        counts = torch.zeros(vocab_size, dtype=torch.long)
        for item in self:
            counts += torch.bincount(item["input_ids"][item["loss_mask"]], minlength=vocab_size)
        return counts

    def ids_and_mask(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and loss mask of one sequence."""
        item = self[index]
        return item["input_ids"], item["loss_mask"]

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return (self[i] for i in range(len(self)))


def read_answers(
    paths: Sequence[str | PathLike[str]],
    *,
    max_length: int,
    vocab_size: int,
    too_long: TooLong = "truncate",
) -> AnswerDataset:
    """Read and check answer files.

    Args:
        paths: Files of one JSON object a line.
        max_length: Most tokens of a sequence.
        vocab_size: Rows of the target's embedding; ids must lie below it.
        too_long: What happens to a longer record: cut at its end, left out, or an error.

    Raises:
        DataError: A file is missing or empty, a line is not a record, an id is outside the vocabulary, a record is too
            long (`too_long="error"`), or nothing usable is left.
    """
    if too_long not in get_args(TooLong):
        raise DataError(f"`too_long` must be one of {', '.join(map(repr, get_args(TooLong)))}, got {too_long!r}.")
    if max_length < 3:
        raise DataError(f"`max_length` must be at least 3 (prompt, anchor, label), got {max_length}.")
    data = AnswerDataset()
    for path in paths:
        for record in _records(Path(path)):
            _add(data, _checked(record, vocab_size), max_length, too_long)
    if not len(data):
        names = ", ".join(map(str, paths)) or "no file at all"
        raise DataError(
            f"No usable record in {names}: {data.counts.records} read, {data.counts.dropped_long} longer than "
            f"max_length={max_length}, {data.counts.dropped_short} with fewer than two answer tokens within it. Write "
            "answers with `dspark data`, or raise the limit."
        )
    return data


def _records(path: Path) -> Iterator[AnswerRecord]:
    if not path.is_file():
        raise DataError(f"{path} is not a file. Expected answers written by `dspark data`, one JSON object a line.")
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _parse(line, f"{path}:{number}")


def _parse(line: str, where: str) -> AnswerRecord:
    try:
        raw = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where} is not JSON ({error.msg} at column {error.colno}). If it is the last line of an interrupted "
            "`dspark data` run, run that command again: it drops the half-written line."
        ) from error
    found = sorted(raw) if isinstance(raw, dict) else type(raw).__name__
    if not isinstance(raw, dict) or not {"prompt_ids", "answer_ids"} <= set(raw):
        raise DataError(
            f"{where} must be an object with `prompt_ids` and `answer_ids`, found {found}. Prompts alone go through "
            "`dspark data` first, which adds the target's answers."
        )
    for field in ("prompt_ids", "answer_ids"):
        if not isinstance(raw[field], list) or not all(type(i) is int for i in raw[field]):
            raise DataError(f"{where}: `{field}` must be a list of token ids (integers), got {raw[field]!r:.80}.")
    return AnswerRecord(raw["prompt_ids"], raw["answer_ids"], where)


def _checked(record: AnswerRecord, vocab_size: int) -> AnswerRecord:
    ids = record.prompt_ids + record.answer_ids
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        bad = next(i for i in ids if not 0 <= i < vocab_size)
        raise DataError(
            f"{record.where} holds token id {bad}, but the target's embedding has {vocab_size} rows (ids 0.."
            f"{vocab_size - 1}). The file was written with another target's tokenizer: write answers with this one."
        )
    return record


def _add(data: AnswerDataset, record: AnswerRecord, max_length: int, too_long: TooLong) -> None:
    counts = data.counts
    counts.records += 1
    length = len(record.prompt_ids) + len(record.answer_ids)
    if length > max_length:
        if too_long == "error":
            raise DataError(
                f"{record.where} has {length} tokens, more than max_length={max_length}. Raise the limit, or use "
                "too_long='truncate' (cut the end) or 'drop' (leave such records out)."
            )
        if too_long == "drop":
            counts.dropped_long += 1
            return
    answer = record.answer_ids[: max(max_length - len(record.prompt_ids), 0)]
    if len(answer) < SHORTEST_ANSWER:
        counts.dropped_short += 1
        return
    counts.truncated += length > max_length
    data.add(record.prompt_ids, answer)


__all__ = ["SHORTEST_ANSWER", "AnswerDataset", "AnswerRecord", "DataCounts", "DataError", "TooLong", "read_answers"]
