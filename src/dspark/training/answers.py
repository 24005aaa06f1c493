"""Answers the target writes to prompts: the text a drafter is trained on.

A drafter learns its target's law where the target goes, so answers come from the target itself. The output file grows
line by line; a later run with the same settings adds what is missing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import torch
from transformers import PreTrainedModel

from ..files import whole_lines
from .collator import mix
from .continuations import continue_prompts
from .data import AnswerDataset, DataError, read_answers
from .feature_writer import FeatureWriter
from .features import vocabulary_rows
from .progress import WorkProgress
from .prompts import AnswerSettings, Job, Prompt, prompt_ids, temperatures_of

_WINDOW = 16  # batches sorted by prompt length together


@dataclass
class AnswerCounts:
    """What became of the prompts.

    Attributes:
        prompts: Read.
        duplicates: Left out since an earlier prompt has the same ids.
        too_long: Left out for their length.
        present: Answers to these prompts that were in the file already.
        others: Answers to other prompts that the file has.
        written: Answers added.
        tokens: Tokens added.
        dropped_lines: Half-written last lines removed (0 or 1).
    """

    prompts: int = 0
    duplicates: int = 0
    too_long: int = 0
    present: int = 0
    others: int = 0
    written: int = 0
    tokens: int = 0
    dropped_lines: int = 0

    def as_dict(self) -> dict[str, int]:
        """For a machine-readable result."""
        return asdict(self)


def write_answers(
    target: PreTrainedModel,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    out: Path,
    settings: AnswerSettings,
    features: FeatureWriter | None = None,
) -> AnswerCounts:
    """Write the answers that `out` lacks.

    Records are `{"source", "prompt_ids", "answer_ids", "temperature", "index"}`; `answer_ids` ends with the
    end-of-sequence id unless the answer was cut at `max_new_tokens`.

    Args:
        target: Its text is wanted; greedy and sampled, without its own generation defaults.
        tokenizer: Its tokenizer, with a chat template (unless `settings.raw`).
        prompts: From `read_prompts`.
        out: One JSON object a line; made if missing, with its folder.
        settings: See [`AnswerSettings`].
        features: Also store the hidden states that generation computes on the way.

    Raises:
        DataError: `out` holds answers to other prompts, or lines that are no records.
        FeaturesError: `features` holds other text.
    """
    counts = AnswerCounts(prompts=len(prompts))
    jobs = _jobs(prompts, tokenizer, settings, counts)
    done = _finished(out, counts)
    _check_same_prompts(jobs, done, out)
    counts.present = sum(job.key in done for job in jobs)
    counts.others = len(done) - counts.present
    if features is not None:
        features.catch_up(_records(target, out), settings.batch_size)
    out.parent.mkdir(parents=True, exist_ok=True)
    with (
        out.open("a", encoding="utf-8") as file,
        WorkProgress("Writing answers", len(jobs), unit="answers", done=counts.present) as work,
    ):
        for number, batch in enumerate(_batches(jobs, settings)):
            missing = [job for job in batch if job.key not in done]
            if not missing:
                continue
            tap = None if features is None else features.tap()
            prompt_rows = [job.prompt_ids for job in missing]
            answers = continue_prompts(
                target,
                prompt_rows,
                temperature=missing[0].temperature,
                max_new_tokens=settings.max_new_tokens,
                seed=mix(settings.seed, number),
                tap=tap,
            )
            _append(file, missing, answers)
            if features is not None and tap is not None:
                features.add_answers(tap, prompt_rows, answers)
            counts.tokens += sum(map(len, answers))
            counts.written += len(missing)
            work.advance(len(missing), f"{counts.tokens / max(work.seconds, 1e-9):,.0f} tokens/s")
    if features is not None:
        features.finish(_records(target, out))
    return counts


def _records(target: PreTrainedModel, out: Path) -> AnswerDataset:
    if not out.exists() or not out.stat().st_size:
        return AnswerDataset()
    return read_answers([out], max_length=sys.maxsize, vocab_size=vocabulary_rows(target))


def _append(file: IO[str], jobs: Sequence[Job], answers: Sequence[list[int]]) -> None:
    for job, answer in zip(jobs, answers, strict=True):
        record = {
            "source": job.source,
            "prompt_ids": job.prompt_ids,
            "answer_ids": answer,
            "temperature": job.temperature,
            "index": job.index,
        }
        file.write(json.dumps(record, separators=(",", ":")) + "\n")
    file.flush()


def _check_same_prompts(jobs: Sequence[Job], done: dict[tuple[str, int, float], list[int]], out: Path) -> None:
    for job in jobs:
        if job.key in done and done[job.key] != job.prompt_ids:
            raise DataError(
                f"{out} has an answer to another prompt under source {job.source!r}, index {job.index}: it was "
                "written for other prompts or with another tokenizer. Use another file."
            )


def _jobs(prompts: Sequence[Prompt], tokenizer: Any, settings: AnswerSettings, counts: AnswerCounts) -> list[Job]:
    jobs, seen = [], set()
    for prompt in prompts:
        ids = prompt_ids(prompt.text, tokenizer, settings)
        if tuple(ids) in seen:
            counts.duplicates += 1
        elif len(ids) > settings.max_prompt_tokens:
            counts.too_long += 1
        else:
            seen.add(tuple(ids))
            jobs += [Job(prompt.source, prompt.index, t, ids) for t in temperatures_of(prompt, settings)]
    return jobs


def _finished(out: Path, counts: AnswerCounts) -> dict[tuple[str, int, float], list[int]]:
    """Answers in the file, by key; a last line without its line break is cut off the file."""
    if not out.exists():
        return {}
    lines, was_cut = whole_lines(out)
    counts.dropped_lines = int(was_cut)
    done = {}
    for number, line in enumerate(lines.decode("utf-8").split("\n")[:-1], 1):
        try:
            record = json.loads(line)
            done[record["source"], record["index"], float(record["temperature"])] = record["prompt_ids"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise DataError(
                f"{out}:{number} is not an answer written by `dspark data` ({error!r}), so it is not added to. Use "
                "another file."
            ) from error
    return done


def _batches(jobs: Sequence[Job], settings: AnswerSettings) -> Iterator[list[Job]]:
    """Batches of one temperature and like prompt lengths, in an order that makes part of a file a fair sample."""
    generator = torch.Generator().manual_seed(settings.seed)
    order = [jobs[i] for i in torch.randperm(len(jobs), generator=generator).tolist()]
    span = _WINDOW * settings.batch_size
    for start in range(0, len(order), span):
        window = order[start : start + span]
        for temperature in settings.temperatures:
            same = sorted((job for job in window if job.temperature == temperature), key=lambda j: len(j.prompt_ids))
            for first in range(0, len(same), settings.batch_size):
                yield same[first : first + settings.batch_size]


__all__ = ["AnswerCounts", "write_answers"]
