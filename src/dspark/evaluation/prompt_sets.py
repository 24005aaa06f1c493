"""Prompts of an evaluation: files, the samples of public sets that ship with the package, and their token ids."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

SETS = ("gsm8k", "math500", "humaneval", "mbpp", "mt-bench", "arena-hard-v2")


@dataclass(frozen=True)
class Prompting:
    """How a prompt becomes ids.

    Attributes:
        raw: As it is, without the chat template.
        template_args: Extra variables for the chat template (`{"enable_thinking": False}`).
    """

    raw: bool = False
    template_args: dict[str, Any] | None = None


def read_prompts(path: str | Path, limit: int | None = None) -> list[str]:
    """First turns of a prompt file, one JSON object a line: `{"turns": [text, ...]}` or `{"prompt": text}`.

    Raises:
        ValueError: A line is not such an object, or the file is not UTF-8; names file and line.
        OSError: The file cannot be read.
    """
    prompts: list[str] = []
    try:
        whole = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}); prompts are JSON lines.") from error
    for number, line in enumerate(whole.split("\n"), start=1):
        if limit is not None and len(prompts) >= limit:
            break
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            text = record["turns"][0] if "turns" in record else record["prompt"]
        except (json.JSONDecodeError, KeyError, IndexError, TypeError) as error:
            raise ValueError(_malformed(path, number, line, str(error))) from error
        if not isinstance(text, str) or not text:
            raise ValueError(_malformed(path, number, line, "its text is empty or no string"))
        prompts.append(text)
    return prompts


def _malformed(path: str | Path, number: int, line: str, cause: str) -> str:
    return (
        f"{path}, line {number}: expected a JSON object with `turns` (a list of texts) or `prompt`, got {line[:60]!r} "
        f"({cause})."
    )


def sample_prompts(name: str, limit: int | None = None) -> list[str]:
    """Prompts of a shipped set (see `SETS`).

    Raises:
        ValueError: No such set.
    """
    if name not in SETS:
        raise ValueError(f"No shipped prompt set {name!r}. There are: {', '.join(SETS)}.")
    with resources.as_file(resources.files("dspark.evaluation") / "prompts" / f"{name}.jsonl") as path:
        return read_prompts(path, limit)


def gather_prompts(
    names: Sequence[str], files: Sequence[str | Path], *, limit: int | None = None
) -> dict[str, list[str]]:
    """Shipped sets and prompt files by name; without either, all shipped sets.

    Args:
        names: Of shipped sets.
        files: Prompt files; a set is named after its file's stem.
        limit: Prompts from the start of each set.

    Raises:
        ValueError: No such set, a name twice, a malformed line, a file without a prompt.
        OSError: A file cannot be read.
    """
    sets = {name: sample_prompts(name, limit) for name in (names or (() if files else SETS))}
    for file in files:
        name = Path(file).stem
        if name in sets:
            raise ValueError(f"Prompt sets are told apart by name, but {name!r} is given twice: rename {file}.")
        sets[name] = read_prompts(file, limit)
        if not sets[name]:
            raise ValueError(f"{file} has no prompt.")
    return sets


def prompt_hashes(sets: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """A hash per prompt, by set: what was calibrated on is told from what is evaluated on by these."""
    return {name: [hashlib.sha256(text.encode()).hexdigest()[:12] for text in texts] for name, texts in sets.items()}


def chat_ids(tokenizer: Any, prompt: str, prompting: Prompting | None = None) -> Any:
    """Token ids int64 `[1, P]` of a user turn under the tokenizer's chat template, generation prompt included.

    Args:
        tokenizer: The target's.
        prompt: The turn.
        prompting: How it becomes ids; by default under the template, if there is one.
    """
    prompting = prompting or Prompting()
    if tokenizer.chat_template is None or prompting.raw:
        return tokenizer(prompt, return_tensors="pt").input_ids
    message = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(
        message, add_generation_prompt=True, return_tensors="pt", return_dict=True, **(prompting.template_args or {})
    ).input_ids


__all__ = ["SETS", "Prompting", "chat_ids", "gather_prompts", "prompt_hashes", "read_prompts", "sample_prompts"]
