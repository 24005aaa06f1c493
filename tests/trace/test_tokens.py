"""Token texts: pieces as they stand in a text, parts of characters as bytes, nothing unseen."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dspark.trace.tokens import laid_out, shown, token_texts


def byte_level() -> PreTrainedTokenizerFast:
    """One token per byte, and one word."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: i for i, piece in enumerate(["<eos>", *alphabet, "Ġt", "Ġth"])}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[("Ġ", "t"), ("Ġt", "h")]))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>")


def sentencepiece() -> PreTrainedTokenizerFast:
    """Metaspace pieces and byte fallback, as Llama 2's; it drops the first space of what it decodes."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁the", "s"]
    raw = Tokenizer(
        models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", eos_token="</s>")


def texts_of(tokenizer: Any, *pieces: str) -> list[str]:
    ids = tokenizer.convert_tokens_to_ids(list(pieces))
    found = token_texts(tokenizer, ids)
    return [found[token] for token in ids]


def test_byte_level_pieces() -> None:
    assert texts_of(byte_level(), "Ġth", "Ġ", "Ċ", "a", "<eos>") == [" th", " ", "\n", "a", "<eos>"]


def test_half_a_character_is_its_bytes() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("€", add_special_tokens=False)
    assert [token_texts(tokenizer, [token])[token] for token in ids] == ["\\xe2", "\\x82", "\\xac"]


def test_sentencepiece_keeps_its_spaces_and_spells_its_bytes() -> None:
    got = texts_of(sentencepiece(), "▁the", "s", "<0xE2>", "<0x0A>", "</s>")
    assert got == [" the", "s", "\\xe2", "\n", "</s>"]


def test_a_replacement_character_of_the_text_itself_stays() -> None:
    raw = Tokenizer(models.WordLevel({"\ufffd": 0, "a": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="[UNK]")
    assert token_texts(tokenizer, [0])[0].strip() == "\ufffd"


def test_an_id_without_an_entry_is_empty() -> None:
    assert token_texts(byte_level(), [9999]) == {9999: ""}


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("", "⟨7⟩"),
        (" a b", " a b"),
        ("\n", "↵"),
        ("a\tb", "a⇥b"),
        ("\x1b[31m", "\\u{1b}[31m"),
        ("\u202eabc", "\\u{202e}abc"),
        ("\u2028", "\\u{2028}"),
        ("\r", "\\u{d}"),
        ("👩\u200d🚀", "👩\u200d🚀"),
        ("<b>&", "<b>&"),
    ],
)
def test_nothing_unseen_is_shown(text: str, want: str) -> None:
    assert shown(text, 7) == want


@pytest.mark.parametrize(
    ("text", "want"),
    [("", "⟨7⟩"), ("\n", "↵\n"), ("a\n\nb", "a↵\n↵\nb"), ("ab", "ab"), ("↵", "↵"), ("\x00\n", "\\u{0}↵\n")],
)
def test_line_breaks_are_seen_and_kept(text: str, want: str) -> None:
    assert laid_out(text, 7) == want
