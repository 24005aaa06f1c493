"""Run in a process of its own: mlx-dspark's loader and drafter on a folder we wrote, on the CPU.

Arguments, any number of times: folder, file of inputs (context, anchor, the target's tables), file of results.
"""

from __future__ import annotations

import sys

import mlx.core as mx
import numpy as np
from mlx_dspark.load import load_drafter


def main(folder: str, given: str, result: str) -> None:
    inputs = mx.load(given)
    drafter, config = load_drafter(folder, quantize=False)
    drafter.set_dtype(mx.float32)
    if not config.has_own_embed:
        drafter.bind_embed(lambda ids: inputs["embedding"][ids])
    if not config.has_own_lm_head:
        drafter.bind_lm_head(lambda hidden: hidden @ inputs["head"].T)
    context, anchor = inputs["context"][None], int(inputs["anchor"].item())
    caches = drafter.make_ctx_cache()
    drafter.update_context(context, 0, caches)
    block = mx.array([[anchor] + [config.mask_token_id] * (config.block_size - 1)])
    hidden = drafter.head_slice(drafter.backbone(drafter.embed(block), context.shape[1], caches), drafter.max_draft)
    base = drafter.compute_logits(hidden)[0]
    tokens = drafter.sample_block(base, anchor)
    previous = mx.concatenate([mx.array([anchor]), tokens[:-1]])
    logits = base
    if drafter.markov_head is not None:
        logits = base + mx.concatenate([drafter.markov_head.step_bias(token[None]) for token in previous])
    out = {"tokens": tokens.astype(mx.int64), "logits": logits.astype(mx.float32)}
    confidence = drafter.confidence_logits(hidden[0], previous)
    if confidence is not None:
        out["confidence"] = confidence.reshape(-1).astype(mx.float32)
    mx.save_safetensors(result, {name: mx.array(np.array(value)) for name, value in out.items()})


if __name__ == "__main__":
    for at in range(1, len(sys.argv), 3):
        main(*sys.argv[at : at + 3])
