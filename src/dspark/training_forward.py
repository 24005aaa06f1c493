"""The training forward of a drafter: blocks packed behind their context, teacher-forced, and the loss on them.

Shape letters: `B` sequences, `S` tokens, `A` anchors per sequence, `q` block slots, `g` draft tokens, `D` drafter
width, `r` head rank, `Vd` width of the drafter's logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from .borrowing import SharedModules, call_head
from .families import LayerAttention, Rotary, layer_attention, sees_block, sees_context
from .modeling_outputs import DSparkTrainingOutput, split_anchor
from .objective import (
    Blocks,
    LossTerms,
    Objective,
    Sight,
    TargetLaw,
    VocabularyHeads,
    block_attention_mask,
    block_loss,
    build_blocks,
    combine_terms,
    flex_block_mask,
    position_weights,
    vocabulary_loss,
)

if TYPE_CHECKING:
    from .modeling_dspark import DSparkDrafter


class _Rows(NamedTuple):
    """What the loss is computed from, per block position: `hidden [B, A, g, D]`, sequential-head `features [..., r]`
    (None without a head), `labels [...]` in the draft vocabulary, and which positions count, `supervised [...]`.
    """

    hidden: torch.Tensor
    features: torch.Tensor | None
    labels: torch.Tensor
    supervised: torch.Tensor


class PlainContext:
    """Context keys and values of the training forward, never cached.

    Each layer makes its own inside its own forward pass: there a sharded layer's weights are whole, and a
    checkpointed layer keeps nothing of them alive.

    Args:
        layers: The draft layers.
        features: Context features `[B, S, D]`.
        rotary: Rotary tables of their positions.
    """

    def __init__(self, layers: Sequence[Any], features: torch.Tensor, rotary: Rotary) -> None:
        self.layers = layers
        self.features = features
        self.rotary = rotary

    def extend(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The context's keys and values, then those given, `[B, heads, S + A*q, head_dim]`."""
        context_keys, context_values = self.layers[layer_idx].self_attn.keys_values(self.features, self.rotary)
        return torch.cat([context_keys, keys], dim=2), torch.cat([context_values, values], dim=2)


def training_forward(
    drafter: DSparkDrafter,
    input_ids: torch.Tensor,
    target_hidden_states: torch.Tensor,
    loss_mask: torch.Tensor,
    last_hidden: torch.Tensor | None,
    logsumexp: torch.Tensor | None,
    anchors: tuple[torch.Tensor, torch.Tensor],
) -> DSparkTrainingOutput:
    """See [`DSparkDrafter.forward`]; `anchors` are the positions and which of them are real."""
    shared = drafter.shared_modules(None)
    objective = drafter.objective
    blocks = build_blocks(input_ids, loss_mask, *anchors, objective.num_drafts or drafter.config.num_draft_tokens)
    with _backbone_gradient(objective):
        slots = block_hidden(drafter, input_ids, target_hidden_states, blocks, shared)
        hidden, anchor_hidden = split_anchor(drafter.config, slots)
    head = drafter.markov_head
    features = None if head is None else head.block_features(blocks.previous_ids, hidden, anchor_hidden)
    seen = hidden.detach() if objective.detach_confidence else hidden
    confidence = drafter.confidence_logits(seen, blocks.previous_ids)
    teacher = None
    if last_hidden is not None and objective.needs_target_law:
        teacher = _Teacher(drafter, blocks, last_hidden, logsumexp)
    objective.require_law(teacher is not None, confidence is not None)
    rows = _Rows(hidden, features, _label_indices(blocks.labels, drafter.draft_token_ids), blocks.supervised)
    logits = None
    if objective.chunk_size is None:
        logits = _logits(drafter, shared, hidden, features)
        law = None if teacher is None else teacher.law(...)
        terms = block_loss(
            logits, rows.labels, rows.supervised, objective=objective, target=law, confidence_logits=confidence
        )
    else:
        terms = _chunked_terms(drafter, shared, rows, confidence, teacher)
    return DSparkTrainingOutput(
        loss=terms.loss,
        ce_loss=terms.ce.detach(),
        l1_loss=terms.l1.detach(),
        confidence_loss=terms.confidence.detach(),
        acceptance=terms.acceptance,
        supervised=blocks.supervised,
        logits=None if logits is None else logits.detach(),
        confidence_logits=None if confidence is None else confidence.detach(),
    )


def _backbone_gradient(objective: Objective) -> Any:
    """A context that records gradients of the backbone where they are wanted at all."""
    return torch.set_grad_enabled(torch.is_grad_enabled() and not objective.heads_only)


def _logits(
    drafter: DSparkDrafter, shared: SharedModules, hidden: torch.Tensor, features: torch.Tensor | None
) -> torch.Tensor:
    with _backbone_gradient(drafter.objective):
        logits = drafter.base_logits(hidden, shared)
    return logits if features is None else logits + drafter.markov_head.markov_w2(features)  # type: ignore[union-attr]


def _chunked_terms(
    drafter: DSparkDrafter,
    shared: SharedModules,
    rows: _Rows,
    confidence: torch.Tensor | None,
    teacher: _Teacher | None,
) -> LossTerms:
    """Terms over the supervised positions only; the others never meet the vocabulary."""
    objective, supervised = drafter.objective, rows.supervised
    weights = position_weights(supervised, objective.decay)
    modules = [
        None if objective.heads_only else drafter.lm_head,  # a borrowed one is never trained
        None if drafter.markov_head is None else drafter.markov_head.markov_w2,
    ]
    vocabulary = vocabulary_loss(
        rows.hidden[supervised],
        None if rows.features is None else rows.features[supervised],
        rows.labels[supervised],
        weights[supervised],
        heads=VocabularyHeads(
            logits_of=partial(_logits, drafter, shared),
            law_of=lambda part: None if teacher is None else teacher.law(part),
            parameters=[p for module in modules if module is not None for p in module.parameters() if p.requires_grad],
        ),
        objective=objective,
    )
    acceptance = None
    if vocabulary.acceptance is not None:
        acceptance = torch.zeros_like(weights).masked_scatter(supervised, vocabulary.acceptance)
    return combine_terms(vocabulary.loss, vocabulary.ce, vocabulary.l1, weights, acceptance, confidence, objective)


