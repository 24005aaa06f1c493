"""Prompts of thousands of tokens: the same text, exact positions, and rounds whose own work does not grow with them.

Catches: positions that drift or are rounded, a copy of context, text or states per round, masks of full size where
none is needed, a buffer made anew every round.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dspark.decoding import loop
from dspark.decoding.state import DecodingRun
from tests import zoo
from tests.decoding.equality import left_padded, plain
from tests.scripted import CYCLE, Oracle

NAMES = ["Llama", "Gemma 3"]
NEW = 30
_FEWER_THAN_KEYS = 256  # no head is as wide as a context here


def verified_positions(model: Any, **call: Any) -> tuple[list[list[int]], torch.Tensor]:
    """Positions of every verification pass, and the sequences."""
    seen: list[list[int]] = []

    def hook(module: Any, args: Any, inputs: dict[str, Any]) -> None:
        if inputs["position_ids"].shape[-1] <= 8:
            seen.append(inputs["position_ids"][0].tolist())

    handle = model.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        found = plain(model, NEW, **call)
    finally:
        handle.remove()
    return seen, found


@lru_cache
def plain_text(name: str, length: int, chunk: int | None) -> list[int]:
    """The text behind a prompt of this length."""
    call = {"input_ids": zoo.prompt(length), "prefill_chunk_size": chunk}
    return plain(zoo.target(name), NEW, **call)[0].tolist()


def check_long_prompt(name: str, length: int, window: int | None, chunk: int | None) -> None:
    model, ids = zoo.target(name), zoo.prompt(length)
    text = plain_text(name, length, chunk)
    oracle = Oracle(model, [text], CYCLE).eval()
    call = {"input_ids": ids, "prefill_chunk_size": chunk, "context_window": window}
    passes, found = verified_positions(model, assistant_model=oracle, **call)
    assert found[0].tolist() == text
    anchor = length
    for positions, accepted in zip(passes, oracle.last_stats.accepted, strict=True):
        assert positions == list(range(anchor, anchor + len(positions)))
        anchor += accepted + 1
    assert sum(oracle.last_stats.accepted) > NEW // 2


@pytest.mark.parametrize(
    ("name", "window", "chunk"),
    [
        ("Llama", None, None), ("Llama", None, 1024), ("Llama", 100, None), ("Llama", 1024, 1000),
        ("Gemma 3", None, 1000), ("Gemma 3", 100, None),
    ],
)  # fmt: skip
def test_a_prompt_of_8k_tokens(name: str, window: int | None, chunk: int | None) -> None:
    check_long_prompt(name, 8192, window, chunk)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 4096])
def test_a_prompt_of_32k_tokens(window: int | None) -> None:
    check_long_prompt("Llama", 32768, window, 4096)


class Work(NamedTuple):
    """What a round allocates.

    Attributes:
        operations: Operations on tensors.
        numbers: Bytes of floating-point tensors outside attention layers, additive masks left out.
        masks: Bytes of everything else outside attention layers: ids, positions, masks.
        drafting: Bytes inside the drafter's attention layers.
    """

    operations: int
    numbers: int
    masks: int
    drafting: int


class Meter(TorchDispatchMode):
    """Counts the bytes of every new storage by the attention layer it is made in."""

    def __init__(self, model: torch.nn.Module, drafter: torch.nn.Module) -> None:
        super().__init__()
        self.operations, self.layer, self.bytes = 0, "", {}
        for owner, module in (("target", model), ("drafter", drafter)):
            for part in module.modules():
                if type(part).__name__.endswith("Attention"):
                    part.register_forward_pre_hook(lambda *_, owner=owner: setattr(self, "layer", owner))
                    part.register_forward_hook(lambda *_: setattr(self, "layer", ""))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        known = {t.untyped_storage().data_ptr() for t in tensors}
        result = function(*args, **(kwargs or {}))
        self.operations += 1
        for made in tree_leaves(result):
            if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in known:
                is_mask = made.dim() == 4 and made.shape[1] == 1 and made.shape[-1] > _FEWER_THAN_KEYS
                kind = self.layer or ("numbers" if made.is_floating_point() and not is_mask else "masks")
                self.bytes[kind] = self.bytes.get(kind, 0) + made.untyped_storage().nbytes()
        return result


def work_of_a_round(name: str, length: int, rows: int, window: int | None, monkeypatch: pytest.MonkeyPatch) -> Work:
    """Of the third round behind prompts of about `length` tokens; by then all buffers are there."""
    model = zoo.new_target(name)
    prompts = [zoo.prompt(length - 5 * row) for row in range(rows)]
    call = left_padded(*prompts)
    sequences = plain(model, 20, **call).tolist()
    texts = [row[-prompt.shape[1] - 20 :] for row, prompt in zip(sequences, prompts, strict=True)]
    drafter = Oracle(model, texts, [[0], [2], [4]][:rows]).eval()  # rows go on at different speeds
    meter, rounds = Meter(model, drafter), []
    decode_round = loop.decode_round

    def metered(run: DecodingRun) -> None:
        rounds.append(1)
        if len(rounds) != 3:
            decode_round(run)
            return
        with meter:
            decode_round(run)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "decode_round", metered)
        plain(model, 20, assistant_model=drafter, context_window=window, **call)
    assert len(rounds) >= 3
    found = meter.bytes
    return Work(meter.operations, found["numbers"], found["masks"], found["drafter"])


@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_a_round_allocates_the_same_behind_any_context(
    name: str, rows: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outside attention only masks grow: some bytes per key, row and draft. A window bounds drafting too."""
    short, long = (work_of_a_round(name, length, rows, window, monkeypatch) for length in (512, 2048))
    assert long.operations == short.operations
    assert long.numbers == short.numbers
    assert long.masks - short.masks <= 128 * rows * (2048 - 512)
    if window is not None:
        assert long.drafting == short.drafting
