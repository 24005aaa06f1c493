"""The note a trained drafter keeps of its target (`DSparkConfig.target`): sizes, names and short hashes.

The hashes read a fixed sparse sample of rows, so a model of any size costs milliseconds. Values are cast to bf16 bits
first: a bf16 checkpoint gives the same hashes loaded as bf16, fp16 or fp32, on any device, and so does an fp32 one
cast to bf16. Nothing private goes in: no weights, no text, no local path.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from .peft_layers import active_adapter_weights, base_parameters
from .target import (
    decoder_layers,
    embedding_module,
    head_module,
    is_on_meta,
    rotary_kind,
    table_shape,
    text_config,
    unwrap,
)

_HEX = 16  # digits of a hash: 64 bits, far beyond a chance match
# Row ids grow geometrically, so that a few rows added at the end mostly leave the sample as it was.
_ROWS = sorted({int(1.2**k) for k in range(70)})
_LAYER_WEIGHTS = 16  # matrices of the sampled layer at most, for layers that hold one matrix per expert
_PLAIN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_SMALLEST = 2.0**-14  # below it fp16 is subnormal and loses bits that bf16 keeps, so such values count as zero
# One string per thing tokenizers disagree on: words, digits, code and indentation, accents, another script.
_PROBES = ("The quick brown fox", "In 2024, 3.14159 > 1000", "def f(x):\n    return x", "déjà vu, naïve", "你好")
_THINKING = re.compile(r"\b(enable_thinking|thinking|reasoning_effort)\b")
_NO_ADAPTER = "none"

_Watched = tuple["weakref.ref[torch.Tensor]", int]  # a tensor and its version
Facts = TypeVar("Facts")


class WeightHashes(NamedTuple):
    """Hashes of a model's weights; None, or left out of `layers`, where a weight cannot be read.

    Attributes:
        embedding: Of the input embedding.
        lm_head: Of the LM head; equal to `embedding` for tied weights.
        layers: Of each matrix of the middle decoder layer, by its name in the layer. A fine-tuned or merged copy
            differs here even where embedding and head were left alone.
    """

    embedding: str | None
    lm_head: str | None
    layers: dict[str, str]


class TargetFacts(NamedTuple):
    """What a pairing check needs of a target and is too slow to read before every `generate`."""

    hashes: WeightHashes
    is_on_meta: bool
    layers_problem: str | None  # why no decoder layers were found


class FactCache(Generic[Facts]):
    """What was read from models, kept until one of the tensors read is replaced or its version moves.

    Nothing is written on a model and nothing here keeps one alive; any thread may call. A change through `.data`,
    which PyTorch does not count, goes unnoticed.
    """

    def __init__(self) -> None:
        self._kept: weakref.WeakKeyDictionary[Any, tuple[list[_Watched], Facts]] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def get(self, model: Any, present: Sequence[Any]) -> Facts | None:
        """Facts of `model`, or None if a tensor they came from has changed or `present` has one they did not."""
        with self._lock:
            kept = self._kept.get(model)
        if kept is None:
            return None
        watched, facts = kept
        tensors = [reference() for reference, _ in watched]
        if any(t is None or _version(t) != version for t, (_, version) in zip(tensors, watched, strict=True)):
            return None
        known = all(any(tensor is other for other in tensors) for tensor in present if tensor is not None)
        return facts if known else None

    def put(self, model: Any, tensors: Sequence[Any], facts: Facts) -> None:
        """Keep `facts`, read from `tensors`; without any tensor to watch nothing is kept."""
        watched = [(weakref.ref(t), _version(t)) for t in tensors if isinstance(t, torch.Tensor)]
        if watched:
            with self._lock:
                self._kept[model] = (watched, facts)

    def forget(self, model: Any) -> None:
        """Keep nothing of `model`."""
        with self._lock:
            self._kept.pop(model, None)


_facts: FactCache[TargetFacts] = FactCache()


def fingerprint(
    target: PreTrainedModel, *, tokenizer: Any = None, drafter: Any = None, name: str | None = None
) -> dict[str, Any]:
    """The note to store as `DSparkConfig.target` of a drafter trained for this target; JSON-able.

    Args:
        target: The target; `torch.compile` and PEFT wrappers are looked through.
        tokenizer: Adds its size, the hash of its ids, its chat template's hash and whether that has a thinking switch.
        drafter: Adds the hash of its reduced vocabulary.
        name: Public name to store. By default the Hub id the target was loaded from; a local path is left out.

    Returns:
        Flat dict, except `layer_hashes` (weight name to hash). What cannot be read is None: weights that are packed,
        quantised, offloaded or on the meta device, the rope of a model without one.
    """
    target = unwrap(target)
    config = text_config(target)
    shape = table_shape(embedding_module(target))
    rope_type, rope_theta = rotary_kind(config)
    hashes = read_facts(target).hashes
    note = {
        "name": name or _hub_id(target),
        "model_type": target.config.model_type,
        "architecture": type(target).__name__,
        "num_hidden_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "vocab_size": None if shape is None else shape[0],
        "rope_type": rope_type,
        "rope_theta": rope_theta,
        "num_parameters": target.num_parameters(),
        "embedding_hash": hashes.embedding,
        "lm_head_hash": hashes.lm_head,
        "layer_hashes": hashes.layers or None,
        "adapter_hash": adapter_hash(target),
    }
    if tokenizer is not None:
        note.update(tokenizer_note(tokenizer))
    if drafter is not None:
        note["draft_vocab_hash"] = draft_vocab_hash(drafter)
    return note


def tokenizer_note(tokenizer: Any) -> dict[str, Any]:
    """The tokenizer's part of the note; the chat template's two entries are None without one."""
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in _PROBES]
    template = getattr(tokenizer, "chat_template", None)
    if template is not None and not isinstance(template, str):  # several named templates
        template = json.dumps(template, sort_keys=True)
    return {
        "tokenizer_size": len(tokenizer),
        "tokenizer_hash": _digest(json.dumps(ids).encode()),
        "chat_template_hash": None if template is None else _digest(template.encode()),
        "has_thinking_switch": None if template is None else _has_thinking_switch(template),
    }


def draft_vocab_hash(drafter: Any) -> str | None:
    """Hash of the target ids a drafter's logits stand for; None for a drafter that speaks the whole vocabulary."""
    ids = unwrap(drafter).draft_token_ids
    if ids is None or ids.is_meta:
        return None
    return _digest(ids.detach().cpu().to(torch.int64).numpy().tobytes())


