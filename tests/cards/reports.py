"""Reports as `dspark eval` and `dspark demo` write them, taken with a tiny drafter."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from dspark.cli import app
from tests.cli import words
from tests.training import tiny

SETTINGS = (
    "--set",
    "gsm8k",
    "--limit",
    "1",
    "--max-new-tokens",
    "6",
    "--threads",
    "1",
    "--device",
    "cpu",
    "--no-pack",
)


def pair(folder: Path, make: Callable[..., Any] = tiny.llama) -> tuple[Path, Path]:
    """Folders of a tiny target (made by `make`) with a tokenizer and of a drafter for it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from dspark.training import new_drafter

    where = words.target(folder / "target")
    make(bos_token_id=1, eos_token_id=2, pad_token_id=3).save_pretrained(where)
    target, tokenizer = AutoModelForCausalLM.from_pretrained(where), AutoTokenizer.from_pretrained(where)
    drafter = new_drafter(target, tokenizer=tokenizer, target_name="some/target", **tiny.SHAPE)
    drafter.save_pretrained(folder / "my-drafter")
    return where, folder / "my-drafter"


def run(*what: Any) -> tuple[int, str]:
    """Exit code and output (stdout, then stderr) of `dspark` with these words."""
    result = CliRunner().invoke(app, [str(word) for word in what])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout + (result.stderr if result.exit_code else "")


def evaluated(target: Path, drafter: Path, out: Path, *more: Any) -> Path:
    """Folder of an evaluation."""
    code, told = run("eval", "--target", target, "--drafter", drafter, "--out", out, *SETTINGS, *more)
    assert code == 0, told
    return out


def demonstrated(target: Path, drafter: Path, out: Path) -> Path:
    """File of `dspark demo --json`."""
    models = ("--target", target, "--drafter", drafter)
    code, told = run("demo", *models, "--prompts", 1, "--max-new-tokens", 6, "--threads", 1, "--json")
    assert code == 0, told
    out.write_text(told)
    return out


def foreign(folder: Path) -> Path:
    """A JSON report of something else."""
    path = folder / "foreign.json"
    path.write_text(json.dumps({"what": "another tool", "score": 9.9}))
    return path
