"""Doors into the loop: `generate(assistant_model=drafter)`, `generate(custom_generate=drafter.decode)`, a mixin.

Importing `dspark` wraps the public `GenerationMixin.generate` once. A call whose `assistant_model` is one of our
drafters goes on through transformers' own `custom_generate=<callable>` extension point, so that inputs, processors,
criteria and caches are prepared by the library itself; every other call passes through untouched. That extension
point hands the callable neither streamer nor tokenizer, so both are bound here. (Wrapping the private
`_assisted_decoding` instead would meet assisted mode's refusals of batches and recurrent models first.)
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMixin
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria

from ..compat import check_generation_hooks, output_cache_field
from ..modeling_dspark import DSparkDrafter
from ..pairing import require_pair
from ..speculation import SpeculationConfig
from ..stats import SpeculationStats
from ..target import describe, unwrap
from .capture import HiddenStateCapture
from .loop import decode
from .processors import Processors
from .record import Recorder
from .session import TargetSession
from .state import DecodingRun, Text
from .stopping import StopRules

_MARK = "_dspark_original"
# Knobs with transformers' own names, read from the call, then from the config passed to it.
_KNOBS = ("num_assistant_tokens", "assistant_confidence_threshold")


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """transformers' output with the call's statistics.

    Attributes:
        speculation: [`SpeculationStats`] of this call.
    """

    speculation: SpeculationStats | None = None


def as_drafter(assistant: Any) -> DSparkDrafter | None:
    """The drafter behind an `assistant_model`: as it is, compiled, or wrapped by PEFT; None for anything else."""
    model = unwrap(assistant)
    return model if isinstance(model, DSparkDrafter) else None


def install() -> None:
    """Wrap `GenerationMixin.generate`; calling it again changes nothing.

    Raises:
        ImportError: A hook the loop stands on moved; names it and the supported versions.
    """
    original = GenerationMixin.generate
    if hasattr(original, _MARK):
        return
    check_generation_hooks()

    @functools.wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        drafter = as_drafter(kwargs.get("assistant_model"))
        if drafter is None:
            return original(self, *args, **kwargs)
        return generate_with_drafter(self, drafter, original, args, kwargs)

    setattr(generate, _MARK, original)
    GenerationMixin.generate = generate  # type: ignore[method-assign]


def generate_with_drafter(
    target: PreTrainedModel,
    drafter: DSparkDrafter,
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """`target.generate(*args, assistant_model=drafter, **kwargs)` by our loop.

    Raises:
        ValueError: The pair, the generation mode or an option cannot be exact; nothing has run yet.
    """
    kwargs = dict(kwargs)
    kwargs.pop("assistant_model", None)
    if len(args) > 2:
        raise ValueError("With a drafter, pass every argument of `generate` after `generation_config` by keyword.")
    if kwargs.get("custom_generate") is not None:
        raise ValueError("`custom_generate` and a DSpark `assistant_model` both choose the decoding loop: pass one.")
    passed = args[1] if len(args) > 1 else kwargs.get("generation_config")
    streamer = kwargs.pop("streamer", None)
    tokenizer = kwargs.pop("tokenizer", None)
    kwargs.pop("assistant_tokenizer", None)
    settings = call_settings(drafter, passed, kwargs)
    stop_strings = _stop_strings(target, passed, kwargs)
    if stop_strings is not None:
        if tokenizer is None:
            raise ValueError("`stop_strings` needs the tokenizer: pass `tokenizer=...` to `generate`.")
        criteria = StoppingCriteriaList(kwargs.get("stopping_criteria") or [])
        criteria.append(StopStringCriteria(tokenizer, stop_strings))
        # An explicit None also overrides what the target's own generation config says.
        kwargs.update(stopping_criteria=criteria, stop_strings=None)
    require_pair(target, drafter, tokenizer=tokenizer)
    if passed is not None and stop_strings is not None:
        passed = copy.deepcopy(passed)  # the caller's object stays as it was
        passed.stop_strings = None
        if len(args) > 1:
            args = (args[0], passed)
        else:
            kwargs["generation_config"] = passed
    if streamer is not None:
        kwargs["streamer"] = streamer  # `generate` puts the prompt itself
    return original(target, *args, custom_generate=_Door(drafter, settings, streamer), **kwargs)


def _stop_strings(target: PreTrainedModel, passed: GenerationConfig | None, kwargs: dict[str, Any]) -> Any:
    for value in (kwargs.pop("stop_strings", None), getattr(passed, "stop_strings", None)):
        if value is not None:
            return value
    return getattr(target.generation_config, "stop_strings", None)


def call_settings(drafter: DSparkDrafter, passed: GenerationConfig | None, kwargs: dict[str, Any]) -> SpeculationConfig:
    """Settings of one call: the call's keywords, then the config passed to it, then `drafter.speculation`.

    transformers' global defaults of the same knobs (20 tokens, threshold 0.4) were made for other assistants and are
    not looked at. `speculation=SpeculationConfig(...)` replaces the drafter's for this call.
    """
    settings = kwargs.pop("speculation", None) or drafter.speculation
    if not isinstance(settings, SpeculationConfig):
        raise ValueError(f"`speculation` must be a SpeculationConfig, got {type(settings).__name__}.")
    changes = {}
    for knob in _KNOBS:
        value = kwargs.pop(knob, None)
        if value is None and passed is not None:
            value = getattr(passed, knob, None)
        if value is not None:
            changes[knob] = value
    for field in fields(SpeculationConfig):
        if field.name not in _KNOBS and field.name in kwargs:
            changes[field.name] = kwargs.pop(field.name)
    return replace(settings, **changes) if changes else settings


class _Door:
    """The callable handed to `generate(custom_generate=...)`, with what that extension point drops bound in it."""

    def __init__(self, drafter: DSparkDrafter, settings: SpeculationConfig, streamer: Any) -> None:
        self.drafter = drafter
        self.settings = settings
        self.streamer = streamer

    def __call__(
        self,
        target: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Any:
        return decode_with(
            target, self.drafter, input_ids, logits_processor, stopping_criteria, generation_config,
            settings=self.settings, streamer=self.streamer, model_kwargs=model_kwargs,
        )  # fmt: skip


def decode_from_custom_generate(
    drafter: DSparkDrafter,
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    *,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    **model_kwargs: Any,
) -> Any:
    """The door `custom_generate=drafter.decode`: checks the pair, then decodes with the drafter's own settings."""
    require_pair(target, drafter)
    door = _Door(drafter, drafter.speculation, None)
    return door(target, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs)


