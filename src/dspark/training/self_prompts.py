"""User turns the target writes itself, where there are no prompts: it goes on from its chat template's start.

An instruction-tuned target has seen many user turns and goes on with one. The turns come as a prompt file that
`dspark data` then answers like any other; a later run adds what is missing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..files import whole_lines
from ..plain_decoding import eos_ids
from .collator import mix
from .continuations import continue_prompts
from .data import DataError
from .progress import WorkProgress
from .prompts import AnswerSettings, require_template

_LONGEST = 256  # tokens; turns that do not end within them are left out
_PATIENCE = 20  # batches in a row without a new turn
_SELF = 1 << 41  # keeps these draws apart from those of the answers
_MARK = "\u2603user text\u2603"  # no template has it


def write_self_prompts(
    target: PreTrainedModel, tokenizer: Any, out: Path, count: int, settings: AnswerSettings, temperature: float = 1.0
) -> Path:
    """Have the target write user turns until `out` has `count` different ones.

    Args:
        target: Instruction-tuned.
        tokenizer: Its tokenizer, with a chat template.
        out: Lines `{"prompt": text}`; an existing file is added to.
        count: Turns wanted.
        settings: Batch size, seed, longest prompt and template variables.
        temperature: Of the sampling.

    Returns:
        `out`.

    Raises:
        DataError: There is no chat template, it does not show the user's text, or the target repeats itself.
    """
    if count < 1:
        raise DataError(f"The target can write 1 user turn or more itself, got {count}.")
    before, after = _frame(tokenizer, settings)
    ends = eos_ids(target) | after
    seen = dict.fromkeys(_read(out))
    failures = 0
    out.parent.mkdir(parents=True, exist_ok=True)
    with (
        out.open("a", encoding="utf-8") as file,
        WorkProgress("Writing prompts", count, unit="prompts", done=min(len(seen), count)) as work,
    ):
        while len(seen) < count:
            rows = continue_prompts(
                target,
                [before] * settings.batch_size,
                temperature=temperature,
                max_new_tokens=min(_LONGEST, settings.max_prompt_tokens),
                seed=mix(settings.seed, _SELF, len(seen), failures),
                ends=ends,
            )
            texts = [_text(row, tokenizer, ends) for row in rows]
            new = [text for text in dict.fromkeys(texts) if text and text not in seen][: count - len(seen)]
            seen.update(dict.fromkeys(new))
            file.write("".join(json.dumps({"prompt": text}, ensure_ascii=False) + "\n" for text in new))
            file.flush()
            work.advance(len(new))
            failures = 0 if new else failures + 1
            if failures == _PATIENCE:
                raise DataError(
                    f"The target wrote {len(seen)} different user turns and then none in {_PATIENCE} batches of "
                    f"{settings.batch_size}. Ask for fewer, or give prompts of your own."
                )
    return out


def _frame(tokenizer: Any, settings: AnswerSettings) -> tuple[list[int], set[int]]:
    """Ids of the template before the user's text, and the special token that follows it, if one does."""
    require_template(tokenizer)
    shown = tokenizer.apply_chat_template(
        [{"role": "user", "content": _MARK}],
        add_generation_prompt=True,
        tokenize=False,
        **(settings.template_args or {}),
    )
    before, mark, after = shown.partition(_MARK)
    ids = tokenizer(before, add_special_tokens=False).input_ids
    if not mark or not ids:
        raise DataError(
            f"The chat template of {type(tokenizer).__name__} has no text in front of the user's that the target "
            "could go on from. Give prompts of your own."
        )
    follows = tokenizer(after, add_special_tokens=False).input_ids[:1]
    return list(ids), {token for token in follows if token in tokenizer.all_special_ids}


def _text(row: list[int], tokenizer: Any, ends: set[int]) -> str:
    """The turn, or nothing if it did not end."""
    return tokenizer.decode(row[:-1], skip_special_tokens=True).strip() if row and row[-1] in ends else ""


def _read(path: Path) -> list[str]:
    """Turns in the file; a last line without its line break is cut off the file."""
    if not path.exists():
        return []
    lines, _ = whole_lines(path)
    try:
        return [json.loads(line)["prompt"] for line in lines.decode("utf-8").split("\n")[:-1]]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise DataError(f"{path} is not a file of prompts the target wrote ({error!r}). Use another name.") from error


__all__ = ["write_self_prompts"]