def hash_rows(weight: Any) -> str | None:
    """Hash of the sampled rows of a matrix; None if it is not a plain floating-point matrix with data."""
    if type(weight) not in (torch.Tensor, nn.Parameter) or weight.dtype not in _PLAIN or weight.is_meta:
        return None
    if weight.layout is not torch.strided or weight.dim() != 2 or not weight.numel():
        return None
    index = torch.tensor([row for row in _ROWS if row < weight.shape[0]] or [0], device=weight.device)
    rows = weight.detach().index_select(0, index).to(torch.bfloat16)
    rows = rows.masked_fill(rows.abs() < _SMALLEST, 0).cpu().contiguous()
    return _digest(rows.view(torch.int16).numpy().tobytes())


def hash_matrices(matrices: Iterable[Any]) -> str | None:
    """One hash of several matrices, in order; None if one of them cannot be read."""
    hashes = [hash_rows(matrix) for matrix in matrices]
    return None if None in hashes else _digest("".join(map(str, hashes)).encode())


def adapter_hash(target: PreTrainedModel) -> str | None:
    """Hash of the PEFT adapters that take part in the target's passes as it stands; `"none"` without one.

    Switched off, merged into the weights, or fresh and without effect is without one. None: they cannot be read.
    """
    target = unwrap(target)
    if not hasattr(target, "peft_config"):  # PEFT's mark on a model it has put adapters into
        return _NO_ADAPTER
    weights = active_adapter_weights(target)
    if not weights:
        return _NO_ADAPTER
    step = max(len(weights) // _LAYER_WEIGHTS, 1)
    return hash_matrices(weights[::step])


def target_facts(target: PreTrainedModel) -> TargetFacts:
    """`read_facts`, or what it said last time if the sampled weights have not changed (see `FactCache`)."""
    if hasattr(target, "peft_config"):  # PEFT merges adapters through `.data`
        _facts.forget(target)
        return read_facts(target)
    facts = _facts.get(target, _end_weights(target))
    return read_facts(target) if facts is None else facts


def read_facts(target: PreTrainedModel) -> TargetFacts:
    """Weight hashes and structure of an unwrapped target, read now."""
    ends = _end_weights(target)
    matrices, problem = _middle_layer(target)
    layers = {name: digest for name, weight in matrices.items() if (digest := hash_rows(weight)) is not None}
    facts = TargetFacts(WeightHashes(hash_rows(ends[0]), hash_rows(ends[1]), layers), is_on_meta(target), problem)
    if not facts.is_on_meta and not hasattr(target, "peft_config"):
        _facts.put(target, [*ends, *matrices.values()], facts)
    return facts


def _end_weights(target: PreTrainedModel) -> list[Any]:
    return [getattr(find(target), "weight", None) for find in (embedding_module, head_module)]


def _version(weight: torch.Tensor) -> int:
    return 0 if weight.is_inference() else weight._version  # inference tensors count no versions


def _middle_layer(target: PreTrainedModel) -> tuple[dict[str, torch.Tensor], str | None]:
    try:
        layers = decoder_layers(target)
    except ValueError as error:
        return {}, str(error)
    matrices = {name: w for name, w in base_parameters(layers[len(layers) // 2]) if w.dim() == 2}
    return dict(sorted(matrices.items())[:_LAYER_WEIGHTS]), None


def _has_thinking_switch(template: str) -> bool:
    """Whether the template's statements (not the text it prints) read a variable that turns thinking on or off."""
    statements = " ".join(re.findall(r"\{%.*?%\}", template, re.DOTALL))
    return bool(_THINKING.search(re.sub(r"'[^']*'|\"[^\"]*\"", "", statements)))


def _hub_id(target: PreTrainedModel) -> str | None:
    path = getattr(target.config, "_name_or_path", None) or ""
    is_id = re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", path) and not os.path.exists(path)
    return path if is_id else None


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:_HEX]


__all__ = [
    "FactCache",
    "TargetFacts",
    "WeightHashes",
    "adapter_hash",
    "draft_vocab_hash",
    "fingerprint",
    "hash_matrices",
    "hash_rows",
    "read_facts",
    "target_facts",
    "tokenizer_note",
]
