"""How a drafter came to be, from the `training.json` beside it: data, steps, loss, the command."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from ..evaluation.markdown import table

# Shown of a stage, by the key it has in a record of several stages.
_COLUMNS = {
    "stage": "stage", "sequences": "sequences", "answer_tokens": "answer tokens", "steps": "steps",
    "learning_rate": "learning rate", "schedule": "schedule",
}  # fmt: skip
_LOSS = {"ce": "cross-entropy", "l1": "L1", "confidence": "confidence"}


def recipe_section(path: Path) -> str:
    """Markdown of a `training.json`, of `dspark train` or of several stages (`stages`: a list); empty: there is none.

    Raises:
        ValueError: It is not such a file.
    """
    if not path.is_file():
        return ""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        stages = told.get("stages") or [_stage(told)]
        return "\n\n".join(part for part in (_table(stages), _sentences(told, stages), _commands(stages)) if part)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is not what `dspark train` writes ({error!r}). Leave it out of the folder, or put it right."
        ) from error


def _stage(told: dict[str, Any]) -> dict[str, Any]:
    """A run of `dspark train` as one stage."""
    config, data = told["request"]["config"], told["data"]
    return {
        "sequences": data["used"],
        "answer_tokens": data["supervised_tokens"],
        "steps": told["steps"],
        "learning_rate": config["learning_rate"],
        "schedule": str(config["lr_scheduler_type"]).removeprefix("SchedulerType.").lower().replace("_", " "),
        "batch_size": config["per_device_train_batch_size"],
        "anchors_per_sequence": config["num_anchors"],
        "objective": {name: config[name] for name in _LOSS},
        "command": told["command"],
    }


def _table(stages: list[dict[str, Any]]) -> str:
    shown = [key for key in _COLUMNS if any(key in stage for stage in stages)]
    rows = [[_plain(stage.get(key)) for key in shown] for stage in stages]
    return "\n".join(table([_COLUMNS[key] for key in shown], rows))


def _sentences(told: dict[str, Any], stages: list[dict[str, Any]]) -> str:
    last = stages[-1]
    loss = last.get("objective") or {}
    parts = [
        ("Loss: " + ", ".join(f"{loss[key]:g} {name}" for key, name in _LOSS.items() if key in loss)) if loss else "",
        f"{last['anchors_per_sequence']} anchors per sequence" if "anchors_per_sequence" in last else "",
        f"{last['batch_size']} sequences per step" if "batch_size" in last else "",
        str(told.get("hardware") or ""),
    ]
    return "; ".join(part for part in parts if part) + ("." if any(parts) else "")


def _commands(stages: list[dict[str, Any]]) -> str:
    """Commands as they were typed, local folders by their last part."""
    lines = [_typed(stage["command"]) for stage in stages if stage.get("command")]
    return "\n".join(["```bash", *lines, "```"]) if lines else ""


def _typed(command: list[str] | str) -> str:
    words = shlex.split(command) if isinstance(command, str) else command
    return shlex.join(Path(word).name if word.startswith(("/", "~")) else word for word in words)


def _plain(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


__all__ = ["recipe_section"]
