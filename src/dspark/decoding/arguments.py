"""What a call of `generate` asks for, read before anything runs: the drafter, its settings, stop strings, refusals."""

from __future__ import annotations

import copy
import os
from dataclasses import fields, replace
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria

from ..modeling_dspark import DSparkDrafter
from ..peft_layers import names_adapters
from ..speculation import SpeculationConfig
from ..target import describe, embedding_module, unwrap
from .record import Recorder
from .target_cache import QUANTISED


def as_drafter(assistant: Any) -> DSparkDrafter | None:
    """The drafter behind an `assistant_model`: as it is, compiled, or wrapped by PEFT; None for anything else.

    Raises:
        ValueError: Settings were put on a wrapper, which does not pass them on.
    """
    model = unwrap(assistant)
    if not isinstance(model, DSparkDrafter):
        return None
    if model is not assistant and isinstance(vars(assistant).get("speculation"), SpeculationConfig):
        raise ValueError(
            f"`speculation` was set on the {type(assistant).__name__} around the drafter, where it has no effect. Set "
            "it on the drafter: `model.get_base_model().speculation = ...`, or pass it to `generate`."
        )
    return model


def drafter_of(call: dict[str, Any]) -> DSparkDrafter | None:
    """The drafter a call names as its assistant, or by its `decode` as the decoding method.

    Raises:
        ValueError: A drafter's folder or Hub id was named, or settings were put on a wrapper.
    """
    method = call.get("custom_generate")
    if getattr(method, "__func__", None) is DSparkDrafter.decode:
        return method.__self__  # type: ignore[union-attr]
    assistant = call.get("assistant_model")
    if isinstance(assistant, str | os.PathLike):  # no assistant of any kind is named by its place
        raise ValueError(
            f"`assistant_model` must be a loaded model, got {assistant!r}. Load it once and pass what you get: "
            f"`drafter = dspark.DSparkDrafter.from_pretrained({os.fspath(assistant)!r})`."
        )
    return as_drafter(assistant)


def check_arguments(target: PreTrainedModel, call: dict[str, Any]) -> None:
    """Refuse what `custom_generate` would drop without a word, and what would fail before our own checks."""
    if _option(target, call, "cache_implementation") == "quantized":
        raise ValueError(f"`cache_implementation='quantized'`: {QUANTISED}")  # no backend needs to be installed for it
    if _option(target, call, "cache_implementation") == "paged":
        raise ValueError(
            "`cache_implementation='paged'` hands the call to continuous batching, which asks no drafter. Leave it "
            "out, or leave `assistant_model` out."
        )
    if call.get("synced_gpus"):
        raise ValueError(
            "`synced_gpus=True` makes all processes run the same number of forward passes, but rounds with a drafter "
            "depend on the text. Gather the target on each device, or leave `assistant_model` out."
        )
    if _option(target, call, "token_healing"):
        raise ValueError(
            "`token_healing` rewrites the prompt with a tokenizer that decoding with a drafter is not handed. Call "
            "`model.heal_tokens(input_ids, tokenizer)` first and generate from its result."
        )


def check_devices(target: PreTrainedModel, call: dict[str, Any]) -> None:
    """Refuse tensors on several devices, which would fail inside the target; accelerate's hooks move them.

    Raises:
        ValueError: Names each and its device.
    """
    names = ("inputs", "input_ids", "inputs_embeds", "attention_mask")
    found = {f"`{name}`": call[name].device for name in names if isinstance(call.get(name), torch.Tensor)}
    embedding = embedding_module(target)
    weight = getattr(embedding, "weight", None)
    is_moved = any(hasattr(part, "_hf_hook") for part in (target, embedding)) or hasattr(weight, "device_mesh")
    if is_moved:
        return
    if weight is not None and not weight.is_meta and call.get("inputs_embeds") is None:
        found["the target's embedding"] = weight.device
    if len(set(found.values())) > 1:
        where = ", ".join(f"{name} on {device}" for name, device in found.items())
        raise ValueError(f"All must be on one device, got {where}. Move the inputs: `inputs.to(model.device)`.")


def _option(target: PreTrainedModel, call: dict[str, Any], name: str) -> Any:
    """A generation option as `generate` will see it: the call's, else the passed config's, else the target's."""
    if name in call:
        return call[name]
    passed = getattr(call.get("generation_config"), name, None)
    return getattr(target.generation_config, name, None) if passed is None else passed


