"""A tiny target with a tokenizer and a chat template, prompts for it, and the commands that use them."""

from __future__ import annotations

import json
from pathlib import Path

import typer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from dspark.cli.data import data
from dspark.cli.train import train
from tests.training import tiny

app = typer.Typer()
app.command()(data)
app.command()(train)

WORDS = [f"w{i}" for i in range(89)]
SPECIAL = ["<unk>", "<bos>", "<eos>", "<pad>", "<user>", "<model>", "<spare>"]


def target(folder: Path) -> Path:
    """Folder of a target whose vocabulary is spelled out; it ends its texts now and then."""
    vocab = {word: i for i, word in enumerate([*SPECIAL, *WORDS])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<bos>", eos_token="<eos>", pad_token="<pad>",
        additional_special_tokens=["<user>", "<model>", "<spare>"],
    )  # fmt: skip
    tokenizer.chat_template = (
        "{% for m in messages %}<user> {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}<model>{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    model = tiny.llama(vocab_size=len(vocab), bos_token_id=1, eos_token_id=2, pad_token_id=3)
    model.generation_config.update(do_sample=True, top_k=1)  # defaults that must not reach the answers
    model.save_pretrained(folder)
    return folder


def run(*words) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def prompt_file(folder: Path, name: str = "ask", count: int = 6, offset: int = 0) -> Path:
    path = folder / f"{name}.jsonl"
    lines = [{"turns": [" ".join(WORDS[(i + offset) % 89 : (i + offset) % 89 + 3]), "more"]} for i in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]
