"""Drafters with adapters, and what they draft, shared by the tests of PEFT."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import peft
import torch
from transformers import PreTrainedModel

from dspark import DSparkDrafter
from tests.training import tiny

HEADS = ["markov_head", "confidence_head"]
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "fc"]
VOCAB = sorted({2, *range(5, 90, 2)})  # a reduced vocabulary, so that the drafter owns an LM head

KINDS: dict[str, Callable[[], Any]] = {
    "lora": lambda: peft.LoraConfig(r=4, lora_alpha=8, target_modules=LINEARS, modules_to_save=HEADS),
    "dora": lambda: peft.LoraConfig(r=4, use_dora=True, target_modules=LINEARS, modules_to_save=HEADS),
    "ia3": lambda: peft.IA3Config(
        target_modules=LINEARS, feedforward_modules=["down_proj"], modules_to_save=HEADS
    ),
    "everywhere": lambda: peft.LoraConfig(r=4, target_modules="all-linear", modules_to_save=HEADS),
    "in the heads": lambda: peft.LoraConfig(r=4, lora_dropout=0.2, target_modules=["markov_w2", "lm_head", "q_proj"]),
    "whole LM head": lambda: peft.LoraConfig(r=4, target_modules=["v_proj"], modules_to_save=["lm_head", *HEADS]),
}  # fmt: skip


class Trained(NamedTuple):
    """A drafter after some steps with an adapter.

    Attributes:
        target: What it was trained for.
        model: The `PeftModel`.
        base: Folder of the drafter as it was before.
        folder: Where the adapter may be saved; not there yet.
    """

    target: PreTrainedModel
    model: Any
    base: Path
    folder: Path

    @property
    def drafter(self) -> DSparkDrafter:
        return self.model.get_base_model()


def base_folder(folder: Path, target: PreTrainedModel, **changes: Any) -> Path:
    """A drafter for `target`, saved, with a transition bias that is not zero."""
    drafter = tiny.drafter_for(target, **changes)
    with torch.no_grad():
        if drafter.markov_head is not None:
            drafter.markov_head.markov_w2.weight.normal_(std=0.5)
    drafter.save_pretrained(folder)
    return folder


def trained(tmp_path: Path, config: Any, *, target: Any = None, steps: int = 5, **changes: Any) -> Trained:
    """A drafter with a reduced vocabulary (unless `changes` say else), trained a few steps with `config`."""
    target = tiny.llama() if target is None else target
    base = base_folder(tmp_path / "base", target, **{"draft_vocab": VOCAB, **changes})
    model = peft.get_peft_model(DSparkDrafter.from_pretrained(base), config)
    settings = {"max_steps": steps, "learning_rate": 1e-2}
    tiny.trainer(tmp_path / "run", model, target, tiny.answers(tmp_path), **settings).train()
    return Trained(target, model.eval(), base, tmp_path / "adapter")


def shaken(model: Any, *, seed: int, std: float = 0.3) -> Any:
    """`model` with noise on every weight that would be trained."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(std * torch.randn(parameter.shape, generator=draw))
    return model.eval()


def drafts(drafter: Any, target: PreTrainedModel | None = None) -> Any:
    """What a drafter drafts behind fixed hidden states."""
    draw = torch.Generator().manual_seed(7)
    states = torch.randn(3, 6, drafter.config.context_width, generator=draw)
    return drafter.draft(torch.tensor([5, 20, 33]), states, target=target)


def same_drafts(one: Any, other: Any) -> bool:
    """Bit for bit."""
    names = ("base_logits", "logits", "confidence_logits", "context_features")
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in names)


def close_drafts(one: Any, other: Any) -> None:
    """Equal but for rounding: weights that were added up beforehand."""
    for name in ("base_logits", "logits", "confidence_logits"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=1e-5, atol=2e-6)


def state_hash(model: PreTrainedModel) -> str:
    """Of every tensor of a model and its name."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def text(target: Any, prompt: tuple[int, ...] = (5, 6, 7), **options: Any) -> list[int]:
    """Greedy ids."""
    return target.generate(
        input_ids=torch.tensor([prompt]), **{"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0, **options}
    )[0].tolist()
