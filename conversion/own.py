"""Our own layout as a record, for `dspark inspect` and for writers: each field is a key of the config."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from dspark.configuration_dspark import DSparkConfig

from .checkpoint import Checkpoint
from .reading import Reader
from .record import LayerSight, Record
from .stored import StoredTensor

NAME = "dspark"


def recognises(checkpoint: Checkpoint) -> bool:
    """Whether its config has our model type."""
    return not checkpoint.is_gguf and checkpoint.config.get("model_type") == DSparkConfig.model_type


def read(checkpoint: Checkpoint, choices: Mapping[str, Any]) -> Record:
    """Record of a folder that `DSparkDrafter.save_pretrained` wrote.

    Raises:
        ValueError: The config is not valid, or a reduced vocabulary lacks its ids.
    """
    try:
        config = DSparkConfig.from_dict({**checkpoint.config, **choices})
    except (TypeError, ValueError) as error:
        raise ValueError(f"The config.json of {checkpoint.source} is not valid. {error}") from error
    reader = Reader(NAME, checkpoint, choices)
    reader.tensors = None if checkpoint.tensors is None else dict(checkpoint.tensors)
    layers = config.num_hidden_layers
    reader.set("num_hidden_layers", layers, "config.json: num_hidden_layers")
    windows, causal = config.attention_windows or [None] * layers, config.causal_in_block or [False] * layers
    sights = [
        LayerSight(window, config.window_rule if window else None, is_causal)
        for window, is_causal in zip(windows, causal, strict=True)
    ]
    reader.set("layers_attention", sights, "config.json: attention_windows, window_rule, causal_in_block")
    reader.set("has_embed", not config.share_embedding, "config.json: share_embedding")
    reader.set("has_lm_head", not config.share_lm_head, "config.json: share_lm_head")
    ids = None
    if config.draft_vocab_size is not None:
        stored = (reader.tensors or {}).get("draft_token_ids")
        if stored is None:
            raise ValueError(f"{checkpoint.source} has a reduced vocabulary, and no tensor draft_token_ids.")
        ids = _draft_ids(checkpoint.source, stored, config)
    reader.set("draft_vocab", ids, "tensor draft_token_ids" if ids else "config.json: draft_vocab_size")
    for name in config.to_dict():
        if name not in reader.fields:
            written = name in checkpoint.config
            value = getattr(config, name)
            reader.set(
                name, value, f"config.json: {name}" if written else "rule of the format: default of DSparkConfig"
            )
    dtype = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
    reader.set("dtype", dtype, "config.json: dtype")
    return reader.record()


def _draft_ids(source: str, stored: StoredTensor, config: DSparkConfig) -> list[int]:
    size, vocab = config.draft_vocab_size, config.vocab_size or 0
    ids = stored[...].tolist() if stored.dtype.startswith("int") and stored.shape == (size,) else []
    if not ids or ids[0] < 0 or ids[-1] >= vocab or any(b <= a for a, b in pairwise(ids)):
        raise ValueError(
            f"`draft_token_ids` of {source} must be {size} integers (`draft_vocab_size`), strictly increasing and in "
            f"0..{vocab - 1}, got {stored.dtype} {list(stored.shape)} {ids[:4]}... The checkpoint is damaged or badly "
            "converted: convert or download it again."
        )
    return ids


__all__ = ["NAME", "read", "recognises"]