def bind_stop_strings(target: PreTrainedModel, call: dict[str, Any], tokenizer: Any) -> None:
    """Turn stop strings into a criterion, since `custom_generate` is handed no tokenizer; changes `call`."""
    stop_strings = _option(target, call, "stop_strings")
    if stop_strings is None:
        return
    if tokenizer is None:
        raise ValueError("`stop_strings` needs the tokenizer: pass `tokenizer=...` to `generate`.")
    criteria = StoppingCriteriaList(call.get("stopping_criteria") or [])
    if not any(type(criterion) is StopStringCriteria for criterion in criteria):  # as plain: the user's own goes first
        criteria.append(StopStringCriteria(tokenizer, stop_strings))
    call["stopping_criteria"] = criteria
    if (passed := call.get("generation_config")) is not None:
        call["generation_config"] = passed = copy.deepcopy(passed)  # the caller's object stays as it was
        passed.stop_strings = None
    if "stop_strings" in call or getattr(target.generation_config, "stop_strings", None) is not None:
        call["stop_strings"] = None  # an explicit None also overrides what the target's own config says


def call_settings(
    drafter: DSparkDrafter, passed: GenerationConfig | None, kwargs: dict[str, Any]
) -> SpeculationConfig:
    """Settings of one call: the call's keywords, then the config passed to it, then `drafter.speculation`.

    None in the first two means not said. transformers' global defaults of the knobs that have its names (20 tokens,
    threshold 0.4) were made for other assistants and are not looked at. `speculation=SpeculationConfig(...)` replaces
    the drafter's for this call.

    Raises:
        ValueError: A value is out of range or contradicts another.
    """
    given = kwargs.pop("speculation", None)
    settings = drafter.speculation if given is None else given
    if not isinstance(settings, SpeculationConfig):
        raise ValueError(f"`speculation` must be a SpeculationConfig, got {type(settings).__name__}.")
    changes = {}
    for field in fields(SpeculationConfig):
        value = kwargs.pop(field.name, None)
        if value is None:
            value = getattr(passed, field.name, None)
        if value is not None:
            changes[field.name] = value
    return replace(settings, **changes) if changes else settings


def check_mode(
    target: PreTrainedModel, generation_config: GenerationConfig, recorder: Recorder, *, batch_size: int
) -> None:
    """Refuse generation modes that a drafter cannot serve exactly.

    Raises:
        ValueError: Names the option, its value and the way out.
    """
    name = describe(target)
    _check_strategy(name, generation_config)
    if generation_config.use_cache is False:
        raise ValueError(f"A drafter needs the target's cache, got `use_cache=False` (target {name}). Leave it on.")
    if target.config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder; DSpark drafters serve decoder-only models.")
    if batch_size > 1 and recorder.is_single_row:
        raise ValueError(
            f"Streaming and returned scores, logits, attentions or hidden states come from a single row, got a batch "
            f"of {batch_size}: rows of a batch accept different numbers of drafts. Generate row by row."
        )
    if batch_size > 1 and names_adapters(target):
        raise ValueError(
            f"`adapter_names` gives each row of a batch its own adapter of {name}, but with a drafter rows leave the "
            "batch as they finish. Generate the rows of one adapter at a time, after `set_adapter`."
        )


def _check_strategy(name: str, config: GenerationConfig) -> None:
    refused = {
        "num_beams": (config.num_beams or 1) > 1,
        "penalty_alpha": bool(config.penalty_alpha),
        "dola_layers": config.dola_layers is not None,
        "prompt_lookup_num_tokens": config.prompt_lookup_num_tokens is not None,
        "assistant_early_exit": config.assistant_early_exit is not None,
        "use_mtp": bool(config.use_mtp),
        "speculation_type": config.speculation_type is not None,
        "force_words_ids": config.force_words_ids is not None,
        "constraints": config.constraints is not None,
    }
    for option, is_set in refused.items():
        if is_set:
            raise ValueError(
                f"`{option}={getattr(config, option)}` chooses a decoding strategy of its own, which a DSpark drafter "
                f"cannot speed up (target {name}). Use greedy decoding or sampling, or leave `assistant_model` out."
            )
    if config.assistant_ensemble_weight is not None:
        raise ValueError(
            f"`assistant_ensemble_weight={config.assistant_ensemble_weight}` mixes the drafter's law into the text; "
            f"decoding with a DSpark drafter always keeps the target's ({name}). Leave it out."
        )


__all__ = [
    "as_drafter",
    "bind_stop_strings",
    "call_settings",
    "check_arguments",
    "check_devices",
    "check_mode",
    "drafter_of",
]
