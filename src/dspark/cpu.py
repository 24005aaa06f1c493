"""`optimize_for_cpu`: a model's linear layers prepacked for oneDNN, so that small batches decode fast on a CPU.

A packed layer is still the same `nn.Linear`, whose `weight` is a `PackedWeight`: shape, dtype and device as before, the
numbers in oneDNN's blocked order, the plain rows freed. `F.linear` runs on the blocks, reading gives the plain weight,
writing is refused. Opt-in, for inference, undone by the handle. It changes rounding, never the numbers stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from .target import describe, unwrap

# Rows oneDNN is told to expect. 8 was as fast as any hint from 1 to 512 rows, and all hints from 4 up gave rows that do
# not depend, bit for bit, on how many are computed at once; a hint of 1 leaves the weight unblocked and loses both.
_EXPECTED_ROWS = 8
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Dtypes of quantised weights; token ids and masks are int64 and bool.
_CODE_DTYPES = (
    torch.int8, torch.uint8, torch.int16, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_REFUSED = "{} a packed weight is refused: {}. Undo the packing first (`handle.restore()`)."


class PackedWeight(torch.Tensor):
    """A linear layer's weight `[N, K]` in oneDNN's blocked order, standing where the plain parameter stood.

    Attributes:
        blocks: The oneDNN tensor, in the dtype the product is computed in.
        original: The parameter it stands for: emptied (its identity lives on, so optimizers find it again), or whole
            where `is_tied`.
        is_tied: Whether an embedding or another module needs the plain rows, so that the blocks are a second copy.
    """

    blocks: torch.Tensor
    original: nn.Parameter
    is_tied: bool

    @staticmethod
    def __new__(cls, shape: torch.Size, blocks: torch.Tensor, original: nn.Parameter, is_tied: bool) -> PackedWeight:
        weight = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=original.dtype, device=original.device)
        weight.blocks, weight.original, weight.is_tied = blocks, original, is_tied
        return weight

    def dense(self) -> torch.Tensor:
        """The plain weight `[N, K]`, bit for bit: the tied rows themselves, else a fresh copy."""
        return self.original.detach() if self.is_tied else self.blocks.to_dense().to(self.original.dtype)

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            return _linear(*args, **kwargs)
        if func is torch.Tensor.__setitem__ or (func == _SET_DATA and args[0] is not args[1]):
            raise RuntimeError(_REFUSED.format("Writing to", "the blocks would not follow"))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            old = args[0]
            return cls(old.shape, old.blocks, old.original, old.is_tied)
        if func is torch.ops.aten._to_copy.default:
            raise RuntimeError(_REFUSED.format("Moving or casting", "blocks stay in their dtype, on the CPU"))
        if func._schema.is_mutable:
            raise RuntimeError(_REFUSED.format("Writing to", f"{func} would not reach the blocks"))
        args, kwargs = torch.utils._pytree.tree_map_only(PackedWeight, PackedWeight.dense, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise RuntimeError(_REFUSED.format("Copying", "a deep copy would share its blocks with this model"))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(_REFUSED.format("Pickling", "blocks fit one CPU; `state_dict()` holds the plain weights"))

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"PackedWeight(shape={tuple(self.shape)}, dtype={self.dtype}, is_tied={self.is_tied})"


def _linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    if not isinstance(weight, PackedWeight):  # the packed weight is the input or the bias of somebody else's product
        x, bias = (t.dense() if isinstance(t, PackedWeight) else t for t in (x, bias))
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)):
        return _LinearWithInputGradient.apply(x, weight, bias)
    return _product(x, weight, bias)


def _product(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    dtype = weight.original.dtype
    blocks = weight.blocks
    if x.dtype != dtype or x.shape[-1] != blocks.shape[1]:
        raise RuntimeError(
            f"A packed linear layer takes {dtype} inputs [..., {blocks.shape[1]}], got {x.dtype} "
            f"{list(x.shape)}. Under autocast, use the model unpacked, or pack a model loaded in the dtype you want."
        )
    if blocks.dtype != dtype:
        wide_bias = None if bias is None else bias.to(blocks.dtype)
        wide = torch.ops.mkldnn._linear_pointwise.default(x.to(blocks.dtype), blocks, wide_bias, "none", [], "")
        return wide.to(dtype)
    return torch.ops.mkldnn._linear_pointwise.default(x, blocks, bias, "none", [], "")


class _LinearWithInputGradient(torch.autograd.Function):
    """Gradients reach the input (and the bias) through a frozen packed layer; asking for the weight's is an error."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.weight = weight
        return _product(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None, torch.Tensor | None]:
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        if needs_weight:
            raise RuntimeError(
                "The backward pass reached a packed linear layer whose weight requires a gradient; packed layers are "
                "for inference. Undo the packing before training (`handle.restore()`), or freeze the model it belongs "
                "to (`model.requires_grad_(False)`): gradients then pass through to the layer's input."
            )
        grad_x = grad @ ctx.weight.dense() if needs_x else None
        return grad_x, None, grad.flatten(0, -2).sum(0) if needs_bias else None


