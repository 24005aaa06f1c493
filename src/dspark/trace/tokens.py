"""What a token looks like: its piece of text from the tokenizer, and a form of that piece that shows every character.

A token of a byte-level vocabulary may be a part of a character, which is no text: its bytes are written as escapes.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # sentencepiece's fallback
_JOINERS = "\N{ZERO WIDTH NON-JOINER}\N{ZERO WIDTH JOINER}"  # parts of words and emoji, seen by what they do
_LINE_BREAK = "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}"
_SIGNS = {"\n": _LINE_BREAK, "\t": "\N{RIGHTWARDS ARROW TO BAR}"}
_UNSEEN = ("Cc", "Cf", "Zl", "Zp", "Co", "Cs")  # Unicode categories without a shape of their own


def token_texts(tokenizer: Any, token_ids: Iterable[int]) -> dict[int, str]:
    """Each id's piece of text, as it stands behind other text (a leading space is kept).

    Args:
        tokenizer: Of transformers.
        token_ids: Any ids; one the tokenizer has no entry for becomes the empty text.
    """
    before = tokenizer.encode("a", add_special_tokens=False)[-1:]
    return {token: _text(tokenizer, token, before) for token in sorted(set(token_ids))}


def _text(tokenizer: Any, token: int, before: list[int]) -> str:
    """Decoded behind another token: alone, some tokenizers drop its leading space."""
    raw = tokenizer.convert_ids_to_tokens(token)
    if raw is None:
        return ""
    known = _decode(tokenizer, before)
    text = _decode(tokenizer, [*before, token])
    piece = text[len(known) :] if text.startswith(known) else _decode(tokenizer, [token])
    data = _bytes(raw) if _REPLACEMENT in piece else None
    return piece if data is None else data.decode("utf-8", errors="backslashreplace")


def _decode(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _bytes(raw: str) -> bytes | None:
    """The bytes behind a vocabulary entry, where it spells bytes; None where it does not."""
    if match := _BYTE_TOKEN.fullmatch(raw):
        return bytes([int(match[1], 16)])
    alphabet = _byte_alphabet()
    return bytes(alphabet[c] for c in raw) if all(c in alphabet for c in raw) else None


@lru_cache
def _byte_alphabet() -> dict[str, int]:
    """GPT-2's: printable Latin-1 bytes are themselves, the others follow from U+0100 on in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def shown(text: str, token_id: int) -> str:
    """A token's text with nothing unseen: line breaks and tabs as signs, other controls as escapes, an id if empty."""
    if not text:
        return f"\N{MATHEMATICAL LEFT ANGLE BRACKET}{token_id}\N{MATHEMATICAL RIGHT ANGLE BRACKET}"
    return "".join(map(_seen, text))


def laid_out(text: str, token_id: int) -> str:
    """As `shown`, with the line breaks behind their signs."""
    if not text:
        return shown(text, token_id)
    return f"{_LINE_BREAK}\n".join("".join(map(_seen, line)) for line in text.split("\n"))


def _seen(character: str) -> str:
    if character in _SIGNS:
        return _SIGNS[character]
    if unicodedata.category(character) in _UNSEEN and character not in _JOINERS:
        return f"\\u{{{ord(character):x}}}"
    return character


__all__ = ["laid_out", "shown", "token_texts"]
