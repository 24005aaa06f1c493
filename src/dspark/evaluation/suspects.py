"""What may be wrong with a drafter's settings: the drafter with one of them changed, for the doctor to try."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from transformers import PreTrainedModel

from ..modeling_dspark import DSparkDrafter
from ..target import text_config, unwrap


@dataclass
class Change:
    """A drafter to try, why, and how to make the change for good."""

    name: str
    advice: str
    drafter: Callable[[], DSparkDrafter]


def changes(target: PreTrainedModel, drafter: DSparkDrafter, tokenizer: Any = None) -> Iterator[Change]:
    """The drafter with one thing changed, for each suspect that applies to it."""
    config = drafter.config
    taps = list(config.target_layer_ids or ())
    count = text_config(unwrap(target)).num_hidden_layers
    for offset in (-1, 1):
        moved = [layer + offset for layer in taps]
        if min(moved) >= -1 and max(moved) < count - 1:  # the config refuses the last layer
            yield _configured(
                drafter,
                f"tapped layers {offset:+d}",
                f"the checkpoint counts layers differently: set `target_layer_ids` to {moved}",
                target_layer_ids=moved,
            )
    yield _configured(
        drafter,
        "anchor convention" + (" (slot 0 ignored)" if config.sample_from_anchor else " (slot 0 drafts)"),
        f"set `sample_from_anchor` to {not config.sample_from_anchor}",
        sample_from_anchor=not config.sample_from_anchor,
        confidence_temperatures=None,
    )
    rope = getattr(text_config(unwrap(target)), "rope_parameters", None)
    if rope and "rope_type" in rope and dict(rope) != dict(config.rope_parameters):
        yield _configured(
            drafter, "the target's rope", f"set `rope_parameters` to {dict(rope)}", rope_parameters=dict(rope)
        )
    if config.share_embedding is False and config.hidden_size:
        scale = 1.0 if config.embed_scale != 1.0 else config.hidden_size**0.5
        yield _configured(drafter, f"embedding scale {scale:g}", f"set `embed_scale` to {scale:g}", embed_scale=scale)
    for token in _mask_candidates(tokenizer, config):
        yield _configured(drafter, f"mask token {token}", f"set `mask_token_id` to {token}", mask_token_id=token)
    if drafter.draft_token_ids is not None and (shifted := _read_as_offsets(drafter)) is not None:
        yield Change(
            "draft vocabulary read as offsets",
            "the checkpoint stores offsets (d2t), not ids: add each column's index",
            lambda: _with_vocabulary(drafter, shifted),
        )
    if drafter.dtype != torch.float32:
        yield Change(
            "drafter in float32",
            f"{drafter.dtype} costs acceptance: load with dtype=torch.float32",
            lambda: deepcopy(drafter).float(),
        )


def _configured(drafter: DSparkDrafter, name: str, advice: str, **fields: Any) -> Change:
    def build() -> DSparkDrafter:
        settings = type(drafter.config).from_dict({**drafter.config.to_dict(), **fields})  # refuses nonsense
        other = _twin(drafter)
        for field_name in fields:
            setattr(other.config, field_name, getattr(settings, field_name))
        other.rotary_emb = type(other.rotary_emb)(settings).to(drafter.device)
        return other

    return Change(name, advice, build)


def _mask_candidates(tokenizer: Any, config: Any) -> list[int]:
    """Other special tokens that may have been the block's filler."""
    ids = getattr(tokenizer, "all_special_ids", None) or []
    return [int(i) for i in ids if i != config.mask_token_id and 0 <= i < (config.vocab_size or math.inf)][:8]


def _read_as_offsets(drafter: DSparkDrafter) -> torch.Tensor | None:
    ids = drafter.draft_token_ids
    assert ids is not None
    shifted = ids + torch.arange(len(ids), device=ids.device)
    return shifted if int(shifted.max()) < (drafter.config.vocab_size or 0) else None


def _with_vocabulary(drafter: DSparkDrafter, ids: torch.Tensor) -> DSparkDrafter:
    other = _twin(drafter)
    other.draft_token_ids = ids
    return other


def _twin(drafter: DSparkDrafter) -> DSparkDrafter:
    """A drafter with a config of its own and the same weights."""
    return deepcopy(drafter, {id(tensor): tensor for tensor in chain(drafter.parameters(), drafter.buffers())})


__all__ = ["Change", "changes"]
