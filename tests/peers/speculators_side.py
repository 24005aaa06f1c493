"""Run in a process of its own: speculators' drafter class on a folder we wrote, fed its own arg-max slot by slot.

It has no drafting code; its training forward with one anchor is what its checkpoints are trained under.
Arguments, any number of times: folder, file of inputs, file of results.
"""

from __future__ import annotations

import sys

import torch
from safetensors.torch import load_file, save_file


@torch.no_grad()
def main(folder: str, given: str, result: str) -> None:
    import speculators.models.dflash
    import speculators.models.dspark  # noqa: F401 - registers its class
    from speculators.model import SpeculatorModel
    from speculators.models.dflash import core

    inputs = load_file(given)
    context, anchor = inputs["context"], int(inputs["anchor"])
    model = SpeculatorModel.from_pretrained(folder, attn_implementation="eager").float().eval()
    length, block = context.shape[0], model.block_size
    total = length + 2 * block
    core.select_anchors = lambda *_args: (torch.tensor([length]), torch.tensor([True]))
    hidden_states = torch.cat([context, torch.zeros(total - length, context.shape[1])])[None]
    ids = torch.zeros(1, total, dtype=torch.long)
    ids[0, length] = anchor
    hidden, base, *_ = model._backbone_forward(
        hidden_states, ids, torch.ones(1, total), torch.zeros(1, total, model.verifier_norm.weight.shape[0]),
        torch.zeros(1, total, dtype=torch.long), max_anchors=1,
    )  # fmt: skip
    first = 0 if model.config.sample_from_anchor else 1
    head, confidence = getattr(model, "markov_head", None), getattr(model, "confidence_head", None)
    offsets = model.d2t if model.use_draft_vocab else torch.zeros(base.shape[-1], dtype=torch.long)
    # Token before each slot, as its training shifts them: the anchor stands before slot 0 and slot 1.
    previous = torch.full((1, block), anchor)
    tokens, logits = [], []
    for slot in range(first, block):
        row = base[0, slot]
        if head is not None:
            bias = head.block_bias(
                prev_token_ids=previous, hidden_states=hidden.view(1, block, -1),
                prev_emb=head.prev_embeddings(previous),
            )  # fmt: skip
            row = row + bias.view(block, -1)[slot]
        best = int(row.argmax())
        tokens.append(best + int(offsets[best]))
        logits.append(row)
        if slot + 1 < block:
            previous[0, slot + 1] = tokens[-1]
    out = {"tokens": torch.tensor(tokens), "logits": torch.stack(logits)}
    if confidence is not None:
        features = hidden.view(1, block, -1)
        if model.config.confidence_head_with_markov:
            features = torch.cat([features, head.prev_embeddings(previous)], dim=-1)
        out["confidence"] = confidence(features).reshape(-1)[first:].contiguous()
    save_file(out, result)


if __name__ == "__main__":
    for at in range(1, len(sys.argv), 3):
        main(*sys.argv[at : at + 3])
