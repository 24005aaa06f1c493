"""Plain and drafted greedy runs of the same call, side by side."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.scripted import CYCLE, Oracle


def plain(model: PreTrainedModel, new: int, **kwargs: Any) -> torch.Tensor:
    """Ids of a greedy run, `[B, n]`."""
    return model.generate(do_sample=False, max_new_tokens=new, **kwargs)


def assert_same_text(
    model: PreTrainedModel, prompt_ids: torch.Tensor, new: int, *, wrong: Any = CYCLE, **kwargs: Any
) -> Oracle:
    """`generate(**kwargs)` with an oracle gives the ids of a plain run; returns the oracle.

    Args:
        model: Target.
        prompt_ids: int64 `[1, P]`, the prompt without padding, however the call gives it.
        new: Tokens to generate.
        wrong: See `Oracle`.
        kwargs: The call; a cache in it is copied for the plain run.
    """
    expected = plain(model, new, **copy.deepcopy(kwargs))
    oracle = Oracle(model, [prompt_ids[0].tolist() + expected[0, -new:].tolist()], wrong)
    found = plain(model, new, assistant_model=oracle, **kwargs)
    assert found.tolist() == expected.tolist()
    assert sum(oracle.last_stats.accepted) > 0
    return oracle


def left_padded(*prompts: torch.Tensor, width: int | None = None) -> dict[str, torch.Tensor]:
    """Prompts `[1, P_b]` as one left-padded batch with its mask."""
    width = width or max(ids.shape[1] for ids in prompts)
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - prompt.shape[1] :] = prompt[0]
        mask[row, width - prompt.shape[1] :] = 1
    return {"input_ids": ids, "attention_mask": mask}


@contextmanager
def refused(model: PreTrainedModel, *parts: str) -> Iterator[None]:
    """The body raises ValueError with all `parts` in its message, before the target has run."""
    passes = []
    handle = model.register_forward_pre_hook(lambda *_: passes.append(1))
    try:
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is looked at below
            yield
    finally:
        handle.remove()
    assert not passes, "the target ran before the refusal"
    for part in parts:
        assert part in str(caught.value)


__all__ = ["assert_same_text", "left_padded", "plain", "refused"]
