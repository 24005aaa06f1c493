"""`optimize_for_cpu`: a model's linear layers packed for products of few rows, so that small batches decode fast.

Opt-in, for inference, undone by the handle it returns. The numbers stored do not change, rounding does. What a packed
layer can and cannot do is in `packed_weight.py`, how its numbers lie in `packed_blocks.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import TracebackType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

from .packed_blocks import half_exponent, pack, why_not_half, why_not_onednn
from .packed_weight import PackedLinear, PackedWeight
from .target import describe, unwrap

logger = logging.get_logger("dspark.cpu")

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Dtypes of quantised weights; token ids and masks are int64 and bool.
_CODES = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2)


class PackedLayers:
    """What `optimize_for_cpu` did, and the way back; a context manager that restores at its end.

    Attributes:
        packed: Names of the packed layers.
        skipped: Layers left as they are, name to reason.
        extra_bytes: Memory in use beyond the plain model's: second copies of tied matrices, wider dtypes, padding.
    """

    def __init__(self, model: PreTrainedModel, skipped: dict[str, str]) -> None:
        self.packed: list[str] = []
        self.skipped = skipped
        self.extra_bytes = 0
        self._layers: list[tuple[Any, PackedWeight]] = []
        self._model = weakref.ref(model)

    def __enter__(self) -> PackedLayers:
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
                layer, weight = self._layers.pop()
                original = weight.original
                if not weight.is_tied and original.numel() == 0:
                    original.data = weight.dense()
                    original.requires_grad_(weight.requires_grad)
                if layer._parameters["weight"] is weight:  # else it is tied, or somebody put another one there
                    layer.weight = original
                layer.__dict__.pop("packed", None)
                layer.__class__ = nn.Linear
        self.extra_bytes = 0
        model = self._model()
        if model is not None and _first_packed(model) is None:
            model.__dict__.pop("_apply", None)

    def _pack(self, layers: dict[str, nn.Linear], dtype: torch.dtype, *, is_tied: bool) -> None:
        """Pack one parameter, given all layers that use it."""
        original: Any = next(iter(layers.values())).weight
        blocks = pack(original.detach(), dtype)
        bare = PackedWeight.wrap(original.shape, blocks, original, is_tied=is_tied)
        weight: Any = nn.Parameter(bare, original.requires_grad)
        self.extra_bytes += blocks.nbytes - (0 if is_tied else original.nbytes)
        for name, layer in layers.items():
            self.packed.append(name)
            self._layers.append((layer, weight))
            layer.__class__ = PackedLinear
            layer.__dict__["packed"] = weight  # not an attribute that the module would register as a second parameter
            if not is_tied:
                layer.weight = weight
        if not is_tied:
            original.data = original.new_empty(0)


def optimize_for_cpu(model: Any, *, dtype: torch.dtype | None = None) -> PackedLayers:
    """Pack the linear layers of a target or drafter for small-batch decoding on a CPU, until the handle restores them.

    The plain weights are freed, one layer at a time. A matrix that is also an embedding (a tied LM head) is packed as
    a second copy, counted in `handle.extra_bytes`. Layers already packed stay with the handle that packed them. While
    packed, `state_dict()` and `save_pretrained` give the plain weights (a full copy while it is held), gradients pass
    through the layers of a frozen model, and errors are: `load_state_dict`, moving, casting, deep-copying and pickling
    the model, autocast, gradients of packed weights. `torch.compile` leaves packed layers out of its graphs. With a
    single thread the cost per call can outweigh the gain for one token at a time: measure before packing.

    Args:
        model: A `PreTrainedModel` on the CPU, bare or wrapped (PEFT). `Conv1D` layers (GPT-2) are left alone.
        dtype: Dtype of the packed weights. None: the narrowest that holds a layer's numbers bit for bit and has
            products here. That is float16, multiplied in float32, where a checkpoint stored 16-bit numbers that were
            loaded in float32 (half the memory and half the time of few rows), and each layer's own dtype elsewhere.
            `torch.float16` and `torch.float32` ask for one of them; activations keep their dtype.

    Returns:
        The handle. Keep it, or use it as a context manager: nothing else can restore the model.

    Raises:
        TypeError: Not a `PreTrainedModel`.
        ValueError: A layer is quantised, not on the CPU or of an unsupported dtype; or `dtype` would round weights; or
            there is nothing to pack.
        RuntimeError: This build of torch or this CPU lacks the products.
    """
    model = unwrap(model)
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"`optimize_for_cpu` takes a transformers `PreTrainedModel`, got {type(model).__name__}.")
    layers, skipped = _find_layers(model)
    if not layers and not is_packed(model):
        raise ValueError(f"{describe(model)} has no `nn.Linear` layer to pack, so nothing would be gained.")
    missing = {each: why_not_half() if each == torch.float16 else why_not_onednn(each) for each in _DTYPES}
    dtypes = {name: _packed_dtype(name, layer.weight, dtype, missing) for name, layer in layers.items()}
    handle = PackedLayers(model, skipped)
    with torch.inference_mode(False), torch.no_grad():
        try:
            for names, is_tied in _group_by_weight(model, layers):
                handle._pack({name: layers[name] for name in names}, dtypes[names[0]], is_tied=is_tied)
        except BaseException:
            handle.restore()
            raise
    model.__dict__["_apply"] = _refusing_apply(weakref.ref(model))
    return handle


def _refusing_apply(model_ref: Callable[[], Any]) -> Callable[..., Any]:
    """`Module._apply` of a packed model: what a packed weight refuses fails before any other weight is changed."""

    def apply(fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        model = model_ref()
        packed = _first_packed(model)
        if packed is not None:
            fn(packed)
        return type(model)._apply(model, fn, *args, **kwargs)

    return apply


def _first_packed(model: nn.Module) -> PackedWeight | None:
    return next((weight for weight in model.parameters() if isinstance(weight, PackedWeight)), None)


def is_packed(model: Any) -> bool:
    """Whether linear layers of a model, bare or wrapped, are packed at present."""
    return any(isinstance(module, PackedLinear) for module in unwrap(model).modules())


def packed_forms(model: Any) -> list[str]:
    """In words, the forms in which linear layers of a model, bare or wrapped, are packed at present."""
    found = [module.packed.blocks.form for module in unwrap(model).modules() if isinstance(module, PackedLinear)]
    return list(dict.fromkeys(found))


def _find_layers(model: PreTrainedModel) -> tuple[dict[str, nn.Linear], dict[str, str]]:
    """Layers to pack and layers left alone (name to reason), after refusing what cannot be packed."""
    layers, skipped = {}, {}
    for name, module in model.named_modules():
        _refuse_quantised(name, module)
        weight = module._parameters.get("weight")
        if isinstance(module, Conv1D):
            skipped[name] = "Conv1D keeps its weight transposed"
        elif not isinstance(module, nn.Linear) or isinstance(module, PackedLinear):
            continue
        elif type(module) is not nn.Linear:
            skipped[name] = f"{type(module).__name__} may compute more than a linear layer"
        elif weight is None or weight.numel() == 0:
            skipped[name] = "its weight is computed (a parametrisation) or empty"
        elif weight.device.type != "cpu":
            cause = "offloaded or not loaded" if weight.is_meta else "packed products run on the CPU"
            raise ValueError(f"`{name}` is on {weight.device} ({cause}). Move the whole model to the CPU first.")
        else:
            layers[name] = module
    return layers, skipped


def _refuse_quantised(name: str, module: nn.Module) -> None:
    # By content: a checkpoint that was dequantised at loading (GGUF) still carries its quantiser.
    tensors = [*module._parameters.values(), *module._buffers.values()]
    found = [f"{t.dtype} codes" for t in tensors if t is not None and t.dtype in _CODES and t.dim() > 1]
    weight = module._parameters.get("weight")
    if isinstance(module, nn.Linear) and type(weight) not in (nn.Parameter, PackedWeight, type(None)):
        found.append(f"a weight of class {type(weight).__name__}")
    if hasattr(module, "_packed_params"):  # torch.ao.nn.quantized
        found.append("quantised parameters")
    if found:
        raise ValueError(
            f"`{name}` ({type(module).__name__}) holds {' and '.join(found)}: it is quantised or distributed, and "
            "packing takes plain weights. Load the model in float32 or bfloat16, or use it unpacked."
        )


def _packed_dtype(
    name: str, weight: torch.Tensor, dtype: torch.dtype | None, missing: dict[torch.dtype, str | None]
) -> torch.dtype:
    """The dtype to pack a layer's weight in, after refusing what cannot be; `missing`: why there are no products."""
    own = weight.dtype
    if own not in _DTYPES or dtype not in (None, *_DTYPES):
        supported = ", ".join(map(str, _DTYPES))
        raise ValueError(f"`{name}` is {own}, to be packed as {dtype or own}; supported are {supported}.")
    half = torch.float16
    # bfloat16 products, where there are, also beat float32 ones of many rows.
    has_own = own == torch.bfloat16 and missing[own] is None
    # Looked at last: it reads the whole weight.
    is_tried = dtype == half or (dtype is None and not has_own and missing[half] is None)
    fits_half = is_tried and half_exponent(weight) is not None
    if dtype is None:
        dtype = half if fits_half else torch.float32 if own == half else own
    if not (fits_half if dtype == torch.float16 else dtype in (own, torch.float32)):
        raise ValueError(
            f"Packing `{name}` from {own} to {dtype} would round its weights, and restoring could not undo that. "
            f"Load the model with `dtype={dtype}`, then pack it without `dtype`."
        )
    if missing[dtype] is not None:
        way_out = "use the model unpacked" if dtype is torch.float32 else "pack it with `dtype=torch.float32` (exact)"
        raise RuntimeError(f"There is no packed {dtype} product here: {missing[dtype]}. Instead, {way_out}.")
    return dtype


def _group_by_weight(model: nn.Module, layers: dict[str, nn.Linear]) -> Iterator[tuple[list[str], bool]]:
    """Names of the layers that share a parameter, and whether some other module needs its plain rows."""
    uses: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    users: dict[int, list[str]] = {}
    for name, layer in layers.items():
        users.setdefault(id(layer.weight), []).append(name)
    # Counted before anything is packed: while packing, ids of freed objects may come back.
    yield from [(names, uses[key] > len(names)) for key, names in users.items()]


def packed(model: PreTrainedModel, *, wanted: bool = True) -> Any:
    """A context in which the linear layers of `model` are packed; restored at its end.

    A model elsewhere than on a CPU stays as it is; one that cannot be packed too, with one warning that says why.

    Args:
        model: Frozen.
        wanted: False: do nothing.
    """
    if not wanted or model.device.type != "cpu":
        return nullcontext()
    try:
        return optimize_for_cpu(model)
    except (ValueError, RuntimeError) as error:
        logger.warning(f"{describe(model)} runs unpacked, which is slower: {error}")
        return nullcontext()


__all__ = ["PackedLayers", "is_packed", "optimize_for_cpu", "packed", "packed_forms"]
