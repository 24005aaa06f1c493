"""Doors into the loop: `generate(assistant_model=drafter)`, `generate(custom_generate=drafter.decode)`, a mixin.

Importing `dspark` wraps the public `GenerationMixin.generate` once. A call whose assistant or decoding method is one
of our drafters goes on through transformers' own `custom_generate=<callable>` extension point, so that inputs,
processors, criteria and caches are prepared by the library itself; every other call passes through untouched. That
extension point hands the callable neither streamer nor tokenizer, so both are bound here. (Wrapping the private
`_assisted_decoding` instead would meet assisted mode's refusals of batches and recurrent models first.)
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMixin
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList

from ..compat import check_generation_hooks, output_cache_field, pop_cache
from ..modeling_dspark import DSparkDrafter
from ..pairing import require_pair
from ..speculation import SpeculationConfig
from ..stats import SpeculationStats
from ..target import logit_rows
from .arguments import bind_stop_strings, call_settings, check_arguments, check_devices, check_mode, drafter_of
from .capture import HiddenStateCapture
from .curve import warn_of_another_curve
from .draws import Draws, check_generators
from .loop import decode
from .processors import Processors
from .record import Recorder
from .request import Request
from .session import TargetSession
from .state import DecodingRun, DraftVocabulary, Text
from .stopping import StopRules

_MARK = "_dspark_original"


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """transformers' output with the call's statistics. The cache of a batch is None: its rows have different lengths.

    Attributes:
        speculation: [`SpeculationStats`] of this call.
    """

    speculation: SpeculationStats | None = None


def install() -> None:
    """Wrap `GenerationMixin.generate`; calling it again changes nothing.

    Raises:
        ImportError: A hook the loop stands on moved; names it and the supported versions.
    """
    original = GenerationMixin.generate
    if hasattr(original, _MARK):
        return
    check_generation_hooks()
    names = list(inspect.signature(original).parameters)[1:-1]  # without `self` and `**kwargs`

    @functools.wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        named = dict(zip(names, args, strict=False))
        call = {**named, **kwargs}
        drafter = drafter_of(call)
        is_malformed = len(args) > len(names) or named.keys() & kwargs  # a TypeError, which is Python's to raise
        if drafter is None or is_malformed:
            return original(self, *args, **kwargs)
        return generate_with_drafter(self, drafter, original, call)

    setattr(generate, _MARK, original)
    GenerationMixin.generate = generate  # type: ignore[method-assign]


def generate_with_drafter(
    target: PreTrainedModel, drafter: DSparkDrafter, original: Callable[..., Any], call: dict[str, Any]
) -> Any:
    """`target.generate(**call)` by our loop; `call` names the drafter.

    Raises:
        ValueError: The pair, the generation mode or an option cannot be exact; nothing has run yet.
    """
    call = dict(call)
    if call.pop("assistant_model", None) is not None and call.get("custom_generate") is not None:
        raise ValueError("`custom_generate` and `assistant_model` both choose the decoding loop: pass one of them.")
    call.pop("custom_generate", None)
    call.pop("assistant_tokenizer", None)  # the pair shares one vocabulary, which `require_pair` holds it to
    streamer, tokenizer = call.get("streamer"), call.pop("tokenizer", None)
    generators = call.pop("row_generators", None)
    settings = call_settings(drafter, call.get("generation_config"), call)
    check_arguments(target, call)
    bind_stop_strings(target, call, tokenizer)
    require_pair(target, drafter, tokenizer=tokenizer)
    check_devices(target, call)
    # `generate` itself puts the prompt to the streamer, the loop the rest.
    has_cache = pop_cache(call)[1] is not None
    door = _Door(drafter, settings, streamer, generators, has_callers_cache=has_cache)
    return original(target, custom_generate=door, **call)


class _Door:
    """The callable handed to `generate(custom_generate=...)`, with what that extension point drops bound in it."""

    def __init__(
        self,
        drafter: DSparkDrafter,
        settings: SpeculationConfig,
        streamer: Any,
        row_generators: Sequence[torch.Generator] | None,
        *,
        has_callers_cache: bool,
    ) -> None:
        self.drafter = drafter
        self.settings = settings
        self.streamer = streamer
        self.row_generators = row_generators
        self.has_callers_cache = has_callers_cache

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
            settings=self.settings, streamer=self.streamer, row_generators=self.row_generators,
            model_kwargs=model_kwargs, has_callers_cache=self.has_callers_cache,
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
    door = _Door(drafter, drafter.speculation, None, None, has_callers_cache=False)
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
    row_generators: Sequence[torch.Generator] | None,
    model_kwargs: dict[str, Any],
    has_callers_cache: bool,
) -> Any:
    """The decoding method behind every door; arguments as transformers' own decoding methods take them."""
    check_generators(row_generators, input_ids.shape[0])
    recorder = Recorder(generation_config, streamer)
    stop_rules = StopRules(stopping_criteria)
    check_mode(target, generation_config, recorder, batch_size=input_ids.shape[0])
    stop_rules.check_batch(input_ids.shape[0])
    stats = settings.new_stats(input_ids.shape[0])
    capture = HiddenStateCapture(target, drafter.config.target_layer_ids or [])
    session = TargetSession(target, model_kwargs, capture, stats)
    batch, prompt = input_ids.shape
    session.check(
        max_length=generation_config.max_length + _extra_width(input_ids, model_kwargs),
        batch_size=batch,
        is_callers=has_callers_cache,
    )
    warn_of_another_curve(target, settings.throughput_curve)
    policy = drafter.take_policy(target, settings)
    request = Request(
        processors=Processors(logits_processor, num_rows=batch),
        stop_rules=stop_rules,
        do_sample=bool(generation_config.do_sample),
        draws=Draws(row_generators),
        recorder=recorder,
        stats=stats,
    )
    request.calibrate(drafter)
    run = DecodingRun(
        drafter=drafter,
        shared=drafter.shared_modules(target),
        vocabulary=DraftVocabulary.of(drafter, logit_rows(target), input_ids.device),
        session=session,
        settings=settings,
        policy=policy,
        text=Text(input_ids.clone(), [prompt] * batch, prompt),
        stats=stats,
        requests=dict.fromkeys(range(batch), request),
        rows=list(range(batch)),
    )
    try:
        with capture:
            decode(run, input_ids, generation_config)
        if has_callers_cache or generation_config.return_dict_in_generate:
            session.settle(run.text.prefix(0), run.text.lengths[0] - prompt)
    finally:
        cache = session.finish()
        drafter.keep_policy(target, settings, policy)
    if streamer is not None:
        streamer.end()
    drafter.last_stats = stats
    sequences = finished_sequences(run, generation_config)
    if not generation_config.return_dict_in_generate:
        return sequences
    returned = recorder.outputs()
    returned[output_cache_field()] = cache if batch == 1 else None  # rows have different lengths, or have left
    return SpeculativeOutput(sequences=sequences, speculation=stats, **returned)  # type: ignore[arg-type]


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


class DSparkGenerationMixin:
    """For people who compose a model class: `class MyModel(DSparkGenerationMixin, LlamaForCausalLM)`.

    `generate` uses `self.drafter` when no `assistant_model` is passed; everything else is as transformers has it. The
    drafter is a plain attribute, not a submodule: it is neither saved nor moved with the model.
    """

    drafter: DSparkDrafter | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "drafter":
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' `generate`, with `self.drafter` as the assistant unless another is named."""
        names_loop = kwargs.get("assistant_model") is not None or kwargs.get("custom_generate") is not None
        if self.drafter is not None and not names_loop:
            kwargs["assistant_model"] = self.drafter
        return super().generate(*args, **kwargs)  # type: ignore[misc]


__all__ = [
    "DSparkGenerationMixin",
    "SpeculativeOutput",
    "decode_from_custom_generate",
    "decode_with",
    "install",
]
