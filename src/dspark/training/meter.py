"""Figures of the steps since the last log: loss terms, acceptance per position, the expected accepted length.

Sums only, so that devices and steps add up; means are taken when they are read.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ..modeling_dspark import DSparkTrainingOutput


def expected_accepted_length(acceptance: torch.Tensor, supervised: torch.Tensor) -> torch.Tensor:
    """Expected tokens per round of each anchor, drafts verified by speculative sampling: float32 `[..., A]`.

    `1 + sum_k prod_{i<=k} acceptance_i`, the bonus token included. Teacher-forced: the real figure is a little lower,
    since a drafter then reads its own tokens. Unsupervised positions accept nothing.

    Args:
        acceptance: Probability that position k is accepted if all before it are, `[..., A, K]`.
        supervised: bool `[..., A, K]`.
    """
    return 1 + (acceptance * supervised).cumprod(-1).sum(-1)


class TrainingMeter:
    """Running sums over batches.

    Args:
        positions: Draft tokens of a block, K.
    """

    def __init__(self, positions: int) -> None:
        self.positions = positions
        self._sums: torch.Tensor | None = None
        self._tokens = 0
        self._started = time.monotonic()

    @torch.no_grad()
    def add(self, output: DSparkTrainingOutput, weight: torch.Tensor, tokens: int) -> None:
        """Count one batch.

        Args:
            output: Of the drafter's training forward.
            weight: Sum of the batch's position weights, the denominator of its loss terms.
            tokens: Tokens of the batch, padding left out.
        """
        terms = torch.stack([output.ce_loss, output.l1_loss, output.confidence_loss]).float() * weight  # type: ignore[list-item]
        supervised = output.supervised.flatten(0, -2)  # type: ignore[union-attr]
        blocks = supervised.any(-1)
        acceptance = torch.zeros_like(supervised, dtype=torch.float32)
        if output.acceptance is not None:
            acceptance = output.acceptance.flatten(0, -2)
        narrower = (0, self.positions - supervised.shape[1])  # blocks of fewer drafts
        supervised, acceptance = (torch.nn.functional.pad(each, narrower) for each in (supervised, acceptance))
        has_law = blocks.sum() if output.acceptance is not None else blocks.sum() * 0
        lengths = (expected_accepted_length(acceptance, supervised) * blocks).sum()
        scalars = torch.stack([*terms, weight, has_law.float(), lengths])
        sums = torch.cat([scalars, (acceptance * supervised).sum(0), supervised.sum(0)])
        self._sums = sums if self._sums is None else self._sums + sums
        self._tokens += tokens

    def skip(self, seconds: float) -> None:
        """Leave time that was spent on something else out of the rate."""
        self._started += seconds

    def read(self, reduce: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """Means of what was counted, then start over; empty when nothing was.

        Args:
            reduce: Adds the sums of all devices, e.g. `accelerator.reduce`.
        """
        if self._sums is None:
            return {}
        elapsed = time.monotonic() - self._started
        tokens = torch.tensor([float(self._tokens)], device=self._sums.device)
        *sums, total = reduce(torch.cat([self._sums, tokens])).tolist()
        ce, l1, confidence, weight, blocks, lengths = sums[:6]
        weight = max(weight, 1e-9)
        result = {"ce_loss": ce / weight, "l1_loss": l1 / weight, "confidence_loss": confidence / weight}
        if blocks:
            result["tau"] = lengths / blocks
            accepted, counted = sums[6 : 6 + self.positions], sums[6 + self.positions :]
            for k, (a, n) in enumerate(zip(accepted, counted, strict=True), 1):
                if n:
                    result[f"acceptance_{k}"] = a / n
        result["tokens_per_second"] = total / max(elapsed, 1e-9)
        self._sums, self._tokens, self._started = None, 0, time.monotonic()
        return result


__all__ = ["TrainingMeter", "expected_accepted_length"]