class PackedLinears:
    """What `optimize_for_cpu` did, and the way back; a context manager that restores at its end.

    Attributes:
        packed: Names of the packed layers.
        skipped: Layers left as they are, name to reason.
        extra_bytes: Memory in use beyond the plain model's: second copies of tied matrices, wider dtypes, padding.
    """

    def __init__(self, skipped: dict[str, str]) -> None:
        self.packed: list[str] = []
        self.skipped = skipped
        self.extra_bytes = 0
        self._layers: list[tuple[nn.Linear, PackedWeight, Any]] = []

    def __enter__(self) -> PackedLinears:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()

    def restore(self) -> None:
        """Give every layer this handle packed its plain parameter back: the same object, bit for bit, tied as before.

        Needs no more memory than one layer beyond the model's. A second call does nothing.
        """
        with torch.inference_mode(False), torch.no_grad():
            while self._layers:
                layer, weight, hook = self._layers.pop()
                hook.remove()
                original = weight.original
                if not weight.is_tied and original.numel() == 0:
                    original.data = weight.dense()
                    original.requires_grad_(weight.requires_grad)
                if layer._parameters.get("weight") is weight:  # else the user put another weight there: keep that
                    layer.weight = original
        self.extra_bytes = 0

    def _pack(
        self, layers: dict[str, nn.Linear], original: nn.Parameter, *, is_tied: bool, dtype: torch.dtype
    ) -> None:
        """Pack one parameter, of which every layer of `layers` is a user."""
        blocks = torch.ops.mkldnn._reorder_linear_weight(original.detach().to(dtype), _EXPECTED_ROWS)
        weight = nn.Parameter(PackedWeight(original.shape, blocks, original, is_tied), original.requires_grad)
        assert isinstance(weight, PackedWeight)
        self.extra_bytes += torch.ops.mkldnn._nbytes(blocks) - (0 if is_tied else original.nbytes)
        for name, layer in layers.items():
            layer.weight = weight
            self._layers.append((layer, weight, layer.register_state_dict_post_hook(_write_plain_weight)))
            self.packed.append(name)
        if not is_tied:
            original.data = original.new_empty(0)


def _write_plain_weight(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    weight = state_dict.get(f"{prefix}weight")
    if isinstance(weight, PackedWeight):
        state_dict[f"{prefix}weight"] = weight.dense()


def optimize_for_cpu(model: Any, *, dtype: torch.dtype | None = None) -> PackedLinears:
    """Pack the linear layers of a target or drafter for small-batch decoding on a CPU, until the handle restores them.

    The plain weights are freed, one layer at a time. A matrix that is also an embedding (a tied LM head) is packed as a
    second copy, counted in `handle.extra_bytes`. Layers already packed stay with the handle that packed them. While
    packed, `state_dict()` and `save_pretrained` give the plain weights (a full copy, as long as it is held);
    `load_state_dict`, `model.to(...)`, deep copies, pickling and gradients of packed weights are errors.

    Args:
        model: A `PreTrainedModel` on the CPU, bare or wrapped (PEFT). GPT-2's `Conv1D` layers are left alone.
        dtype: Dtype of the packed weights and of the product; None is each layer's own. `torch.float32` packs bfloat16
            or float16 layers for a CPU without such products: exact, activations keep their dtype, twice the memory.

    Returns:
        The handle. Keep it, or use it as a context manager: nothing else can restore the model.

    Raises:
        TypeError: Not a `PreTrainedModel`.
        ValueError: A layer is quantised or not a plain tensor, not on the CPU, or of an unsupported dtype; or `dtype`
            would round weights; or there is nothing to pack.
        RuntimeError: This build of torch or this CPU lacks the oneDNN products.
    """
    model = unwrap(model)
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"`optimize_for_cpu` takes a transformers model (`PreTrainedModel`), got {type(model).__name__}."
        )
    layers, skipped = _find_layers(model)
    if not layers and not any(isinstance(p, PackedWeight) for p in model.parameters()):
        raise ValueError(f"{describe(model)} has no `nn.Linear` layer to pack: nothing would be gained.")
    dtypes = {name: _packed_dtype(name, layer.weight, dtype) for name, layer in layers.items()}
    for each in set(dtypes.values()):
        _require_products(each)
    handle = PackedLinears(skipped)
    with torch.inference_mode(False), torch.no_grad():
        try:
            for names, is_tied in _group_by_weight(model, layers):
                group = {name: layers[name] for name in names}
                handle._pack(group, layers[names[0]].weight, is_tied=is_tied, dtype=dtypes[names[0]])
        except BaseException:
            handle.restore()
            raise
    return handle


