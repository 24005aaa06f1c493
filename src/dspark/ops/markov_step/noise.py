"""Gumbel noise from counters: Philox 4x32-10, as Triton's `tl.philox`, in torch.

One 64-bit uniform per column. A 24-bit one would not do: among 262,144 columns the largest noise is decided near the
end of the uniform, where 24 bits leave ties that would go to the lower column and bias the draw.
"""

from __future__ import annotations

import torch

_WORD = 0xFFFFFFFF
_KEYS = (0x9E3779B9, 0xBB67AE85)
_FACTORS = (0xD2511F53, 0xCD9E8D57)


def gumbel_noise(seeds: torch.Tensor, offsets: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise of `columns`.

    Args:
        seeds, offsets: int64, broadcast against `columns`.
        columns: int64, 0 or more.

    Returns:
        float32 in (-2.9, 45), in the broadcast shape.
    """
    counter = [columns & _WORD, offsets & _WORD, (offsets >> 32) & _WORD, torch.zeros_like(columns)]
    words = philox(counter, [seeds & _WORD, (seeds >> 32) & _WORD])
    return _gumbel(words[0], words[1])


def philox(counter: list[torch.Tensor], key: list[torch.Tensor]) -> list[torch.Tensor]:
    """Philox 4x32-10 on 32-bit words held in int64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # The products wrap around in int64, which leaves all their 64 bits in place.
        low, high = _FACTORS[0] * c0, _FACTORS[1] * c2
        c0, c1 = ((high >> 32) & _WORD) ^ c1 ^ k0, high & _WORD
        c2, c3 = ((low >> 32) & _WORD) ^ c3 ^ k1, low & _WORD
        k0, k1 = (k0 + _KEYS[0]) & _WORD, (k1 + _KEYS[1]) & _WORD
    return [c0, c1, c2, c3]


def _gumbel(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """`-log(-log(1 - w))` of the uniform w = high / 2^32 + low / 2^64, to float32 precision at both ends."""
    w = high.float() * 2.0**-32 + (low.float() * 2.0**-64 + 2.0**-65)
    w = w.clamp(max=1 - 2.0**-24)  # 1 - w stays positive
    series = w * (1 + w * (1 / 2 + w * (1 / 3 + w * (1 / 4 + w * (1 / 5 + w / 6)))))
    return -torch.where(w < 2.0**-4, series, -torch.log(1 - w)).log()


__all__ = ["gumbel_noise", "philox"]
