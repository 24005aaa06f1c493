"""The Markov block in torch: any device, the contract of the door step by step.

Shape letters: `B` rows, `g` slots, `N` columns looked at (all `Vd`, or the candidates), `r` head rank.
"""

from __future__ import annotations

import torch

from .arguments import Draws, GatedFeatures, MarkovDraw, MarkovTables, RecurrentFeatures
from .noise import gumbel_noise


def block(
    base_logits: torch.Tensor,
    anchor_ids: torch.Tensor,
    tables: MarkovTables,
    *,
    draws: Draws | None,
    candidates: torch.Tensor | None,
    with_law: bool,
) -> MarkovDraw:
    """All steps; arguments as the door's, `candidates` int64 `[B, g, k]` ascending or None for all columns."""
    rows, slots, width = base_logits.shape
    w2 = tables.w2.float() if candidates is None else tables.w2
    all_columns = torch.arange(width, device=base_logits.device).expand(rows, -1)
    law_logits = base_logits.new_full(base_logits.shape, -torch.inf, dtype=torch.float32) if with_law else None
    previous, tokens, log_probs = anchor_ids, [], []
    state = tables.features.state if isinstance(tables.features, RecurrentFeatures) else None
    for k in range(slots):
        columns = all_columns if candidates is None else candidates[:, k]
        features, state = _features(previous, tables, k, state)
        if candidates is None:
            logits = base_logits[:, k].float() + features @ w2.T
        else:
            bias = torch.einsum("bnr,br->bn", w2[columns].float(), features)
            logits = base_logits[:, k].gather(1, columns).float() + bias
        denied = None if tables.forbidden is None else tables.forbidden[columns]
        chosen, log_prob, law = _choose(logits, denied, columns, _at_step(draws, k))
        column = columns.gather(1, chosen[:, None])[:, 0]
        previous = column if tables.draft_token_ids is None else tables.draft_token_ids[column]
        tokens.append(previous)
        log_probs.append(log_prob)
        if law_logits is not None:
            law_logits[:, k].scatter_(1, columns, law)
    return MarkovDraw(torch.stack(tokens, dim=1), torch.stack(log_probs, dim=1), law_logits, state)


def _features(
    previous: torch.Tensor, tables: MarkovTables, k: int, state: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What `W2` is applied to in slot k, `[B, r]`, and the state after it; float32, with the bits of the weights."""
    embedded, how = torch.nn.functional.embedding(previous, tables.w1).float(), tables.features
    if how is None:
        return embedded, None
    if isinstance(how, GatedFeatures):
        features = gated_features(embedded @ how.weight.float().T + how.hidden[:, k].float(), embedded)
    else:
        assert state is not None
        joint = torch.cat([state, embedded], dim=-1) @ how.weight.float().T + how.hidden[:, k].float()
        features, state = recurrent_features(joint, state)
    return features.to(tables.w2.dtype).float(), state


def gated_features(gate: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
    """Features `[..., r]` of the gated head from what enters its sigmoid and the embedding; any float dtype."""
    return torch.sigmoid(gate) * embedded


def recurrent_features(joint: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Features `[..., r]` of the recurrent head and its next state, from `[gate; candidate; output] [..., 3r]`."""
    gate, candidate, output = joint.chunk(3, dim=-1)
    keep = torch.sigmoid(gate)
    return torch.tanh(output), keep * state + (1 - keep) * torch.tanh(candidate)


def _at_step(draws: Draws | None, k: int) -> Draws | None:
    if draws is None:
        return None
    if draws.noise is not None:
        return draws._replace(noise=draws.noise[:, k])
    return draws._replace(offsets=draws.offsets + k)  # type: ignore[operator, arg-type]


def _choose(
    logits: torch.Tensor, denied: torch.Tensor | None, columns: torch.Tensor, draws: Draws | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Position chosen among `[B, N]` logits, its log-probability, and the logits of the law."""
    if denied is not None:
        logits = logits.masked_fill(denied, -torch.inf)
    if draws is None:
        chosen = logits.argmax(-1)
        return chosen, _log_prob(logits - logits.amax(-1, keepdim=True), chosen), logits
    if draws.noise is not None:
        noise = draws.noise.gather(1, columns)
    else:
        noise = gumbel_noise(draws.seeds[:, None], draws.offsets[:, None], columns)  # type: ignore[index]
    logits = logits / draws.temperatures[:, None]
    has_law = logits.logsumexp(-1, keepdim=True).isfinite()
    uniform = torch.zeros_like(logits)
    if denied is not None:
        uniform = uniform.masked_fill(denied, -torch.inf)
    logits = torch.where(has_law, logits, uniform)
    relative = logits - logits.amax(-1, keepdim=True)  # near 0 float32 is fine enough for noise and log-probabilities
    chosen = (relative + noise).argmax(-1)
    return chosen, _log_prob(relative, chosen), logits


def _log_prob(relative: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    return relative.gather(1, chosen[:, None])[:, 0] - relative.logsumexp(-1)


__all__ = ["block", "gated_features", "recurrent_features"]
