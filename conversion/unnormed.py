"""Llama-like layers written for an engine whose layers norm queries and keys: the same drafts, in Qwen3's terms.

`RMSNorm(q) = w q / sqrt(mean(q^2) + eps)` is the identity where eps is far above mean(q^2) and w is sqrt(eps). All
norms of a drafter share one eps, so the residual stream is scaled along with it: with embeddings, `fc` and what layers
add to the stream times s, and eps times s^2, every other norm gives what it gave. s is a power of two, which rounds
nothing; what is left is a relative error of mean(q^2) / (2 eps) in queries and keys.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from .record import Record
from .resolving import changed
from .stored import StoredTensor

_LEAST_EPS = 1e10  # a mean of 10,000 is then half a millionth off, and no float32 sum of squares overflows
_STREAM = ("fc.weight", "self_attn.o_proj.weight", "mlp.down_proj.weight")
_WHY = "norms of queries and keys that change nothing"


def as_normed(record: Record) -> Record:
    """A record of family `llama` (with raw or own embeddings) as one of family `qwen3`."""
    scale = stream_scale(record["rms_norm_eps"])
    eps = record["rms_norm_eps"] * scale**2
    found = changed(record, _WHY, family="qwen3", rms_norm_eps=eps, embed_scale=record["embed_scale"] * scale)
    tensors = found.tensors or {}
    for name, tensor in tensors.items():
        if feeds_stream(name):
            tensors[name] = _scaled(tensor, scale)
    weight = torch.full((record["head_dim"],), math.sqrt(eps))
    for layer in range(record["num_hidden_layers"]):
        for states in "qk":
            name = f"layers.{layer}.self_attn.{states}_norm.weight"
            tensors[name] = StoredTensor("none", name, "float32", tuple(weight.shape), lambda: weight, 0, _WHY)
    return found


def stream_scale(eps: float) -> float:
    """The power of two that the residual stream is scaled by, for norms of `eps`."""
    return 2.0 ** math.ceil(math.log2(_LEAST_EPS / eps) / 2)


def is_scaled(record: Record, name: str) -> bool:
    """Whether a tensor (by its canonical name) holds numbers made large by [`as_normed`]: beyond float16's range."""
    return record["rms_norm_eps"] >= _LEAST_EPS and (feeds_stream(name) or name == "embed_tokens.weight")


def feeds_stream(name: str) -> bool:
    """Whether what a tensor gives is added to the residual stream, so that it is scaled."""
    return name.endswith(_STREAM)


def _scaled(tensor: StoredTensor, scale: float) -> StoredTensor:
    return replace(tensor, read=lambda: tensor[...].float() * scale, transform=f"times {scale:g}")


__all__ = ["as_normed", "feeds_stream", "is_scaled", "stream_scale"]
