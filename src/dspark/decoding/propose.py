"""Step 3: the sequential head repairs the block left to right; out come tokens and the exact law of each draw.

The law is what the token was drawn from, after transition bias, processors and temperature, in float32: any other law
handed to verification would bias sampled output.
"""

from __future__ import annotations

import torch

from ..modeling_dspark import DraftBlock
from .state import DecodingRun, Proposal


def propose(run: DecodingRun, block: DraftBlock) -> Proposal:
    """Walk the block; greedy without sampling, else a draw per slot."""
    laws: list[torch.Tensor] = []
    drafter, processors = run.drafter, run.processors
    needs_prefix = bool(processors.draft) and not processors.draft_is_row_wise
    vocabulary = run.vocabulary
    vocab = drafter.config.vocab_size

    def choose(_k: int, logits: torch.Tensor, tokens: list[torch.Tensor]) -> torch.Tensor:
        if processors.draft:
            prefixes = _prefixes(run, tokens) if needs_prefix else {}
            logits = processors.process_draft(prefixes, logits.float(), drafter.draft_token_ids, vocab)
        if vocabulary.forbidden is not None:
            logits = logits.masked_fill(vocabulary.forbidden, -torch.inf)
        if not run.do_sample:
            return drafter.to_target_ids(logits.argmax(-1))
        probs = _law(logits.float(), vocabulary.forbidden)
        laws.append(probs if vocabulary.kept is None else probs[:, vocabulary.kept])
        return drafter.to_target_ids(torch.multinomial(probs, 1)[:, 0])

    with run.stats.forward("drafter"):
        anchors = torch.tensor(run.anchors, device=block.hidden.device)
        walk = drafter.walk_block(block, anchors, choose)
    return Proposal(walk.token_ids, walk.previous_ids, torch.stack(laws, dim=1) if laws else None)


def _law(logits: torch.Tensor, forbidden: torch.Tensor | None) -> torch.Tensor:
    """Softmax of draft scores `[B, Vd]`; where no token is left (all -inf, NaN), uniform over those with a row."""
    uniform = torch.zeros_like(logits)
    if forbidden is not None:
        uniform = uniform.masked_fill(forbidden, -torch.inf)
    probs = logits.softmax(-1)
    return torch.where(probs.isnan().any(-1, keepdim=True), uniform.softmax(-1), probs)


def _prefixes(run: DecodingRun, tokens: list[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Each live row's text with the drafts so far behind it, `[1, n_b + k]`."""
    drafted = torch.stack(tokens, dim=1).to(run.device) if tokens else None
    prefixes = {}
    for b, row in enumerate(run.rows):
        text = run.text.prefix(row)
        prefixes[row] = text if drafted is None else torch.cat([text, drafted[b : b + 1]], dim=1)
    return prefixes


__all__ = ["propose"]
