"""Every kind of drafter into every format that is written, and from each of those into each other.

Either all of it comes back (settings, tensors, drafts), or the conversion is refused and names the field. Catches: a
field that falls to a default on the way, a shift applied once or twice, a format whose limits nobody wrote down.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from dspark.conversion import FORMATS, SEMANTIC_FIELDS, WRITERS, Record, convert

from dspark import DSparkDrafter
from dspark.hub import read_record
from tests import small
from tests.conversion import peers, toys

SEVERAL = [name for name in WRITERS if not WRITERS[name].suffix]
ELSEWHERE = {"gguf-dflash": "test_gguf_writer.py"}  # formats of one file with numbers of their own
_WINDOWS = {
    "windows from anchor": "attention_windows", "windows from anchor, both ways": "attention_windows",
    "windows per slot": "attention_windows", "windows per slot, dflash": "attention_windows",
    "windows over all": "attention_windows", "windows both ways, dflash": "attention_windows",
    "two windows": "attention_windows", "causal": "causal_in_block",
}  # fmt: skip
_QWEN3 = {
    "fc bias": "fc_bias", "llama": "family", "scaled embedding": "embed_scale", "scaled logits": "logit_scale",
    "soft cap": "final_logit_softcapping", "no confidence bias": "confidence_head_bias",
}  # fmt: skip
_SILENT = dict.fromkeys(
    (kind for kind, fields in toys.KINDS.items() if fields.get("sample_from_anchor") is False), "sample_from_anchor"
)
_REDUCED = dict.fromkeys((kind for kind in toys.KINDS if "reduced" in kind), "draft_vocab_size")
_HEADS = dict.fromkeys((kind for kind in toys.KINDS if "gated" in kind or "rnn" in kind), "markov_head_type")
_OWN = {"own tables": "has_embed", "own tables, dflash": "has_embed"}
_RANK_0 = {
    "rank 0": "markov_rank", "rank 0, confidence": "markov_rank", "rank 0, confidence, silent anchor": "markov_rank",
}  # fmt: skip
_TAP, _NARROW, _GELU = {"embedding tap": "target_layer_ids"}, {"narrow": "target_hidden_size"}, {"gelu": "hidden_act"}
_ALL = dict.fromkeys(toys.KINDS, "")


def _without(*parts: str) -> dict[str, str]:
    return {kind: field for kind, field in _WINDOWS.items() if kind not in parts}


# Kind of drafter to the field each format refuses it for; what is not here goes through.
REFUSED: dict[str, dict[str, str]] = {
    "dspark": {},
    "deepspec": {**_WINDOWS, **_QWEN3, **_REDUCED, **_SILENT, **_NARROW},
    "speculators": {
        **_QWEN3, **_NARROW, **_without("windows from anchor", "windows from anchor, both ways"),
        "windows per slot": "window_rule", "windows per slot, dflash": "window_rule",
        "windows over all": "window_rule", "windows both ways, dflash": "window_rule",
    },
    "specforge": {
        **_QWEN3, **_NARROW, **_TAP, **_REDUCED, **_SILENT, **_OWN,
        **_without("windows per slot", "windows per slot, dflash"),
        "windows from anchor": "window_rule", "windows from anchor, both ways": "causal_in_block",
        "windows over all": "window_rule", "windows both ways, dflash": "window_rule",
    },
    "vllm": {**_WINDOWS, **_QWEN3, **_HEADS, **_RANK_0, **_GELU, "reduced dflash": "draft_vocab_size",
             "own tables, dflash": "has_embed"},
    "sglang": {**_WINDOWS, **_QWEN3, **_RANK_0, **_GELU, **_TAP, **_OWN, **_NARROW,
               "reduced dflash": "draft_vocab_size"},
    "tensorrt-llm": {**_WINDOWS, **_QWEN3, **_HEADS, **_RANK_0, **_GELU, **_TAP, **_NARROW, **_REDUCED, **_SILENT},
    "mlx-dspark": {**_WINDOWS, **_QWEN3, **_HEADS, **_GELU, **_TAP, **_NARROW, "yarn": "rope_parameters"},
    "muse": {
        **dict.fromkeys(toys.KINDS, "sample_from_anchor"), **_HEADS, **_QWEN3,
        "no confidence bias": "sample_from_anchor",
        "rank 0, confidence, silent anchor": "enable_confidence_head", "vanilla, silent anchor": "markov_head_type",
        "reduced dflash": "draft_vocab_size", "own tables, dflash": "has_embed", "bias": "attention_bias",
        "windows per slot, dflash": "window_rule",
    },
}  # fmt: skip
# Without heads and with a silent anchor it is transformers' and SpecForge's DFlash.
for _format, _kinds in {"muse": ("dflash", "windows both ways, dflash"),
                        "specforge": ("dflash", "windows per slot, dflash")}.items():  # fmt: skip
    for _kind in _kinds:
        del REFUSED[_format][_kind]
REFUSED["specforge"] |= {"own tables, dflash": "has_embed", "reduced dflash": "draft_vocab_size"}
# Fields that a format has no place for; nothing is drafted by them.
LOST = {"target", "num_target_layers", "vocab_size", "initializer_range", "attention_dropout",
        "confidence_temperatures"}  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return toys.saved_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("toys")
    return {kind: toys.saved(kind, folder / kind) for kind in toys.KINDS}


def states(record: Record) -> tuple[torch.Tensor, torch.Tensor]:
    length, width = 12, len(record["target_layer_ids"]) * (record["target_hidden_size"] or record["hidden_size"])
    return torch.tensor([3, 41]), small.states(rows=2, length=length, width=width)


def drafts(folder: Path) -> Any:
    return toys.loaded(folder).draft(*states(read_record(folder)), target=small.target())


def said(record: Record, name: str) -> Any:
    """A field's value, the same however a layout says it."""
    if name == "target_hidden_size":
        return record[name] or record["hidden_size"]
    if name == "confidence_head_bias":
        return record[name] and record["enable_confidence_head"]
    return record[name]


