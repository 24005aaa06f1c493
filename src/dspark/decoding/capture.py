"""Taps on the target: the hidden states of `target_layer_ids`, and no others, from each of its forward passes.

Temporary forward hooks, so that untapped layers keep nothing alive. Two generations may run on one target from two
threads: a capture records only forward passes made by its own thread while it is armed, which also leaves out passes
that processors make on the same model.

Hooks on layers would cut the graph of a compiled forward at every tap. There the model is asked to return the states
instead, by hooks around its forward, outside the graph, which then is one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from ..compat import selects_hidden_states
from ..target import decoder_layers, describe, has_compiled_forward

# By target: which of its layers' outputs it was seen to return.
_returning: WeakKeyDictionary[nn.Module, dict[tuple[int, ...], bool]] = WeakKeyDictionary()


class HiddenStateCapture:
    """Collects `[B, S, m*D_t]` per forward pass: outputs of the tapped layers, concatenated in order.

    Args:
        target: The model to tap.
        layer_ids: Layers; `l` is the output of decoder layer l, -1 the input of layer 0 (the embedding output).

    Use as a context manager; the hooks are removed on exit, after an exception too.
    """

    def __init__(self, target: PreTrainedModel, layer_ids: Sequence[int]) -> None:
        self._target = target
        self._layers = decoder_layers(target)
        self._name = describe(target)
        self._layer_ids = list(layer_ids)
        self._taps: dict[int, torch.Tensor] = {}
        self._handles: list[Any] = []
        self._asks = False  # whether the present pass returns states only because we asked
        self._thread: int | None = None
        self._sink: Callable[[torch.Tensor], None] | None = None

    def __enter__(self) -> HiddenStateCapture:
        if has_compiled_forward(self._target) and self._target_returns_states():
            self._handles.append(self._target.register_forward_pre_hook(self._ask, with_kwargs=True))
            self._handles.append(self._target.register_forward_hook(self._take))
            return self
        self._tap_layers()
        return self

    def _tap_layers(self) -> None:
        for layer_id in self._layer_ids:
            if layer_id == -1:
                handle = self._layers[0].register_forward_pre_hook(self._record_input, with_kwargs=True)
            else:
                handle = self._layers[layer_id].register_forward_hook(self._recorder(layer_id))
            self._handles.append(handle)

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
                "compiled, the graphs it has ignore new hooks: let its first call be one with a drafter. In place of "
                "`model.compile()`, compile its forward alone (`model.forward = torch.compile(model.forward)`), or "
                "pass the model uncompiled."
            )
        return result

    # --- a compiled forward: the model returns the states --------------------------------------------------------

    def _target_returns_states(self) -> bool:
        """Whether the target, asked for them, returns the tapped layers' outputs. Tried once per target and taps.

        A class may return something else for its last layer (behind the final norm), or nothing.
        """
        known, taps = _returning.setdefault(self._target, {}), tuple(self._layer_ids)
        if taps not in known:
            tapped: list[torch.Tensor] = []
            # As it was before it was compiled: that also installs transformers' own hooks, which a graph cannot.
            forward: Any = self._target.forward._torchdynamo_orig_callable  # type: ignore[attr-defined]
            ids = torch.arange(8, device=self._target.device)[None]  # a padding token alone would be zeros everywhere
            asked: Any = {"output_hidden_states": self._indices(), "use_cache": False, "return_dict": True}
            try:
                self._tap_layers()
                with torch.no_grad(), torch.random.fork_rng():
                    output = self.run(lambda: forward(input_ids=ids, **asked), tapped.append)
            finally:
                self.__exit__(None, None, None)
            states = self._selected(output)
            known[taps] = states is not None and torch.equal(states, tapped[0])
        return known[taps]

    def _indices(self) -> list[int] | bool:
        return sorted(layer_id + 1 for layer_id in self._layer_ids) if selects_hidden_states() else True

    def _selected(self, output: Any) -> torch.Tensor | None:
        found = getattr(output, "hidden_states", None) or ()
        if len(found) != len(self._layers) + 1 or any(found[i + 1] is None for i in self._layer_ids):
            return None
        device = found[self._layer_ids[-1] + 1].device
        return torch.cat([found[i + 1].detach().to(device) for i in self._layer_ids], dim=-1)

    def _is_armed(self) -> bool:
        return self._thread == threading.get_ident() and self._sink is not None

    def _ask(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._is_armed():  # another thread's pass: what we ask for in ours stays
            return None
        wanted = kwargs.get("output_hidden_states", self._target.config.output_hidden_states)
        self._asks = not wanted
        if wanted is True:  # whoever asks for all of them is given ours too
            return None
        some = [] if not wanted else [wanted] if isinstance(wanted, int) else list(wanted)
        ours = self._indices()
        return args, {**kwargs, "output_hidden_states": [*some, *ours] if isinstance(ours, list) else True}

    def _take(self, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        if not self._is_armed() or self._sink is None:
            return None
        states = self._selected(output)
        if states is not None:
            self._sink(states)
        if not self._asks:
            return None
        return type(output)(**{name: value for name, value in output.items() if name != "hidden_states"})

    # --- hooks on layers -----------------------------------------------------------------------------------------

    def _record_input(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._record(-1, args[0] if args else kwargs["hidden_states"])

    def _recorder(self, layer_id: int) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
            self._record(layer_id, output if isinstance(output, torch.Tensor) else output[0])

        return hook

    @torch.compiler.disable  # between a compiled target's graphs: traced, its state would be guarded on
    def _record(self, layer_id: int, states: torch.Tensor) -> None:
        if not self._is_armed() or self._sink is None:
            return
        self._taps[layer_id] = states.detach()
        if len(self._taps) == len(self._layer_ids):
            device = states.device  # layers of a split model may lie elsewhere
            self._sink(torch.cat([self._taps[i].to(device) for i in self._layer_ids], dim=-1))
            self._taps.clear()


__all__ = ["HiddenStateCapture"]
