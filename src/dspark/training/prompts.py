"""Prompts for `dspark data`: reading them, making ids of them, choosing temperatures."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .collator import mix
from .data import DataError


@dataclass(frozen=True)
class Prompt:
    """A first user turn: its file's stem, its place in that file (0-based), its text."""

    source: str
    index: int
    text: str


@dataclass(frozen=True)
class Job:
    """One answer to be written."""

    source: str
    index: int
    temperature: float
    prompt_ids: list[int]

    @property
    def key(self) -> tuple[str, int, float]:
        """What tells this answer from others in the output file."""
        return self.source, self.index, self.temperature


@dataclass(frozen=True)
class AnswerSettings:
    """How answers are written.

    Attributes:
        temperatures: 0 is greedy; above, plain sampling at that temperature (no top-k or top-p).
        each: Every prompt at every temperature; else one temperature per prompt, chosen by the seed.
        max_new_tokens: Longest answer.
        max_prompt_tokens: Longer prompts are left out.
        batch_size: Answers written at once.
        seed: Of the choice of temperatures, the order and the sampling.
        raw: Use prompts as they are, without the chat template.
        template_args: Extra variables for the chat template (`{"enable_thinking": False}`).
    """

    temperatures: tuple[float, ...] = (0.0,)
    each: bool = False
    max_new_tokens: int = 512
    max_prompt_tokens: int = 1024
    batch_size: int = 8
    seed: int = 0
    raw: bool = False
    template_args: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if not self.temperatures or min(self.temperatures) < 0 or len(set(self.temperatures)) < len(self.temperatures):
            raise DataError(f"Temperatures must be at least 0 and each named once, got {list(self.temperatures)}.")
        for field in ("max_new_tokens", "max_prompt_tokens", "batch_size"):
            if getattr(self, field) < 1:
                raise DataError(f"`{field}` must be at least 1, got {getattr(self, field)}.")


def read_prompts(paths: Sequence[Path], limit: int | None = None) -> list[Prompt]:
    """First turns of prompt files: lines `{"turns": [text, ...]}` or `{"prompt": text}`.

    Args:
        paths: Files; their stems name the sources and must differ.
        limit: Take this many from the start of each file.

    Raises:
        DataError: A file is missing, two have one name, a line is not a prompt, or there is none.
    """
    prompts = []
    stems = [path.stem for path in paths]
    if repeated := sorted({stem for stem in stems if stems.count(stem) > 1}):
        raise DataError(f"Prompt files are told apart by name, but {', '.join(repeated)} is given twice: rename one.")
    for path in paths:
        if not path.is_file():
            raise DataError(f"{path} is not a file. Expected prompts, one JSON object a line.")
        # Not `splitlines`: texts may hold U+2028.
        lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
        for index, line in enumerate(lines[:limit]):
            prompts.append(Prompt(path.stem, index, _text(line, f"{path}:{index + 1}")))
    if not prompts:
        raise DataError(f"No prompt in {', '.join(map(str, paths)) or 'no file'}.")
    return prompts


def _text(line: str, where: str) -> str:
    try:
        raw = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where} is not JSON ({error.msg} at column {error.colno}).") from error
    text = None
    if isinstance(raw, dict):
        turns = raw.get("turns")
        text = turns[0] if isinstance(turns, list) and turns else raw.get("prompt")
    if not isinstance(text, str) or not text:
        raise DataError(f'{where} must be {{"turns": [text, ...]}} or {{"prompt": text}}, got {line[:80]}.')
    return text


def prompt_ids(text: str, tokenizer: Any, settings: AnswerSettings) -> list[int]:
    """Ids of a prompt, chat template and generation prompt included.

    Raises:
        DataError: The tokenizer has no chat template and `raw` was not asked for.
    """
    if settings.raw:
        return list(tokenizer(text).input_ids)
    require_template(tokenizer)
    message = [{"role": "user", "content": text}]
    shown = tokenizer.apply_chat_template(
        message, add_generation_prompt=True, tokenize=False, **(settings.template_args or {})
    )
    return list(tokenizer(shown, add_special_tokens=False).input_ids)


def require_template(tokenizer: Any) -> None:
    """Refuse a tokenizer without a chat template.

    Raises:
        DataError: It has none.
    """
    if not tokenizer.chat_template:
        raise DataError(
            f"{type(tokenizer).__name__} has no chat template. Use --raw to give prompts to the target as they are, "
            "or a target with a template."
        )


def temperatures_of(prompt: Prompt, settings: AnswerSettings) -> tuple[float, ...]:
    """The temperatures at which a prompt is answered."""
    if settings.each:
        return settings.temperatures
    place = mix(settings.seed, zlib.crc32(prompt.source.encode()), prompt.index) % len(settings.temperatures)
    return (settings.temperatures[place],)


__all__ = ["AnswerSettings", "Job", "Prompt", "prompt_ids", "read_prompts", "require_template", "temperatures_of"]
