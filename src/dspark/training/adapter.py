"""What a run trains: the drafter's weights, or a PEFT adapter of few weights beside its heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import nn

from ..adapter_files import require_peft
from ..modeling_dspark import DSparkDrafter
from ..peft_layers import carries_adapters
from ..target import describe

AdapterKind = Literal["lora", "dora", "ia3"]
HEADS = ("markov_head", "confidence_head")  # small, and trained whole


@dataclass(frozen=True)
class AdapterShape:
    """An adapter of some linear layers; the sequential and confidence heads are trained whole beside it.

    Attributes:
        kind: `"lora"`; `"dora"`: LoRA with a magnitude per output; `"ia3"`: nothing but a factor per output (for
            `down_proj`: per input).
        rank: Of LoRA's and DoRA's matrices; None: 64, where an adapter is reported to come within 2% of a drafter
            trained whole for its domain.
        alpha: What they add is scaled by `alpha / rank`; None: as `rank`.
        targets: Names of the layers to adapt, or their last parts (`("q_proj", "fc")`); empty: every linear layer of
            the draft layers, and `fc`.
    """

    kind: AdapterKind = "lora"
    rank: int | None = None
    alpha: float | None = None
    targets: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.kind not in get_args(AdapterKind):
            raise ValueError(f"`kind` must be one of {', '.join(get_args(AdapterKind))}, got {self.kind!r}.")
        if self.kind == "ia3" and (self.rank is not None or self.alpha is not None):
            raise ValueError(
                f"An IA3 adapter has neither rank nor alpha, got {self.rank} and {self.alpha}. Leave both out."
            )
        if self.rank is not None and self.rank < 1:
            raise ValueError(f"`rank` must be at least 1, got {self.rank}.")
        if self.alpha is not None and self.alpha <= 0:
            raise ValueError(f"`alpha` must be positive, got {self.alpha}.")


def adapt(drafter: DSparkDrafter, shape: AdapterShape) -> Any:
    """Put a fresh adapter into `drafter` and freeze the rest; returns the `PeftModel` around it.

    Raises:
        ImportError: PEFT is not installed.
        ValueError: The drafter has an adapter already, or a target is not there to adapt.
    """
    peft = require_peft()
    if carries_adapters(drafter):
        raise ValueError(
            f"{describe(drafter)} has an adapter already. Merge it first: `drafter.merge_and_unload()`, then "
            "`save_pretrained`."
        )
    targets = _targets(drafter, shape.targets)
    common = {"target_modules": targets, "modules_to_save": [name for name in HEADS if getattr(drafter, name)]}
    if shape.kind == "ia3":
        inner = [name for name in targets if name.endswith("down_proj")]
        return peft.get_peft_model(drafter, peft.IA3Config(feedforward_modules=inner, **common))
    rank = shape.rank or 64
    alpha = rank if shape.alpha is None else shape.alpha
    config = peft.LoraConfig(r=rank, lora_alpha=alpha, use_dora=shape.kind == "dora", **common)
    return peft.get_peft_model(drafter, config)


def _targets(drafter: DSparkDrafter, wanted: Sequence[str]) -> list[str]:
    """Full names of the layers to adapt."""
    linears = [name for name, module in drafter.named_modules() if isinstance(module, nn.Linear)]
    free = [name for name in linears if name.split(".")[0] not in HEADS]
    if not wanted:
        return [name for name in free if name != "lm_head"]
    found = []
    for ending in wanted:
        names = [name for name in free if f".{name}".endswith(f".{ending}")]
        if not names:
            known = ", ".join(sorted({name.rpartition(".")[2] for name in free}))
            reason = "has no such linear layer of its own to adapt (what it borrows from its target stays as it is)"
            if any(f".{name}".endswith(f".{ending}") or name.startswith(f"{ending}.") for name in linears):
                reason = "trains its heads whole already"
            raise ValueError(f"Adapter target {ending!r}: {describe(drafter)} {reason}. There are: {known}.")
        found += names
    return sorted(set(found), key=linears.index)


def choose_trained(drafter: DSparkDrafter, *, train_lm_head: bool) -> None:
    """Freeze embedding and LM head of a drafter that has its own (they are the target's); adapters choose themselves.

    Args:
        drafter: About to be trained.
        train_lm_head: Leave the head free.

    Raises:
        ValueError: An adapter is to train what is borrowed, or a head that it would not save.
    """
    if not carries_adapters(drafter):
        for part, is_trained in ((drafter.embed_tokens, False), (drafter.lm_head, train_lm_head)):
            if part is not None:
                part.requires_grad_(is_trained)
        return
    drafter.check_adapters()
    if train_lm_head:
        raise ValueError(
            "`train_lm_head=True` trains a head that an adapter does not save. Leave it out; to train the head of a "
            "drafter that has its own, name `lm_head` in the adapter's `modules_to_save`."
        )


__all__ = ["HEADS", "AdapterKind", "AdapterShape", "adapt", "choose_trained"]
