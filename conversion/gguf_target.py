"""What a drafter's GGUF file takes from its target: the vocabulary, and what it does to embeddings and positions.

llama.cpp looks the mask token up in the drafter's vocabulary and counts rows of tables by it, so the whole of it is
stored: copied from the target's GGUF file, or made from a byte-level BPE tokenizer as llama.cpp's own converter does.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer
from transformers.utils import cached_file

from .checkpoint import find_gguf
from .gguf_file import gguf_package, gguf_reader

_TOKENS, _TYPES, _SCORES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.scores"
_PER_TOKEN = (_TOKENS, _TYPES, _SCORES)
_LOOKS_SPECIAL = (("<|", "|>"), ("<\uff5c", "\uff5c>"), ("<unused", ">"))
_SPECIAL = ("<pad>", "<mask>", "<2mass>", "[@BOS@]")


@dataclass
class GgufTarget:
    """What a file takes from the target.

    Attributes:
        keys: `tokenizer.*` key to value, GGUF type and, for arrays, type of the elements.
        embedding_factor: What the target multiplies its embeddings by.
        has_sections: Whether its positions have sections (time, height, width).
    """

    keys: dict[str, tuple[Any, Any, Any]]
    embedding_factor: float
    has_sections: bool

    @property
    def num_tokens(self) -> int:
        """Tokens of the vocabulary."""
        return len(self.keys[_TOKENS][0])

    def padded(self, rows: int | None) -> dict[str, tuple[Any, Any, Any]]:
        """The keys with a vocabulary of `rows` tokens: targets have rows that no token uses.

        Raises:
            ValueError: There are more tokens than rows.
        """
        if rows is None or rows == self.num_tokens:
            return self.keys
        if rows < self.num_tokens:
            raise ValueError(
                f"The target has {self.num_tokens} tokens, and the drafter was made for a vocabulary of {rows} "
                "(`vocab_size`): it belongs to another target. Pass the one it was trained for."
            )
        unused = gguf_package("The drafter to be written").TokenType.UNUSED
        extra = range(self.num_tokens, rows)
        fill = {_TOKENS: [f"[PAD{i}]" for i in extra], _TYPES: [int(unused)] * len(extra), _SCORES: [0.0] * len(extra)}
        return {
            key: (([*value, *fill[key]] if key in _PER_TOKEN else value), kind, element)
            for key, (value, kind, element) in self.keys.items()
        }


def read_target(source: str | os.PathLike[str]) -> GgufTarget:
    """Vocabulary and properties of a target.

    Args:
        source: Its GGUF file, a folder with one, or a folder or Hub id with tokenizer.json and config.json.

    Raises:
        ValueError: There is no vocabulary, or it is not byte-level BPE and so only its GGUF file has it as llama.cpp
            wants it.
        ImportError: The package `gguf` is not installed.
        OSError: A file is missing or damaged.
    """
    path = Path(source).expanduser()
    path = path if path.exists() else _fetched(str(source))
    has_tokenizer = (path / "tokenizer.json").is_file()
    found = find_gguf(path, None, has_config=has_tokenizer)
    if found is not None:
        return _from_gguf(found)
    if not has_tokenizer:
        raise ValueError(f"{source} holds neither a GGUF file nor a tokenizer.json. Pass the target's GGUF file.")
    return _from_folder(path)


def _fetched(source: str) -> Path:
    """Folder of a Hub repository's tokenizer and config.

    Raises:
        OSError: There is no such repository or file, or the Hub cannot be reached.
    """
    wanted = ("tokenizer.json", "config.json", "tokenizer_config.json")
    found = [cached_file(source, name, _raise_exceptions_for_missing_entries=name != wanted[2]) for name in wanted]
    return Path(str(found[0])).parent


def _from_gguf(path: str) -> GgufTarget:
    gguf = gguf_package(path)
    fields = gguf_reader(path).fields
    array = gguf.GGUFValueType.ARRAY
    keys = {
        name: (part.contents(), part.types[0], part.types[-1] if part.types[0] == array else None)
        for name, part in fields.items()
        if name.startswith("tokenizer.")
    }
    if _TOKENS not in keys:
        raise ValueError(f"{path} has no {_TOKENS}: it is no model with a vocabulary. Pass the target's GGUF file.")

    def value(key: str) -> Any:
        return fields[key].contents() if key in fields else None

    kind = value("general.architecture")
    factor = value(f"{kind}.embedding_scale") or _gemma_factor(kind, value(f"{kind}.embedding_length"))
    return GgufTarget(keys, float(factor), value(f"{kind}.rope.dimension_sections") is not None)


def _gemma_factor(kind: str, width: int) -> float:
    return width**0.5 if kind.startswith("gemma") else 1.0


def _from_folder(path: Path) -> GgufTarget:
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config") or config
    factor = text.get("embedding_multiplier") or text.get("scale_emb")
    factor = factor or _gemma_factor(str(text.get("model_type")), text.get("hidden_size") or 1)
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    return GgufTarget(dict(_tokenizer_keys(path)), float(factor), "mrope_section" in rope)


def _tokenizer_keys(path: Path) -> Iterator[tuple[str, tuple[Any, Any, Any]]]:
    """Keys of a byte-level BPE tokenizer.

    The name of its pre-tokenizer, which only a table inside llama.cpp's converter knows, is left at the default: the
    drafter's file never splits a text.
    """
    stored = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    steps = json.dumps([stored.get("pre_tokenizer"), stored.get("decoder")])
    if stored["model"].get("type") != "BPE" or "ByteLevel" not in steps:
        raise ValueError(
            f"The tokenizer of {path} is {stored['model'].get('type')} without byte-level steps; llama.cpp's form of "
            "it is only in the target's GGUF file. Pass that file as the target."
        )
    gguf = gguf_package("The drafter to be written")
    kinds = gguf.GGUFValueType
    tokens, types = _tokens(AutoTokenizer.from_pretrained(path), gguf.TokenType)
    yield "tokenizer.ggml.model", ("gpt2", kinds.STRING, None)
    yield "tokenizer.ggml.pre", ("default", kinds.STRING, None)
    yield _TOKENS, (tokens, kinds.ARRAY, kinds.STRING)
    yield _TYPES, (types, kinds.ARRAY, kinds.INT32)
    special = gguf.SpecialVocab(path, load_merges=True)
    yield "tokenizer.ggml.merges", (special.merges, kinds.ARRAY, kinds.STRING)
    for kind, token in special.special_token_ids.items():
        yield getattr(gguf.Keys.Tokenizer, f"{kind.upper()}_ID"), (token, kinds.UINT32, None)
    for kind, added in special.add_special_token.items():
        yield getattr(gguf.Keys.Tokenizer, f"ADD_{kind.upper()}"), (added, kinds.BOOL, None)
    if isinstance(special.chat_template, str):
        yield "tokenizer.chat_template", (special.chat_template, kinds.STRING, None)


def _tokens(tokenizer: Any, kinds: Any) -> tuple[list[str], list[int]]:
    """Texts and types of tokens, by id."""
    names = {token: text for text, token in tokenizer.get_vocab().items()}
    added = tokenizer.added_tokens_decoder
    tokens, types = [], []
    for token in range(max(names) + 1):
        text = names.get(token)
        if text is None:
            text, kind = f"[PAD{token}]", kinds.UNUSED
        elif token not in added:
            kind = kinds.NORMAL
        else:
            is_special = added[token].special or text in _SPECIAL
            is_special = is_special or any(text.startswith(a) and text.endswith(b) for a, b in _LOOKS_SPECIAL)
            kind = kinds.CONTROL if is_special else kinds.USER_DEFINED
        tokens.append(text)
        types.append(int(kind))
    return tokens, types


__all__ = ["GgufTarget", "read_target"]
