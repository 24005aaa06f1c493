"""Taps on the target: the hidden states of `target_layer_ids`, and no others, from each of its forward passes.

Temporary forward hooks, so that untapped layers keep nothing alive. Two generations may run on one target from two
threads: a capture records only forward passes made by its own thread while it is armed, which also leaves out passes
that processors make on the same model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..target import decoder_layers, describe


class HiddenStateCapture:
    """Collects `[B, S, m*D_t]` per forward pass: outputs of the tapped layers, concatenated in order.

    Args:
        target: The model to tap.
        layer_ids: Layers; `l` is the output of decoder layer l, -1 the input of layer 0 (the embedding output).

    Use as a context manager; the hooks are removed on exit, after an exception too.
    """

    def __init__(self, target: PreTrainedModel, layer_ids: Sequence[int]) -> None:
        self._layers = decoder_layers(target)
        self._name = describe(target)
        self._layer_ids = list(layer_ids)
        self._taps: dict[int, torch.Tensor] = {}
        self._handles: list[Any] = []
        self._thread: int | None = None
        self._sink: Callable[[torch.Tensor], None] | None = None

    def __enter__(self) -> HiddenStateCapture:
        for layer_id in self._layer_ids:
            if layer_id == -1:
                handle = self._layers[0].register_forward_pre_hook(self._record_input, with_kwargs=True)
            else:
                handle = self._layers[layer_id].register_forward_hook(self._recorder(layer_id))
            self._handles.append(handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._taps.clear()
        self._thread = None

    def run(self, forward: Callable[[], Any], sink: Callable[[torch.Tensor], None]) -> Any:
        """Call `forward()`; each pass it makes hands its `[B, S, m*D_t]` hidden states to `sink`.

        A chunked prefill makes several passes, and only one pass's states are alive at a time.

        Raises:
            RuntimeError: The pass did not reach the tapped layers (a compiled forward that ignores hooks, say).
        """
        passes = 0

        def counted(states: torch.Tensor) -> None:
            nonlocal passes
            passes += 1
            sink(states)

        self._thread, self._sink = threading.get_ident(), counted
        try:
            result = forward()
        finally:
            self._thread = self._sink = None
            self._taps.clear()
        if not passes:
            raise RuntimeError(
                f"No hidden states of layers {self._layer_ids} were seen in a forward pass of {self._name}. If it was "
                "compiled as a whole before generating, its graph ignores new hooks: compile after the first "
                "`generate(assistant_model=...)` call, or pass the model uncompiled."
            )
        return result

    def _record_input(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._record(-1, args[0] if args else kwargs["hidden_states"])

    def _recorder(self, layer_id: int) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
            self._record(layer_id, output if isinstance(output, torch.Tensor) else output[0])

        return hook

    @torch.compiler.disable  # between a compiled target's graphs: traced, its state would be guarded on
    def _record(self, layer_id: int, states: torch.Tensor) -> None:
        if self._thread != threading.get_ident() or self._sink is None:
            return
        self._taps[layer_id] = states.detach()
        if len(self._taps) == len(self._layer_ids):
            device = states.device  # layers of a split model may lie elsewhere
            self._sink(torch.cat([self._taps[i].to(device) for i in self._layer_ids], dim=-1))
            self._taps.clear()


__all__ = ["HiddenStateCapture"]
