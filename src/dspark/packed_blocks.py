"""The orders a packed weight's numbers can lie in, and the product on each (see `packed_weight.py`).

Few rows make a product wait for its weight, so bytes are time. Weights that a checkpoint stored in bfloat16 or float16
fit into 16 bits bit for bit, whatever dtype they were loaded in; those are kept so, and multiplied in float32.
"""

from __future__ import annotations

from typing import Protocol

import torch

# Rows oneDNN is told to expect. 8 was as fast as any other hint from 1 to 512 rows, and with hints from 4 up a row's
# result does not depend, bit for bit, on how many rows are computed at once. A hint of 1 leaves rows unblocked and
# loses both.
_EXPECTED_ROWS = 8
# The largest magnitude is brought to 2**14 or above: bfloat16's 8 significant bits fit 31 octaves down, to 2**-17.
_TOP_EXPONENT = 15
_LARGEST_EXPONENT = 100


class Blocks(Protocol):
    """A weight `[N, K]`.

    Attributes:
        takes: Dtype of the product's inputs, bias and result.
        nbytes: Memory.
        form: What it is, in words.
    """

    takes: torch.dtype
    nbytes: int
    form: str

    def dense(self) -> torch.Tensor:
        """The numbers, bit for bit: `[N, K]` in `takes`."""
        ...

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`x W^T + b` for `x [..., K]`."""
        ...


class OneDNNBlocks:
    """oneDNN's own order, in the dtype of the product."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.takes = weight.dtype
        self.form = f"packed for oneDNN in {str(weight.dtype).removeprefix('torch.')}"
        self._blocks = torch.ops.mkldnn._reorder_linear_weight(weight, _EXPECTED_ROWS)
        self.nbytes: int = torch.ops.mkldnn._nbytes(self._blocks)

    def dense(self) -> torch.Tensor:
        """See [`Blocks`]."""
        return self._blocks.to_dense()

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See [`Blocks`]."""
        return torch.ops.mkldnn._linear_pointwise.default(x, self._blocks, bias, "none", [], "")


class HalfBlocks:
    """FBGEMM's order: float16 numbers times a power of two, inputs, sums and results in float32."""

    takes = torch.float32
    form = "packed in float16 (exact), multiplied in float32"

    def __init__(self, weight: torch.Tensor) -> None:
        exponent = half_exponent(weight)
        if exponent is None:
            raise ValueError("These numbers do not fit into float16.")
        self._blocks = torch.ops.quantized.linear_prepack_fp16(weight.float() * 2.0**exponent, None)
        self._factor = 2.0**-exponent
        self.nbytes = 2 * weight.numel()

    def dense(self) -> torch.Tensor:
        """See [`Blocks`]."""
        return torch.ops.quantized.linear_unpack_fp16(self._blocks)[0].float().mul_(self._factor)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See [`Blocks`]."""
        if x.dim() == 1:
            return self.product(x[None], bias)[0]
        result = torch.ops.quantized.linear_dynamic_fp16(x, self._blocks)
        if self._factor != 1:
            result.mul_(self._factor)  # exact: a power of two
        return result if bias is None else result.add_(bias)


def half_exponent(weight: torch.Tensor) -> int | None:
    """k such that every number times 2**k is a float16; None: there is none."""
    weight = weight.detach()
    if weight.dtype == torch.float16 or _is_half(weight):
        return 0 if bool(weight.isfinite().all()) else None
    largest = float(weight.abs().amax())
    if not 0 < largest < torch.inf:
        return None
    exponent = _TOP_EXPONENT - int(torch.frexp(torch.tensor(largest, dtype=torch.float64)).exponent)
    # Beyond it a factor or what it multiplies would leave float32.
    is_safe = abs(exponent) <= _LARGEST_EXPONENT
    return exponent if is_safe and _is_half(weight.float() * 2.0**exponent) else None


def _is_half(weight: torch.Tensor) -> bool:
    return torch.equal(weight.half().to(weight.dtype), weight)


def pack(weight: torch.Tensor, dtype: torch.dtype) -> Blocks:
    """Blocks of a plain `weight [N, K]` whose numbers `dtype` holds."""
    return HalfBlocks(weight) if dtype == torch.float16 else OneDNNBlocks(weight.to(dtype))


def why_not_half() -> str | None:
    """Why this build has no [`HalfBlocks`], in torch's own words; None: it has."""
    return _why_not(HalfBlocks, torch.float32)


def why_not_onednn(dtype: torch.dtype) -> str | None:
    """Why this build or CPU has no [`OneDNNBlocks`] of this dtype, in oneDNN's own words; None: it has."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return "this build of torch has no oneDNN linear products"
    return _why_not(OneDNNBlocks, dtype)


def _why_not(kind: type[OneDNNBlocks] | type[HalfBlocks], dtype: torch.dtype) -> str | None:
    weight = torch.arange(48.0).view(16, 3).to(dtype)
    try:
        blocks = kind(weight)
        blocks.product(weight.new_ones(2, 3), None)
        is_exact = torch.equal(blocks.dense(), weight)
    except (RuntimeError, AttributeError) as error:  # AttributeError: an operator this build does not know
        return str(error)
    return None if is_exact else f"{dtype} weights are not unpacked bit for bit"


__all__ = ["Blocks", "HalfBlocks", "OneDNNBlocks", "half_exponent", "pack", "why_not_half", "why_not_onednn"]
