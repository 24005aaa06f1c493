"""What training reads from the target: tapped hidden states, the last hidden state, and the law's normaliser.

Only the tapped layers are kept (forward hooks), and the target's LM head never runs over a whole batch at once: V-wide
logits exist for a few hundred positions at a time. Shape letters: `B` sequences, `S` tokens, `m` tapped layers, `D_t`
target width, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from ..borrowing import call_head
from ..decoding.capture import HiddenStateCapture
from ..target import describe, embedding_module, head_module, table_shape, text_config, unwrap

_CHUNK = 256  # positions whose V-wide logits are alive at once: 150 MB in float32 at V = 151,936


class TargetFeatures(NamedTuple):
    """Hidden states: `hidden [B, S, m*D_t]` of the tapped layers, `last [B, S, D_t]` after the final norm."""

    hidden: torch.Tensor
    last: torch.Tensor


@torch.no_grad()
def capture_features(target: PreTrainedModel, input_ids: torch.Tensor, layer_ids: Sequence[int]) -> TargetFeatures:
    """Run the target's decoder once, without its LM head, on right-padded ids.

    Padding needs no mask: the target is causal and padding comes last, so no real token sees it.

    Args:
        target: The frozen target.
        input_ids: int64 `[B, S]`.
        layer_ids: Tapped layers; `l` is the output of decoder layer l, -1 the input of layer 0.
    """
    decoder = text_decoder(target)
    tapped: list[torch.Tensor] = []
    with HiddenStateCapture(unwrap(target), layer_ids) as capture:
        output = capture.run(lambda: decoder(input_ids=input_ids, use_cache=False), tapped.append)
    return TargetFeatures(tapped[0], output.last_hidden_state)


def text_decoder(target: PreTrainedModel) -> nn.Module:
    """The target without its LM head: it answers with `last_hidden_state` after the final norm."""
    decoder = unwrap(target).get_decoder()
    # A multimodal target may answer with its whole base model, whose language model is the text decoder.
    return getattr(decoder, "language_model", decoder)


def target_logits(target: PreTrainedModel, last_hidden: torch.Tensor) -> torch.Tensor:
    """Float32 logits `[..., V]` of hidden states `[..., D_t]` after the final norm, soft-capped as the target does."""
    model = unwrap(target)
    logits = call_head(head_module(model), last_hidden).float()
    cap = getattr(text_config(model), "final_logit_softcapping", None)
    return logits if cap is None else torch.tanh(logits / cap) * cap


@torch.no_grad()
def target_logsumexp(
    target: PreTrainedModel, last_hidden: torch.Tensor, needed: torch.Tensor | None = None
) -> torch.Tensor:
    """log sum exp of the target's logits over V, float32 `[B, S]`, a chunk of positions at a time.

    Args:
        target: The frozen target.
        last_hidden: `[B, S, D_t]` after the final norm.
        needed: bool `[B, S]`, positions to compute; the others are `inf` (a law without mass). None: all.
    """
    flat = last_hidden.flatten(0, -2)
    result = torch.full((flat.shape[0],), torch.inf, device=flat.device)
    wanted = torch.arange(flat.shape[0], device=flat.device) if needed is None else needed.flatten().nonzero()[:, 0]
    for rows in wanted.split(_CHUNK):
        result[rows] = target_logits(target, flat[rows]).logsumexp(-1).to(result.device)
    return result.view(last_hidden.shape[:-1])


@torch.no_grad()
def check_target(target: PreTrainedModel) -> None:
    """Make sure that the target's logits are its LM head applied to its last hidden state, as the loss assumes.

    Raises:
        ValueError: They are not (the target scales its logits, say): a drafter would learn another law than the
            target's, without any error.
    """
    model = unwrap(target)
    device = next(embedding_module(model).parameters()).device
    ids = torch.arange(8, device=device)[None] % vocabulary_rows(model)
    theirs = model(input_ids=ids, use_cache=False).logits.float()
    last = text_decoder(model)(input_ids=ids, use_cache=False).last_hidden_state
    ours = target_logits(model, last).to(theirs.device)
    gap = float((ours - theirs).abs().max())
    if gap > 0.02 * float(theirs.abs().max()) + 1e-3:  # beyond bfloat16 rounding of one product
        raise ValueError(
            f"The logits of {describe(target)} are not its LM head applied to its last hidden state (they differ by "
            f"up to {gap:.3g}), so the law a drafter would learn from is not the target's. Targets that scale or "
            "shift their logits after the head are not supported in training."
        )


def vocabulary_rows(target: PreTrainedModel) -> int:
    """Rows of the target's embedding, padding rows included: ids below it can be embedded."""
    shape = table_shape(embedding_module(unwrap(target)))
    return text_config(unwrap(target)).vocab_size if shape is None else shape[0]


__all__ = [
    "TargetFeatures",
    "capture_features",
    "check_target",
    "target_logits",
    "target_logsumexp",
    "text_decoder",
    "vocabulary_rows",
]
