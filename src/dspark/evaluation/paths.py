"""Which of several ways to compute the same a pair takes on this machine, and why: what a timing is a timing of."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from ..cpu import packed_forms
from ..decoding.ragged_attention import attends_by_interface
from ..modeling_dspark import DSparkDrafter
from ..ops.dispatch import choice_and_reason
from ..target import text_config


@dataclass(frozen=True)
class PickedPath:
    """One choice.

    Attributes:
        what: What there are several ways for.
        path: The one taken.
        reason: Why that one.
    """

    what: str
    path: str
    reason: str


def picked_paths(target: PreTrainedModel, drafter: DSparkDrafter) -> list[PickedPath]:
    """Linear layers of both models, attention of a verification, the sequential head and the ops."""
    ops, reason = choice_and_reason(next(drafter.parameters()))
    return [
        _linears("the target's linear layers", target),
        _linears("the drafter's linear layers", drafter),
        _attention(target),
        _head(drafter, ops),
        PickedPath("ops", ops, reason),
    ]


def _linears(what: str, model: PreTrainedModel) -> PickedPath:
    forms = packed_forms(model)
    if forms:
        return PickedPath(what, " and ".join(forms), "packed for the CPU")
    kind = model.device.type
    return PickedPath(what, "stock", "packing was not asked for" if kind == "cpu" else f"the model is on {kind}")


def _attention(target: PreTrainedModel) -> PickedPath:
    """What `grouped_attention` does in a pass of several tokens of one row."""
    what, kind = "the target's attention", text_config(target)._attn_implementation
    groups = max(int(getattr(module, "num_key_value_groups", 1)) for module in target.modules())
    stock = f"{kind}, as the model has it"
    if not attends_by_interface(target):
        return PickedPath(what, stock, "its kernel, its class or a compiled model allows no other layout")
    if kind != "sdpa":
        return PickedPath(what, stock, "only sdpa is known to copy shared keys")
    if groups == 1:
        return PickedPath(what, stock, "no query heads share a key head")
    return PickedPath(what, "sdpa by key heads, nothing copied", f"{groups} query heads share a key head")


def _head(drafter: DSparkDrafter, ops: str) -> PickedPath:
    what, kind = "the sequential head", drafter.config.markov_head_type
    if drafter.markov_head is None:
        return PickedPath(what, "none", "the drafter has none")
    if ops == "torch":
        return PickedPath(what, f"{kind}, slot by slot", "ops run in torch")
    return PickedPath(what, f"{kind}, one op where its weights and the call's processors allow", f"ops run in {ops}")


__all__ = ["PickedPath", "picked_paths"]
