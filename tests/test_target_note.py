"""The note on the target: its hashes move with the weights and with nothing else, and nothing private is in it.

Catches: false alarms after a dtype cast, a reload, a device move or padding; silence about a changed weight; local
paths and template text in a published config.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from dspark import DSparkDrafter
from dspark.pairing import check_pair, draft_vocab_hash, fingerprint
from dspark.target_note import hash_rows

from .test_pairing import FAMILIES, drafter, gpt2, llama, tokenizer


def hashes(note: dict[str, Any]) -> list[Any]:
    return [note["embedding_hash"], note["lm_head_hash"], note["layer_hashes"]]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_fingerprint_survives_dtype_casts_and_files(family: str, tmp_path: Any) -> None:
    target = FAMILIES[family]().to(torch.bfloat16)
    note = fingerprint(target)
    assert None not in hashes(note)
    assert (note["embedding_hash"] == note["lm_head_hash"]) == (family in ("gemma3", "gpt2"))  # tied there
    target.save_pretrained(tmp_path)
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        reloaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        assert fingerprint(reloaded) == note, dtype
    full = FAMILIES[family]()
    assert hashes(fingerprint(copy.deepcopy(full).to(torch.bfloat16))) == hashes(fingerprint(full))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_the_fingerprint_survives_a_device_move() -> None:
    target = llama()
    assert fingerprint(copy.deepcopy(target).to("cuda")) == fingerprint(target)


def test_the_fingerprint_sees_changes_that_pytorch_does_not_count() -> None:
    target = llama()
    before = fingerprint(target)
    target.lm_head.weight.data.mul_(1.1)
    assert fingerprint(target)["lm_head_hash"] != before["lm_head_hash"]


def test_the_note_is_json_and_holds_nothing_private(tmp_path: Any) -> None:
    secret = tmp_path / "secret-model"
    llama().save_pretrained(secret)
    note = fingerprint(AutoModelForCausalLM.from_pretrained(secret), tokenizer=tokenizer("The fox", template="hush"))
    text = json.dumps(note)
    assert not any(word in text for word in ("secret", "hush", "/", "\\"))
    assert note["name"] is None
    target = llama()
    target.config._name_or_path = "org/model"
    assert fingerprint(target)["name"] == "org/model"
    assert fingerprint(target, name="org/other")["name"] == "org/other"
    for path in ("/home/me/model", "./model", "~/model", "a/b/c", "C:\\models\\x", str(tmp_path), ""):
        target.config._name_or_path = path
        assert fingerprint(target)["name"] is None, path
    draft = drafter(target=note)
    draft.save_pretrained(tmp_path / "draft")
    assert DSparkDrafter.from_pretrained(tmp_path / "draft").config.target == note


def test_what_cannot_be_read_is_none() -> None:
    class Packed(nn.Module):
        in_features, out_features = 64, 128

    target = llama()
    target.lm_head = Packed()
    note = fingerprint(target)
    assert note["lm_head_hash"] is None
    assert note["embedding_hash"] is not None
    assert check_pair(target, drafter(target=fingerprint(llama()))) != []  # still sees the rest
    with torch.device("meta"):
        assert hashes(fingerprint(llama())) == [None, None, None]
    assert hash_rows(torch.zeros(4, 4, dtype=torch.int8)) is None
    assert fingerprint(gpt2())["rope_type"] is None
    assert draft_vocab_hash(drafter()) is None


def test_padding_the_vocabulary_keeps_the_embedding_hash() -> None:
    target = llama()
    before = fingerprint(target)["embedding_hash"]
    target.resize_token_embeddings(132, mean_resizing=False)
    assert fingerprint(target)["embedding_hash"] == before
