"""`PackedWeight` and `PackedLinear`: a linear layer whose weight lies in the order of its products (see `cpu.py`).

The layer keeps its identity and its `weight` attribute: shape, dtype and device as before, reading gives the plain
numbers, `F.linear` runs on the blocks, and whatever would write to, move or copy them is refused with a reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import nn
from torch.utils._pytree import tree_map_only

from .packed_blocks import Blocks

_REFUSED = "{} a packed weight is refused: {}. Undo the packing first (`handle.restore()`)."
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_NEEDS_STORAGE = {"share_memory_", "pin_memory", "data_ptr", "storage", "untyped_storage", "_typed_storage"}


class PackedWeight(torch.Tensor):
    """A linear layer's weight `[N, K]` in blocks.

    It stands where the plain parameter stood, except for a tied one, which stays, the blocks being a second copy.

    Attributes:
        blocks: Its numbers in the order of the product.
        original: The plain parameter, emptied unless tied. The object lives on, so that an optimizer finds it again.
        is_tied: Whether an embedding or another module needs the plain rows.
    """

    blocks: Blocks
    original: nn.Parameter
    is_tied: bool
    _stamp: tuple[int, int]

    @staticmethod
    def wrap(shape: torch.Size, blocks: Blocks, original: nn.Parameter, *, is_tied: bool) -> PackedWeight:
        """A packed weight of this plain shape; without gradient and not yet a parameter."""
        weight = torch.Tensor._make_wrapper_subclass(PackedWeight, shape, dtype=original.dtype, device=original.device)
        weight.blocks, weight.original, weight.is_tied = blocks, original, is_tied
        weight._stamp = _stamp(original)
        return weight

    def dense(self) -> torch.Tensor:
        """The plain weight `[N, K]`, bit for bit: the tied rows themselves, else a fresh copy."""
        return self.original.detach() if self.is_tied else self.blocks.dense().to(self.original.dtype)

    def stands_for(self, parameter: nn.Parameter | None) -> bool:
        """Whether the blocks hold what this parameter of a layer holds: itself, or the tied one as it was packed."""
        return parameter is self or (parameter is self.original and self.is_tied and _stamp(parameter) == self._stamp)

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and isinstance(args[1], PackedWeight):
            return packed_linear(*args, **kwargs or {})
        if func is torch.Tensor.__setitem__ or (func == _SET_DATA and args[0] is not args[1]):
            raise RuntimeError(_REFUSED.format("Writing to", "the blocks would not follow"))
        if getattr(func, "__name__", None) in _NEEDS_STORAGE:
            raise RuntimeError(_REFUSED.format("Using the memory of", "it holds blocks, not rows"))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            old = args[0]
            return cls.wrap(old.shape, old.blocks, old.original, is_tied=old.is_tied)
        if func is torch.ops.aten._to_copy.default:
            raise RuntimeError(_REFUSED.format("Moving or casting", "its blocks fit this CPU and their dtype"))
        if func._schema.is_mutable:
            raise RuntimeError(_REFUSED.format("Writing to", f"{func} would not reach the blocks"))
        args, kwargs = tree_map_only(PackedWeight, PackedWeight.dense, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise RuntimeError(_REFUSED.format("Copying", "the copy could not be restored"))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(
            _REFUSED.format("Pickling", "its blocks fit this CPU; `state_dict()` has the plain weights")
        )

    def __repr__(  # type: ignore[override]
        self, *, tensor_contents: Any = None
    ) -> str:
        return f"PackedWeight(shape={tuple(self.shape)}, dtype={self.dtype}, is_tied={self.is_tied})"


class PackedLinear(nn.Linear):
    """What an `nn.Linear` turns into while its weight is packed: the same object, with a short way to the product."""

    packed: PackedWeight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x W^T + b` for `x [..., K]` in the layer's dtype; see [`packed_linear`]."""
        weight = self._parameters["weight"]
        if self.packed.stands_for(weight):
            return packed_linear(x, self.packed, self._parameters["bias"], parameter=weight)
        return F.linear(x, self.weight, self.bias)  # changed or replaced since: the plain rows are right

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if isinstance(destination[f"{prefix}weight"], PackedWeight):
            destination[f"{prefix}weight"] = self.packed.dense()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise RuntimeError(_REFUSED.format("Copying", "the copy could not be restored"))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(
            _REFUSED.format("Pickling", "its blocks fit this CPU; `state_dict()` has the plain weights")
        )


def packed_linear(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None = None,
    *,
    parameter: torch.Tensor | None = None,
) -> torch.Tensor:
    """`x W^T + b` on the blocks.

    Args:
        x: `[..., K]` in the weight's plain dtype. Gradients reach it through a frozen weight.
        weight: `[N, K]`.
        bias: `[N]`.
        parameter: The layer's parameter, where it is not `weight` itself; if it requires a gradient, the backward pass
            is an error.

    Raises:
        RuntimeError: `x` has another dtype or width.
    """
    if torch.is_grad_enabled():
        return _WithInputGradient.apply(x, weight if parameter is None else parameter, bias, weight)
    return _product(x, weight, bias)


def _product(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    if torch.compiler.is_compiling():  # ends the graph here, so that the product runs outside of it
        raise RuntimeError("Packed linear layers cannot be part of a compiled graph: compile the plain model instead.")
    blocks, dtype = weight.blocks, weight.original.dtype
    if x.dtype != dtype or x.shape[-1] != weight.shape[1]:
        raise RuntimeError(
            f"A packed linear layer takes {dtype} inputs [..., {weight.shape[1]}], got {x.dtype} {list(x.shape)}. "
            "Under autocast, use the model unpacked, or pack one that was loaded in the dtype you want."
        )
    if blocks.takes == dtype:
        return blocks.product(x, bias)
    return blocks.product(x.to(blocks.takes), None if bias is None else bias.to(blocks.takes)).to(dtype)


def _stamp(parameter: torch.Tensor) -> tuple[int, int]:
    """Changes when the parameter is written to in place or given other memory."""
    return 0 if parameter.is_inference() else parameter._version, parameter.data_ptr()


class _WithInputGradient(torch.autograd.Function):
    """Gradients pass through a frozen packed layer to its input (and bias); asking for the weight's is an error."""

    @staticmethod
    def forward(  # `parameter` is there for `needs_input_grad`
        ctx: Any,
        x: torch.Tensor,
        parameter: torch.Tensor,  # noqa: ARG004
        bias: torch.Tensor | None,
        weight: PackedWeight,
    ) -> torch.Tensor:
        ctx.weight = weight
        return _product(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        if needs_weight:
            raise RuntimeError(
                "The backward pass reached a packed linear layer whose weight requires a gradient; packed layers are "
                "for inference. Undo the packing before training (`handle.restore()`), or freeze the model it belongs "
                "to (`model.requires_grad_(False)`): gradients then pass through the layer to its input."
            )
        grad_x = grad @ ctx.weight.dense() if needs_x else None
        return grad_x, None, grad.reshape(-1, grad.shape[-1]).sum(0) if needs_bias else None, None


__all__ = ["PackedLinear", "PackedWeight", "packed_linear"]
