"""Tensor names of the formats, as data: what is renamed to `DSparkDrafter`'s names, what is left out and why."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from .stored import StoredTensor

# Tensors whose extents readers take as sizes.
_DIMS = {
    "fc.weight": 2, "markov_head.markov_w1.weight": 2, "confidence_head.proj.weight": 2, "embed_tokens.weight": 2,
    "lm_head.weight": 2, "layers.0.self_attn.q_norm.weight": 1,
}  # fmt: skip
_WRAPPERS = re.compile(r"^(?:_orig_mod\.|module\.)+")


@dataclass(frozen=True)
class KeyMap:
    """How a format names tensors.

    Attributes:
        renames: Name to canonical name; a key that ends in `.` is a prefix. The first that fits counts.
        dropped: Name or prefix to the reason why it is not read.
        layer: Prefix of layers that is followed by their number, and its canonical form.
        parts: Name below a layer to canonical name below it.
    """

    renames: Mapping[str, str] = field(default_factory=dict)
    dropped: Mapping[str, str] = field(default_factory=dict)
    layer: tuple[str, str] = ("layers.", "layers.")
    parts: Mapping[str, str] = field(default_factory=dict)

    def canonical(self, name: str) -> str:
        """Canonical name of a tensor."""
        name = _WRAPPERS.sub("", name)
        for theirs, ours in self.renames.items():
            if name == theirs or (theirs.endswith(".") and name.startswith(theirs)):
                return ours + name[len(theirs) :]
        found = re.fullmatch(re.escape(self.layer[0]) + r"(\d+)\.(.+)", name)
        if found is None:
            return name
        return f"{self.layer[1]}{found[1]}.{self.parts.get(found[2], found[2])}"

    def stored(self, canonical: str) -> str:
        """Name of a tensor in the format: the first that [`KeyMap.canonical`] takes back to it."""
        for theirs, ours in self.renames.items():
            if canonical == ours or (ours.endswith(".") and canonical.startswith(ours)):
                return theirs + canonical[len(ours) :]
        found = re.fullmatch(re.escape(self.layer[1]) + r"(\d+)\.(.+)", canonical)
        if found is None:
            return canonical
        part = next((theirs for theirs, ours in self.parts.items() if ours == found[2]), found[2])
        return f"{self.layer[0]}{found[1]}.{part}"

    def reason_to_drop(self, name: str) -> str | None:
        """Why a tensor is not read; None: it is."""
        name = _WRAPPERS.sub("", name)
        return next((why for key, why in self.dropped.items() if name == key or name.startswith(f"{key}.")), None)


def map_names(
    source: str, tensors: Mapping[str, StoredTensor], keys: KeyMap, ignored: dict[str, str]
) -> dict[str, StoredTensor]:
    """Tensors by canonical name; what is left out goes to `ignored` with its reason.

    Raises:
        ValueError: Two tensors stand for one and hold different numbers, or one is no matrix where it must be.
    """
    found: dict[str, StoredTensor] = {}
    # A tensor under its canonical name goes first: another name for it is the copy.
    for name in sorted(tensors, key=lambda name: (keys.canonical(name) != name, name)):
        if (why := keys.reason_to_drop(name)) is not None:
            ignored[name] = why
            continue
        canonical, tensor = keys.canonical(name), tensors[name]
        if canonical not in found:
            found[canonical] = tensor
            continue
        if not _same_numbers(found[canonical], tensor):
            raise ValueError(
                f"{source} stores {found[canonical].key} and {name}, two names of one tensor, with different numbers. "
                "Remove the one that is out of date."
            )
        ignored[name] = f"a copy of {found[canonical].key}"
    for name, dims in _DIMS.items():
        if name in found and len(found[name].shape) != dims:
            raise ValueError(
                f"{source} stores {found[name].key} with the shape {list(found[name].shape)}, and it must have {dims} "
                f"dimension{'s' if dims > 1 else ''}: damaged, or another model's. Convert or download it again."
            )
    return found


def _same_numbers(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors are equal once the one of more digits is rounded to the other's dtype."""
    if one.shape != other.shape:
        return False
    a, b = one[...], other[...]
    if not (a.is_floating_point() and b.is_floating_point()):
        return a.dtype == b.dtype and torch.equal(a, b)
    narrow = min(a.dtype, b.dtype, key=lambda dtype: torch.finfo(dtype).bits)
    return torch.equal(a.to(narrow).float(), b.to(narrow).float())


_ALIASES = {
    "model.": "", "markov_w1.weight": "markov_head.markov_w1.weight",
    "markov_w2.weight": "markov_head.markov_w2.weight", "confidence_proj.": "confidence_head.proj.",
}  # fmt: skip
_DERIVED = {"rotary_emb": "computed from the config"}
_OFFSETS = {"d2t": "read into the reduced vocabulary", "t2d": "compared with d2t"}

NATIVE = KeyMap(dropped=_DERIVED)
FLAT = KeyMap(renames=_ALIASES, dropped={**_DERIVED, **_OFFSETS})
SPECULATORS = KeyMap(
    dropped={
        **_DERIVED, **_OFFSETS, "verifier_lm_head": "the target's own", "verifier_norm": "the target's own",
    }
)  # fmt: skip
SPECFORGE = KeyMap(renames={"logit_head.": "", "draft_model.": "", "model.": ""}, dropped=_DERIVED)
MUSE = KeyMap(
    renames={"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm.", "model.": ""}, dropped=_DERIVED
)
_GGUF_LAYER = {
    "attn_norm.weight": "input_layernorm.weight", "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_output.weight": "self_attn.o_proj.weight", "attn_output.bias": "self_attn.o_proj.bias",
    **{f"attn_{x}.{kind}": f"self_attn.{x}_proj.{kind}" for x in "qkv" for kind in ("weight", "bias")},
    **{f"attn_{x}_norm.weight": f"self_attn.{x}_norm.weight" for x in "qk"},
    **{f"ffn_{x}.weight": f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")},
}  # fmt: skip
_GGUF_TABLES = {
    "output_norm.weight": "norm.weight", "token_embd.weight": "embed_tokens.weight", "output.weight": "lm_head.weight",
}  # fmt: skip
GGUF_DFLASH = KeyMap(
    renames={
        **_GGUF_TABLES, "enc.output_norm.weight": "hidden_norm.weight",
        "markov_w1.weight": "markov_head.markov_w1.weight", "markov_w2.weight": "markov_head.markov_w2.weight",
        "conf_proj.": "confidence_head.proj.",
    },
    dropped={**_OFFSETS, "rope_freqs": "read into the rotary parameters"},
    layer=("blk.", "layers."),
    parts=_GGUF_LAYER,
)  # fmt: skip
GGUF_PRISMML = KeyMap(
    renames={
        **_GGUF_TABLES, "dspark.fc.": "fc.", "dspark.hidden_norm.": "hidden_norm.",
        "dspark.markov_head_a.weight": "markov_head.markov_w1.weight",
        "dspark.markov_head_b.weight": "markov_head.markov_w2.weight",
        "dspark.confidence_head.": "confidence_head.proj.",
    },
    dropped={"rope_freqs": "computed from the metadata"},
    layer=("blk.", "layers."),
    parts=_GGUF_LAYER,
)  # fmt: skip

__all__ = [
    "FLAT", "GGUF_DFLASH", "GGUF_PRISMML", "MUSE", "NATIVE", "SPECFORGE", "SPECULATORS", "KeyMap", "map_names",
]  # fmt: skip
