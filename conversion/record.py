"""The intermediate record of a drafter checkpoint: every field with its value and where it was read, and its tensors.

Readers of foreign layouts make records, writers take them; nothing in between falls back to a default. Tensors are
not read before they are asked for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dspark.configuration_dspark import DSparkConfig

from .stored import StoredTensor

# Everything that decides what a checkpoint means, in the order in which `dspark inspect` prints it.
SEMANTIC_FIELDS = (
    "family", "block_size", "sample_from_anchor", "mask_token_id", "target_layer_ids", "num_target_layers",
    "target_hidden_size", "markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov",
    "confidence_head_bias", "confidence_temperatures", "vocab_size", "draft_vocab", "has_embed", "has_lm_head",
    "layers_attention", "embed_scale", "raw_target_embedding", "logit_scale", "final_logit_softcapping", "hidden_size",
    "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
    "rms_norm_eps", "attention_bias", "attention_k_eq_v", "fc_bias", "rope_parameters", "max_position_embeddings",
    "initializer_range", "attention_dropout", "dtype", "target",
)  # fmt: skip
# Fields whose name and value are the config's own.
_AS_THEY_ARE = tuple(
    name for name in SEMANTIC_FIELDS if name not in ("draft_vocab", "has_embed", "has_lm_head", "layers_attention")
)


class Field(NamedTuple):
    """A value and where it was read: a key of a config, the shape of a tensor, a rule of the format, the caller."""

    value: Any
    source: str


class LayerSight(NamedTuple):
    """Attention of one draft layer; `window` and `window_rule` as in `DSparkConfig`, None for full attention."""

    window: int | None = None
    window_rule: str | None = None
    causal_in_block: bool = False


@dataclass
class Record:
    """What a checkpoint is.

    Attributes:
        format: Name of the format in the registry.
        source: Folder, file or Hub id.
        fields: Every name of `SEMANTIC_FIELDS`.
        tensors: Canonical name (the one `DSparkDrafter` uses) to what is stored; `draft_token_ids` holds absolute ids.
        ignored: Key of a config or name of a tensor that is not used, and why.
        warnings: What a user should know before relying on it.

    Raises:
        ValueError: A field is missing or there is one too many.
    """

    format: str
    source: str
    fields: Mapping[str, Field]
    tensors: dict[str, StoredTensor] | None
    ignored: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if wrong := set(self.fields) ^ set(SEMANTIC_FIELDS):
            raise ValueError(f"A record must have exactly the semantic fields; missing or unknown: {sorted(wrong)}.")

    def __getitem__(self, name: str) -> Any:
        return self.fields[name].value

    @property
    def missing(self) -> list[str]:
        """Parts that are to be borrowed from the target."""
        parts = (("embedding", "has_embed"), ("LM head", "has_lm_head"))
        return [part for part, name in parts if not self[name]]

    @property
    def num_draft_tokens(self) -> int:
        """Drafts a block gives."""
        return self["block_size"] if self["sample_from_anchor"] else self["block_size"] - 1

    def config_fields(self) -> dict[str, Any]:
        """Arguments of the `DSparkConfig` this record stands for."""
        layers: list[LayerSight] = self["layers_attention"]
        windows = [layer.window for layer in layers]
        causal = [layer.causal_in_block for layer in layers]
        rules = {layer.window_rule for layer in layers} - {None}
        draft_vocab = self["draft_vocab"]
        return {
            **{name: self[name] for name in _AS_THEY_ARE},
            "draft_vocab_size": None if draft_vocab is None else len(draft_vocab),
            "share_embedding": not self["has_embed"],
            "share_lm_head": not self["has_lm_head"],
            "attention_windows": windows if any(windows) else None,
            "window_rule": rules.pop() if len(rules) == 1 else None,
            "causal_in_block": causal if any(causal) else None,
        }

    def to_config(self, **overrides: Any) -> DSparkConfig:
        """The `DSparkConfig`, with other values for some of its fields.

        Raises:
            ValueError: A value breaks a rule; names the source and the field.
        """
        try:
            return DSparkConfig(**{**self.config_fields(), **overrides})
        except ValueError as error:
            found = re.match(r"`(\w+)`", str(error))
            field = None if found is None else self.fields.get(found[1])
            where = "" if field is None else f" (`{found[1]}` was read from {field.source}.)"  # type: ignore[index]
            raise ValueError(
                f"The config.json of {self.source} (format {self.format}) is not valid. {error}{where}"
            ) from error


__all__ = ["SEMANTIC_FIELDS", "Field", "LayerSight", "Record"]
