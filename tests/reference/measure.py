"""The law of a tensor rejection sampler, measured from outside by bisecting its uniforms: no sampling error.

Works for any implementation that takes its uniforms and inverts the CDF in index order, so for kernels too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from .law import Text, TextLaw, Verify
from .rejection import Law

# (draft_ids [B, K], draft_probs [B, K, V], target_probs [B, K + 1, V], lengths [B], uniforms [B, K + 1])
# -> accepted counts [B], next ids [B]
Sampler: TypeAlias = Callable[..., tuple[torch.Tensor, torch.Tensor]]

BELOW_ONE = 1 - 2.0**-24  # the largest float32 below 1
_REACHED = 1e-6  # below this an outcome may never occur (`BELOW_ONE` does not get there), so nothing is asked of it


def measured_verifier(sample: Sampler, dtype: torch.dtype = torch.float64, steps: int = 25) -> Verify:
    """One round's law (see `law.verifier`) as a sampler realises it on laws cast to `dtype`, to within `2**-steps`."""

    def verify(drafts: Text, draft_laws: Sequence[Law], target_laws: Sequence[Law]) -> TextLaw:
        slots, size = len(drafts), len(target_laws[0])
        ids = torch.tensor([drafts], dtype=torch.int64)
        draft_probs = torch.tensor([[[float(v) for v in law] for law in draft_laws]], dtype=dtype).view(1, slots, size)
        target_probs = torch.tensor([[[float(v) for v in law] for law in target_laws]], dtype=dtype)

        def run(uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            n = len(uniforms)
            lengths = torch.full((n,), slots)
            return sample(
                ids.expand(n, -1), draft_probs.expand(n, -1, -1), target_probs.expand(n, -1, -1), lengths, uniforms
            )

        return _assemble(drafts, *_measure(run, slots, size, steps))

    return verify


def _measure(run: Callable, slots: int, size: int, steps: int) -> tuple[list[float], torch.Tensor, torch.Tensor]:
    """Per slot its stay probability; per accepted count the next token's law `[K + 1, V]` and the counts seen there.

    Rows 0 .. K-1 bisect the uniform of one slot, the earlier ones kept by uniform 0: the largest that keeps it. The
    others, one per count n and token v, refuse slot n and bisect the last uniform: the largest with a token <= v.
    """
    refused = torch.arange(slots + 1).repeat_interleave(size)
    start = torch.zeros(slots + len(refused), slots + 1, dtype=torch.float64)
    start[slots:, :slots] = torch.eye(slots + 1)[refused, :slots] * BELOW_ONE
    column = torch.cat([torch.arange(slots), torch.full((len(refused),), slots)])[:, None]
    low, high = torch.zeros(len(start), 1).double(), torch.ones(len(start), 1).double()
    for _ in range(steps):
        middle = (low + high) / 2
        counts, ids = run(start.scatter(1, column, middle))
        kept = counts[:slots] > torch.arange(slots)
        below = ids[slots:] <= torch.arange(size).repeat(slots + 1)
        passed = torch.cat([kept, below])[:, None]
        low, high = torch.where(passed, middle, low), torch.where(passed, high, middle)
    cumulative = high[slots:].view(slots + 1, size)
    next_laws = cumulative.diff(dim=-1, prepend=torch.zeros(slots + 1, 1).double())
    return high[:slots, 0].tolist(), next_laws, counts[slots:].view(slots + 1, size)


def _assemble(drafts: Text, stays: list[float], next_laws: torch.Tensor, counts: torch.Tensor) -> TextLaw:
    law: TextLaw = defaultdict(float)
    reached = 1.0
    for count, stay in enumerate([*stays, 0.0]):
        weight = reached * (1 - stay)
        if weight > _REACHED and not (counts[count] == count).all():
            raise ValueError(f"Expected {count} accepted drafts, got {counts[count].tolist()}.")
        for token, mass in enumerate(next_laws[count].tolist()):
            law[(*drafts[:count], token)] += weight * mass
        reached *= stay
    return law