@torch.no_grad()
def decode_with(  # noqa: PLR0913 - the arguments of transformers' decoding methods
    target: PreTrainedModel,
    drafter: DSparkDrafter,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    settings: SpeculationConfig,
    streamer: Any,
    model_kwargs: dict[str, Any],
) -> Any:
    """The decoding method behind every door; arguments as transformers' own decoding methods take them."""
    recorder = Recorder(generation_config, streamer)
    stop_rules = StopRules(stopping_criteria)
    check_mode(target, generation_config, recorder, batch_size=input_ids.shape[0])
    stats = SpeculationStats(num_rows=input_ids.shape[0])
    capture = HiddenStateCapture(target, drafter.config.target_layer_ids or [])
    session = TargetSession(target, model_kwargs, capture, stats)
    batch, prompt = input_ids.shape
    session.check(max_length=generation_config.max_length + _extra_width(input_ids, model_kwargs), batch_size=batch)
    run = DecodingRun(
        drafter=drafter,
        shared=drafter.shared_modules(target),
        session=session,
        settings=settings,
        processors=Processors(logits_processor),
        stop_rules=stop_rules,
        do_sample=bool(generation_config.do_sample),
        text=Text(input_ids.clone(), [prompt] * batch, prompt),
        recorder=recorder,
        stats=stats,
        rows=list(range(batch)),
    )
    try:
        with capture:
            decode(run, input_ids, generation_config)
    finally:
        cache = session.finish()
    if streamer is not None:
        streamer.end()
    drafter.last_stats = stats
    sequences = finished_sequences(run, generation_config)
    if not generation_config.return_dict_in_generate:
        return sequences
    return SpeculativeOutput(
        sequences=sequences,
        scores=recorder.scores,
        logits=recorder.logits,
        attentions=recorder.attentions,
        hidden_states=recorder.hidden_states,
        speculation=stats,
        **{output_cache_field(): cache},
    )


def _extra_width(input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> int:
    embeds = model_kwargs.get("inputs_embeds")
    return 0 if embeds is None else max(embeds.shape[1] - input_ids.shape[1], 0)


def finished_sequences(run: DecodingRun, generation_config: GenerationConfig) -> torch.Tensor:
    """All rows, int64 `[B, n]`, shorter ones padded on the right with the pad token as plain decoding does."""
    longest = max(run.text.lengths)
    sequences = run.text.ids[:, :longest].clone()
    for row, length in enumerate(run.text.lengths):
        if length < longest:
            pad = getattr(generation_config, "_pad_token_tensor", None)
            sequences[row, length:] = 0 if pad is None else pad.to(sequences.device)
    return sequences


def check_mode(
    target: PreTrainedModel, generation_config: GenerationConfig, recorder: Recorder, *, batch_size: int
) -> None:
    """Refuse generation modes that a drafter cannot serve exactly.

    Raises:
        ValueError: Names the option, its value and the way out.
    """
    name = describe(target)
    refused = {
        "num_beams": (generation_config.num_beams or 1) > 1,
        "penalty_alpha": bool(generation_config.penalty_alpha),
        "dola_layers": generation_config.dola_layers is not None,
        "prompt_lookup_num_tokens": generation_config.prompt_lookup_num_tokens is not None,
    }
    for option, is_set in refused.items():
        if is_set:
            raise ValueError(
                f"`{option}={getattr(generation_config, option)}` chooses a decoding strategy of its own, which a DSpark "
                f"drafter cannot speed up (target {name}). Use greedy decoding or sampling, or leave `assistant_model` out."
            )
    if generation_config.use_cache is False:
        raise ValueError(f"A drafter needs the target's cache, got `use_cache=False` (target {name}). Leave it on.")
    if target.config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder; DSpark drafters serve decoder-only models.")
    if batch_size > 1 and recorder.is_single_row:
        raise ValueError(
            f"Streaming and returned scores, logits, attentions or hidden states come from a single row, got a batch of "
            f"{batch_size}: rows of a batch accept different numbers of drafts. Generate row by row."
        )


class DSparkGenerationMixin:
    """For people who compose a model class: `class MyModel(DSparkGenerationMixin, LlamaForCausalLM)`.

    `generate` uses `self.drafter` when no `assistant_model` is passed; everything else is as transformers has it.
    """

    drafter: DSparkDrafter | None = None

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' `generate`, with `self.drafter` as the assistant unless another is named."""
        if self.drafter is not None and kwargs.get("assistant_model") is None and kwargs.get("custom_generate") is None:
            kwargs["assistant_model"] = self.drafter
        return super().generate(*args, **kwargs)  # type: ignore[misc]


__all__ = [
    "DSparkGenerationMixin",
    "SpeculativeOutput",
    "as_drafter",
    "decode_from_custom_generate",
    "decode_with",
    "install",
]
