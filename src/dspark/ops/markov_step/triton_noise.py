"""Kernel helpers: Gumbel noise from counters, bit for bit the uniforms of `noise.py`."""

# mypy: allow-untyped-defs
import triton
import triton.language as tl


@triton.jit
def gumbel(seeds, offsets, columns):
    """Standard Gumbel noise of int32 `columns`; `seeds` and `offsets` int64, broadcast against them."""
    zero = (columns + offsets.to(tl.int32)) * 0
    counter_low, counter_high = offsets.to(tl.int32) + zero, (offsets >> 32).to(tl.int32) + zero
    word_high, word_low, _, _ = tl.philox(seeds, columns + zero, counter_low, counter_high, zero)
    w = word_high.to(tl.float32) * 2.3283064365386963e-10  # 2^-32
    w += word_low.to(tl.float32) * 5.421010862427522e-20 + 2.710505431213761e-20  # 2^-64, 2^-65
    w = tl.minimum(w, 0.99999994)  # 1 - 2^-24
    series = w * (1 + w * (0.5 + w * (1 / 3 + w * (0.25 + w * (0.2 + w * (1 / 6))))))
    return -tl.log(tl.where(w < 0.0625, series, -tl.log(1 - w)))
