"""Run in a process of its own: SpecForge's draft class on a folder we wrote, under the mask of its own training.

Arguments, any number of times: folder, file of inputs (context, anchor, the target's tables), file of results.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from specforge.algorithms.common.dflash_family_model import create_dflash_sdpa_mask
from specforge.modeling.draft.dflash import DFlashDraftModel
from specforge.modeling.draft.dspark import DSparkDraftModel

CLASSES = {"DSparkDraftModel": DSparkDraftModel, "DFlashDraftModel": DFlashDraftModel}


@torch.no_grad()
def main(folder: str, given: str, result: str) -> None:
    inputs = load_file(given)
    context, anchor = inputs["context"][None], inputs["anchor"].reshape(1)
    kind = json.loads((Path(folder) / "config.json").read_text())["architectures"][0]
    model, info = CLASSES[kind].from_pretrained(folder, attn_implementation="sdpa", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    model = model.float().eval()
    length, block = context.shape[1], model.block_size
    place = {
        "anchor_positions": torch.tensor([[length]]), "block_keep_mask": torch.tensor([[True]]), "S": length,
        "block_size": block, "device": "cpu",
    }  # fmt: skip
    mask = {"full_attention": create_dflash_sdpa_mask(**place)}
    if model.sliding_window is not None:
        mask["sliding_attention"] = create_dflash_sdpa_mask(**place, sliding_window=model.sliding_window)
    ids = torch.cat([anchor, torch.full((block - 1,), model.mask_token_id)])
    hidden = model(
        position_ids=torch.arange(length + block)[None], attention_mask=mask,
        noise_embedding=inputs["embedding"][ids][None], target_hidden=context,
    )  # fmt: skip
    head = getattr(model, "markov_head", None)
    if kind == "DFlashDraftModel":  # its anchor slot drafts nothing
        hidden = hidden[:, 1:]
    logits = hidden @ inputs["head"].T
    tokens = logits.argmax(-1)
    if head is not None:
        tokens, logits = head.sample_block_tokens(logits, first_prev_token_ids=anchor, hidden_states=hidden)
    out = {"tokens": tokens[0], "logits": logits[0].contiguous()}
    previous = torch.cat([anchor, tokens[0, :-1]])[None]
    confidence = model.predict_confidence(hidden, prev_token_ids=previous)
    if confidence is not None:
        out["confidence"] = confidence[0].contiguous()
    save_file(out, result)


if __name__ == "__main__":
    for at in range(1, len(sys.argv), 3):
        main(*sys.argv[at : at + 3])