def block_hidden(
    drafter: DSparkDrafter,
    input_ids: torch.Tensor,
    target_hidden_states: torch.Tensor,
    blocks: Blocks,
    shared: SharedModules,
) -> torch.Tensor:
    """Hidden states of all slots of all blocks, `[B, A, q, D]`."""
    batch, length = input_ids.shape
    anchors, drafts = blocks.labels.shape[1:]
    features = drafter.project_context(target_hidden_states)
    places = torch.arange(length, device=features.device).expand(batch, -1)
    context = PlainContext(list(drafter.layers), features, drafter.rotary_emb(features, places))
    block_ids = drafter.masked_blocks(input_ids.gather(1, blocks.anchor_positions), drafts)
    size = block_ids.shape[-1]
    slots = torch.arange(size, device=input_ids.device)
    positions = (blocks.anchor_positions[..., None] + slots).flatten(1)
    hidden = drafter.embed(block_ids.flatten(1), shared)
    kinds = layer_attention(drafter.config)
    shape = {"context_length": length, "block_size": size}
    masks = {kind: _mask(drafter, blocks, shape, hidden.dtype, kind) for kind in dict.fromkeys(kinds)}
    hidden = drafter.run_layers(hidden, positions, context, [masks[kind] for kind in kinds])
    return hidden.view(batch, anchors, size, -1)


def _mask(
    drafter: DSparkDrafter, blocks: Blocks, shape: dict[str, int], dtype: torch.dtype, kind: LayerAttention
) -> Any:
    attention = drafter.config._attn_implementation
    sight = None if kind.is_plain else Sight(partial(sees_context, kind), partial(sees_block, kind))
    if attention == "flex_attention":
        return flex_block_mask(blocks.anchor_positions, blocks.keep, **shape, sight=sight)
    if attention not in ("sdpa", "eager"):
        raise ValueError(
            f"Training packs blocks under a mask of their own, which attention {attention!r} does not take. Load the "
            "drafter with attn_implementation='flex_attention', 'sdpa' or 'eager'."
        )
    mask = block_attention_mask(blocks.anchor_positions, blocks.keep, **shape, sight=sight)
    if attention == "sdpa":
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


class _Teacher:
    """The target's law at the labels of a batch's blocks, computed where it is asked for.

    Raises:
        ValueError: Nothing the drafter has or borrows can compute it.
    """

    def __init__(
        self,
        drafter: DSparkDrafter,
        blocks: Blocks,
        last_hidden: torch.Tensor,
        logsumexp: torch.Tensor | None,
    ) -> None:
        self.head = drafter.teacher()
        self.draft_token_ids = drafter.draft_token_ids
        # The law of the token at a label's position is computed at the position before it.
        places = (blocks.label_positions - 1).clamp(min=0)
        row = torch.arange(len(places), device=places.device)[:, None, None].expand_as(places)
        self.index = row * last_hidden.shape[1] + places
        self.supervised_index = self.index[blocks.supervised]
        self.last_hidden = last_hidden.flatten(0, 1)
        self.logsumexp = None if logsumexp is None else logsumexp.flatten()

    @torch.no_grad()
    def law(self, rows: slice | Any) -> TargetLaw:
        """Law of some supervised positions (`slice`), or of all block positions (`...`): `[n, Vd]`."""
        index = self.index if rows is ... else self.supervised_index[rows]
        device = index.device
        hidden = self.last_hidden[index.to(self.last_hidden.device)]
        head = self.head
        with torch.autocast(hidden.device.type, enabled=False):  # the teacher's law in the dtype of its own weights
            if self.logsumexp is not None and head.rows is not None:
                logits = nn.functional.linear(hidden.to(head.rows), head.rows).to(device)
                return TargetLaw.from_logits(logits, None, self.logsumexp.to(device)[index])
            logits = call_head(head.lm_head, hidden).to(device).float()
        logits = logits if head.softcap is None else torch.tanh(logits / head.softcap) * head.softcap
        return TargetLaw.from_logits(logits, self.draft_token_ids)


def _label_indices(labels: torch.Tensor, draft_token_ids: torch.Tensor | None) -> torch.Tensor:
    """Index of each label in the draft vocabulary; -1 where it is not in it."""
    if draft_token_ids is None:
        return labels
    index = torch.searchsorted(draft_token_ids, labels).clamp(max=draft_token_ids.shape[0] - 1)
    return torch.where(draft_token_ids[index] == labels, index, -1)


def check_shapes(input_ids: torch.Tensor, **per_token: torch.Tensor | None) -> None:
    """Refuse tensors without one entry per token.

    Raises:
        ValueError: Names the tensor and both shapes.
    """
    for name, tensor in per_token.items():
        if tensor is not None and tensor.shape[:2] != input_ids.shape:
            raise ValueError(
                f"`{name}` must have one entry per token of `input_ids` {list(input_ids.shape)}, got "
                f"{list(tensor.shape)}."
            )


__all__ = ["PlainContext", "block_hidden", "check_shapes", "training_forward"]
