"""The drafters whose files are kept: one of each sequential head, between them every optional part of the format.

`python -m tests.regression.drafters FOLDER` writes them as this version saves them, with what they draft.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dspark import DraftOutput, DSparkDrafter
from tests import small

ROOT = Path(__file__).parents[1] / "fixtures" / "regression"
_TINY = {
    "vocab_size": 24, "hidden_size": 8, "intermediate_size": 8, "head_dim": 4, "num_hidden_layers": 1,
    "mask_token_id": 23, "markov_rank": 2, "target_layer_ids": [0, 2], "share_embedding": False,
    "share_lm_head": False, "target": {"name": "some/target", "model_type": "qwen3", "hidden_size": 8},
}  # fmt: skip
DRAFTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("llama", {
        "markov_head_type": "none", "markov_rank": 0, "enable_confidence_head": False,
        "confidence_head_with_markov": False,
    }),
    "vanilla": ("qwen3", {"confidence_temperatures": [1.5, 1.2, 1.0, 0.8]}),
    "gated": ("llama", {
        "markov_head_type": "gated", "draft_vocab_size": 16, "attention_bias": True, "embed_scale": 2.0,
        "attention_windows": [4], "window_rule": "ctx_from_anchor", "causal_in_block": [True],
    }),
    "rnn": ("gemma4", {
        "markov_head_type": "rnn", "sample_from_anchor": False, "confidence_head_bias": True,
        "confidence_head_with_markov": False,
    }),
}  # fmt: skip
EXPECTED = "expected.safetensors"


def build(head: str) -> DSparkDrafter:
    """A drafter of `DRAFTERS`, the same each time."""
    family, fields = DRAFTERS[head]
    drafter = small.shaken(DSparkDrafter, small.config(family, **{**_TINY, **fields}))
    if drafter.draft_token_ids is not None:
        drafter.draft_token_ids.copy_(torch.tensor([0, 2, 3, 5, 6, 7, 9, 11, 12, 14, 15, 17, 18, 20, 21, 22]))
    return drafter


def drafted(drafter: DSparkDrafter) -> DraftOutput:
    """What it drafts behind a fixed context."""
    states = torch.linspace(-1, 1, 2 * 6 * drafter.config.context_width).sin().view(2, 6, -1)
    return drafter.draft(torch.tensor([3, 9]), states)


def tensors(output: DraftOutput) -> dict[str, torch.Tensor]:
    """The tensors of an output that is held to a file."""
    found = {name: getattr(output, name) for name in ("token_ids", "base_logits", "logits", "confidence_logits")}
    return {name: value.contiguous() for name, value in found.items() if value is not None}


def write(root: Path) -> None:
    """Write all drafters with what they draft."""
    for head in DRAFTERS:
        drafter = build(head)
        drafter.save_pretrained(root / head)
        save_file(tensors(drafted(drafter)), root / head / EXPECTED)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
