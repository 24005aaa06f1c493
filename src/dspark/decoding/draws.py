"""Where random numbers come from: torch's global generator, or one generator per row that no other row touches.

With generators of their own, rows are reproducible whatever batch they are in: a row takes from its generator what it
would take alone, drafts and verdicts from streams of their own (in a batch, rows also draft where alone they would
have no room to), and turns the numbers into tokens by itself. Only a policy that weighs rows against each other still
ties them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .rejection import draw, uniform_dtype

_SEEDS = 2**63 - 1


class Draws:
    """The random numbers of one `generate` call.

    Args:
        generators: One per row, on any device; each is advanced by two draws. None: the global generator.
    """

    def __init__(self, generators: Sequence[torch.Generator] | None = None) -> None:
        self._drafts = None if generators is None else [_child(generator) for generator in generators]
        self._verdicts = None if generators is None else [_child(generator) for generator in generators]

    def drafts(self, rows: Sequence[int], probs: torch.Tensor) -> torch.Tensor:
        """A draft per row from laws `[B, V]`, int64 `[B]`; `rows` are original indices."""
        return _sample(self._drafts, rows, probs)

    def seeds(self, rows: Sequence[int], device: torch.device) -> torch.Tensor:
        """A seed per row for all drafts of a block, int64 `[B]`, where the draws are an op's own."""
        if self._drafts is None:
            return torch.randint(_SEEDS, (len(rows),), device=device)
        return torch.tensor([_seed(self._drafts[row]) for row in rows], device=device)

    def tokens(self, rows: Sequence[int], probs: torch.Tensor) -> torch.Tensor:
        """A token of the target's own per row from laws `[B, V]`, int64 `[B]`."""
        return _sample(self._verdicts, rows, probs)

    def uniforms(self, rows: Sequence[int], lengths: Sequence[int], device: torch.device) -> torch.Tensor | None:
        """Uniforms for `rejection_sample`, `[B, K + 1]`, K the longest of `lengths`; None without generators.

        A row takes one for each of its own drafts and one for the token behind them, which is the last column.
        """
        if self._verdicts is None:
            return None
        uniforms = torch.zeros(len(rows), max(lengths) + 1, dtype=torch.float64)
        for b, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            taken = _uniforms(self._verdicts[row], length + 1)
            uniforms[b, :length], uniforms[b, -1] = taken[:-1], taken[-1]
        return uniforms.to(device, uniform_dtype(device))


def check_generators(generators: object, num_rows: int) -> None:
    """Refuse anything but one generator per row.

    Raises:
        ValueError: Names what came and how many are needed.
    """
    if generators is None:
        return
    are_generators = isinstance(generators, list | tuple) and all(isinstance(g, torch.Generator) for g in generators)
    if not are_generators:
        raise ValueError(f"`row_generators` must be a list of torch.Generator, one per row, got {generators!r}.")
    if len(generators) != num_rows:  # type: ignore[arg-type]
        raise ValueError(
            f"`row_generators` has {len(generators)} generators for {num_rows} rows. "  # type: ignore[arg-type]
            "Pass one per row: prompts times `num_return_sequences`, the sequences of one prompt next to each other."
        )


def _sample(generators: list[torch.Generator] | None, rows: Sequence[int], probs: torch.Tensor) -> torch.Tensor:
    if generators is None:
        return torch.multinomial(probs, 1)[:, 0]
    uniforms = torch.cat([_uniforms(generators[row], 1) for row in rows])
    return draw(probs, uniforms.to(probs.device, uniform_dtype(probs.device)))


def _uniforms(generator: torch.Generator, count: int) -> torch.Tensor:
    """In [0, 1), float64 `[count]` on the CPU."""
    device = generator.device
    return torch.rand(count, dtype=uniform_dtype(device), device=device, generator=generator).cpu().double()


def _seed(generator: torch.Generator) -> int:
    return int(torch.randint(_SEEDS, (1,), generator=generator, device=generator.device))


def _child(generator: torch.Generator) -> torch.Generator:
    return torch.Generator(generator.device).manual_seed(_seed(generator))


__all__ = ["Draws", "check_generators"]
