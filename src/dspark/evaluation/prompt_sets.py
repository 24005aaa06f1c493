"""Reading prompt files, and the small samples of public evaluation sets that ship with the package."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

SETS = ("gsm8k", "math500", "humaneval", "mbpp", "mt-bench", "arena-hard-v2")


def read_prompts(path: str | Path, limit: int | None = None) -> list[str]:
    """First turns of a prompt file, one JSON object a line: `{"turns": [text, ...]}` or `{"prompt": text}`.

    Raises:
        ValueError: A line is not such an object; names file and line.
    """
    prompts: list[str] = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        if limit is not None and len(prompts) >= limit:
            break
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            prompts.append(record["turns"][0] if "turns" in record else record["prompt"])
        except (json.JSONDecodeError, KeyError, IndexError, TypeError) as error:
            raise ValueError(
                f"{path}, line {number}: expected a JSON object with `turns` (a list of texts) or `prompt`, got "
                f"{line[:60]!r} ({error})."
            ) from error
    return prompts


def sample_prompts(name: str, limit: int | None = None) -> list[str]:
    """Prompts of a shipped set (see `SETS`).

    Raises:
        ValueError: No such set.
    """
    if name not in SETS:
        raise ValueError(f"No shipped prompt set {name!r}. There are: {', '.join(SETS)}.")
    with resources.as_file(resources.files("dspark.evaluation") / "prompts" / f"{name}.jsonl") as path:
        return read_prompts(path, limit)


def chat_ids(tokenizer: Any, prompt: str) -> Any:
    """Token ids int64 `[1, P]` of a user turn under the tokenizer's chat template, generation prompt included."""
    if tokenizer.chat_template is None:
        return tokenizer(prompt, return_tensors="pt").input_ids
    message = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(
        message, add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).input_ids


__all__ = ["SETS", "chat_ids", "read_prompts", "sample_prompts"]