def _find_layers(model: PreTrainedModel) -> tuple[dict[str, nn.Linear], dict[str, str]]:
    """Layers to pack and layers left alone (name to reason), after refusing what cannot be packed."""
    layers, skipped = {}, {}
    for name, module in model.named_modules():
        _refuse_quantised(name, module)
        weight = module._parameters.get("weight")
        if isinstance(module, Conv1D):
            skipped[name] = "Conv1D keeps its weight transposed"
        elif not isinstance(module, nn.Linear) or isinstance(weight, PackedWeight):
            continue
        elif type(module).forward is not nn.Linear.forward:
            skipped[name] = f"{type(module).__name__} has a forward of its own"
        elif weight is None or weight.numel() == 0:
            skipped[name] = "its weight is computed (a parametrisation) or empty"
        else:
            _check_place(name, weight)
            layers[name] = module
    return layers, skipped


def _refuse_quantised(name: str, module: nn.Module) -> None:
    # By content: a checkpoint that was dequantised at loading (GGUF) still carries its quantiser.
    tensors = [*module._parameters.values(), *module._buffers.values()]
    codes = [t for t in tensors if t is not None and t.dtype in _CODE_DTYPES and t.dim() > 1]
    weight = module._parameters.get("weight")
    is_wrapped = isinstance(module, nn.Linear) and type(weight) not in (nn.Parameter, PackedWeight, type(None))
    if codes or is_wrapped or hasattr(module, "_packed_params"):
        found = ", ".join(sorted({f"{type(t).__name__} of {t.dtype}" for t in codes or [weight] if t is not None}))
        raise ValueError(
            f"`{name}` ({type(module).__name__}) holds {found or 'packed parameters'}: it is quantised or distributed, "
            "and packing takes plain weights. Load the model in float32 or bfloat16, or use it as it is."
        )


def _check_place(name: str, weight: torch.Tensor) -> None:
    if weight.device.type != "cpu":
        cause = "offloaded or not loaded" if weight.is_meta else "packed products run on the CPU"
        raise ValueError(f"`{name}` is on {weight.device} ({cause}). Move the whole model to the CPU first.")


def _packed_dtype(name: str, weight: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    dtype = weight.dtype if dtype is None else dtype
    if weight.dtype not in _DTYPES or dtype not in _DTYPES:
        raise ValueError(f"`{name}` is {weight.dtype}, to be packed as {dtype}; supported are {_DTYPES}.")
    if dtype not in (weight.dtype, torch.float32):
        raise ValueError(
            f"Packing `{name}` from {weight.dtype} to {dtype} would round its weights, and restoring could not undo "
            f"that. Load the model in that dtype (`dtype={dtype}`), then pack it without `dtype`."
        )
    return dtype


def _require_products(dtype: torch.dtype) -> None:
    """Refuse, with oneDNN's own words, a dtype that this build or CPU has no packed product for."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        raise RuntimeError(
            "This build of torch has no oneDNN linear products: use the model unpacked on this machine."
        )
    weight = torch.arange(48.0).view(16, 3).to(dtype)
    try:
        blocks = torch.ops.mkldnn._reorder_linear_weight(weight, _EXPECTED_ROWS)
        torch.ops.mkldnn._linear_pointwise.default(weight.new_ones(2, 3), blocks, None, "none", [], "")
        is_exact = torch.equal(blocks.to_dense(), weight)
    except RuntimeError as error:
        way_out = "use the model unpacked" if dtype is torch.float32 else "pack it with `dtype=torch.float32` (exact)"
        raise RuntimeError(f"oneDNN has no packed {dtype} product here: {error}. Instead, {way_out}.") from error
    if not is_exact:
        raise RuntimeError(f"oneDNN does not unpack {dtype} weights bit for bit here: use the model unpacked.")


def _group_by_weight(model: nn.Module, layers: dict[str, nn.Linear]) -> Iterator[tuple[list[str], bool]]:
    """Layer names by shared parameter, each with whether some other module needs its plain rows."""
    uses: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    users: dict[int, list[str]] = {}
    for name, layer in layers.items():
        users.setdefault(id(layer.weight), []).append(name)
    for key, names in users.items():
        yield names, uses[key] > len(names)


__all__ = ["PackedLinears", "PackedWeight", "optimize_for_cpu"]
