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


def measured_verifier(sample: Sampler, dtype: torch.dtype = torch.float64, steps: int = 32) -> Verify:
    """One round's law (see `law.verifier`) as a sampler realises it on laws cast to `dtype`, to within `2**-steps`."""

    def verify(drafts: Text, draft_laws: Sequence[Law], target_laws: Sequence[Law]) -> TextLaw:
        slots, size = len(drafts), len(target_laws[0])
        ids = torch.tensor([drafts], dtype=torch.int64)
        draft_probs = torch.tensor([[[float(v) for v in law] for law in draft_laws]], dtype=dtype).view(1, slots, size)
        target_probs = torch.tensor([[[float(v) for v in law] for law in target_laws]], dtype=dtype)

        def run(uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            rows = len(uniforms)
            return sample(
                ids.expand(rows, -1),
                draft_probs.expand(rows, -1, -1),
                target_probs.expand(rows, -1, -1),
                torch.full((rows,), slots),
                uniforms,
            )

        stays = _stay_probabilities(run, slots, steps)
        next_laws = _next_laws(run, stays, size, steps)
        law: TextLaw = defaultdict(float)
        for count in range(slots + 1):
            weight = _weight(stays, count)
            for token, mass in enumerate(next_laws[count].tolist()):
                law[(*drafts[:count], token)] += weight * mass
        return law

    return verify


def _weight(stays: list[float], count: int) -> float:
    """Probability that exactly the first `count` drafts stay."""
    reached = 1.0
    for stay in stays[:count]:
        reached *= stay
    return reached * (1 - stays[count]) if count < len(stays) else reached


def _stay_probabilities(run: Callable, slots: int, steps: int) -> list[float]:
    """Largest uniform that keeps slot k when the earlier ones are kept (uniform 0), per slot."""
    slot = torch.arange(slots)

    def kept(uniform: torch.Tensor) -> torch.Tensor:
        return run(torch.cat([torch.diag(uniform), torch.zeros(slots, 1).double()], dim=1))[0] > slot

    return _supremum(kept, (slots,), steps).tolist()


def _next_laws(run: Callable, stays: list[float], size: int, steps: int) -> torch.Tensor:
    """Law of the next token after each accepted count, `[K + 1, V]`."""
    slots = len(stays)
    acceptance = torch.eye(slots + 1, dtype=torch.float64)[:, :slots] * BELOW_ONE  # row n: kept before n, refused at n

    def at_most(uniform: torch.Tensor) -> torch.Tensor:
        uniforms = torch.cat([acceptance[:, None].expand(-1, size, -1), uniform[..., None]], dim=-1)
        counts, ids = (t.view(slots + 1, size) for t in run(uniforms.flatten(0, 1)))
        for count in range(slots + 1):
            if _weight(stays, count) > _REACHED and not (counts[count] == count).all():
                raise ValueError(f"Expected {count} accepted drafts, got {counts[count].unique().tolist()}.")
        return ids <= torch.arange(size)

    cumulative = _supremum(at_most, (slots + 1, size), steps)
    return cumulative.diff(dim=-1, prepend=torch.zeros(slots + 1, 1).double())


def _supremum(passes: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, ...], steps: int) -> torch.Tensor:
    low, high = torch.zeros(shape, dtype=torch.float64), torch.ones(shape, dtype=torch.float64)
    for _ in range(steps):
        middle = (low + high) / 2
        passed = passes(middle)
        low, high = torch.where(passed, middle, low), torch.where(passed, high, middle)
    return high