def assert_same(before: Path, after: Path, *, lost: set[str] = LOST) -> None:
    one, other = read_record(before), read_record(after)
    for name in set(SEMANTIC_FIELDS) - lost - {"has_embed", "has_lm_head", "raw_target_embedding"}:
        assert said(one, name) == said(other, name), name
    for name in one.tensors.keys() & other.tensors.keys():
        assert torch.equal(one.tensors[name][...], other.tensors[name][...]), name
    tables = {"embed_tokens.weight", "lm_head.weight"}
    assert one.tensors.keys() - tables == other.tensors.keys() - tables
    was, now = drafts(before), drafts(after)
    assert torch.equal(was.token_ids, now.token_ids)
    assert torch.equal(was.logits, now.logits)
    assert (was.confidence_logits is None) == (now.confidence_logits is None)
    if was.confidence_logits is not None:
        assert torch.equal(was.confidence_logits, now.confidence_logits)


def test_every_format_is_met() -> None:
    assert set(WRITERS) == set(REFUSED) | set(ELSEWHERE)
    assert all((Path(__file__).parent / name).is_file() for name in ELSEWHERE.values())
    written = {name for writer in WRITERS.values() for name in writer.reads_as}
    assert written <= set(FORMATS)
    if len(peers.ALL) > 20:  # the whole set of what others wrote
        assert written | {read_record(peers.folder(name)).format for name in _peers()} == set(FORMATS)


@pytest.mark.parametrize("to", SEVERAL)
@pytest.mark.parametrize("kind", toys.KINDS)
def test_from_our_own(kind: str, to: str, sources, target, tmp_path) -> None:
    field = REFUSED[to].get(kind)
    if field is not None:
        with pytest.raises(ValueError, match=rf"cannot be written as {to}\. .*`{field}`"):
            convert(sources[kind], tmp_path / "out", to=to, target=target)
        assert os.listdir(tmp_path) == []
        return
    report = convert(sources[kind], tmp_path / "out", to=to, target=target, verify=True)
    assert read_record(tmp_path / "out").format in WRITERS[to].reads_as
    assert set(report.not_kept) <= LOST
    assert report.verification.logits == 0
    assert report.serve_command
    assert_same(sources[kind], tmp_path / "out")


PAIRS = ("vanilla", "gated", "rnn", "rank 0", "dflash", "vanilla, silent anchor", "rnn, silent anchor", "reduced",
         "reduced dflash", "windows from anchor", "windows per slot, dflash", "windows both ways, dflash",
         "own tables")  # fmt: skip


@pytest.fixture(scope="module")
def written(sources, target, tmp_path_factory) -> dict[tuple[str, str], Path]:
    """Each of these kinds in each format that holds it."""
    folder = tmp_path_factory.mktemp("written")
    found = {}
    for to in SEVERAL:
        for kind in PAIRS:
            if kind not in REFUSED[to]:
                found[to, kind] = folder / to / kind
                convert(sources[kind], found[to, kind], to=to, target=target)
    return found


@pytest.mark.parametrize("to", SEVERAL)
@pytest.mark.parametrize("start", SEVERAL)
def test_from_each_format_into_each(start: str, to: str, written, target, tmp_path) -> None:
    """The route over another format ends where the direct one does, files and all."""
    met = 0
    for kind in PAIRS:
        if (start, kind) not in written:
            continue
        met += 1
        place = tmp_path / kind
        # Copies that one format stores are the target's own, which the other then borrows.
        if kind in REFUSED[to]:
            with pytest.raises(ValueError, match=rf"`{REFUSED[to][kind]}`"):
                convert(written[start, kind], place, to=to, target=target)
            assert not place.exists()
            continue
        convert(written[start, kind], place, to=to, target=target)
        assert_same(written[start, kind], place)
        if start != "deepspec":  # which stores copies that others would have borrowed
            direct, route = (
                {name: tensor[...] for name, tensor in read_record(folder).tensors.items()}
                for folder in (written[to, kind], place)
            )
            assert direct.keys() == route.keys()
            assert all(torch.equal(direct[name], route[name]) for name in direct)
    assert met


def _peers() -> Iterator[str]:
    met = set()
    for name in peers.WITH_NUMBERS:
        kind = read_record(peers.folder(name)).format
        if kind not in met:
            met.add(kind)
            yield name


@pytest.mark.parametrize("name", list(_peers()))
def test_from_what_others_wrote(name: str, tmp_path) -> None:
    """Each format as its own framework writes it, through each of ours that takes it, drafts as before."""
    from tests.conftest import golden_root

    place = golden_root() / "targets" / "qwen3_a"
    tensors, done = peers.numbers(name), []
    for to in SEVERAL:
        refusal = ""
        try:
            convert(peers.folder(name), tmp_path / to, to=to, target=place)
        except ValueError as error:
            refusal = str(error)
        if refusal:
            assert f"cannot be written as {to}. {to}: `" in refusal
            continue
        model = DSparkDrafter.from_pretrained(tmp_path / to, dtype=torch.float32)
        out = model.draft(tensors["p0.anchor_id"], tensors["p0.context_hidden"][None], target=peers.target())
        assert torch.equal(out.token_ids[0], tensors["p0.greedy_tokens"]), to
        done.append(to)
    assert "dspark" in done
