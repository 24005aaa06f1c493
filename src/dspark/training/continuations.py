"""Text the target writes behind prompts, greedy or sampled, free of its own generation defaults.

With a `GenerationTap` the hidden states that `generate` computes on the way are kept, so that features of the text
cost no pass of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from ..decoding.capture import HiddenStateCapture
from ..plain_decoding import plain_decoding
from ..target import unwrap
from .features import TargetFeatures, text_decoder, vocabulary_rows


class GenerationTap:
    """Hidden states of every token of one `generate` call.

    Args:
        target: The model that generates.
        layer_ids: Tapped layers.
        dtype: How the tapped states are kept, on the CPU; those after the final norm stay as they are.
    """

    def __init__(self, target: PreTrainedModel, layer_ids: Sequence[int], dtype: torch.dtype) -> None:
        self._target = target
        self._layer_ids = list(layer_ids)
        self._dtype = dtype

    def run(self, generate: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Call `generate()` and keep the states of its passes: all tokens but the last one generated."""
        hidden: list[torch.Tensor] = []
        last: list[torch.Tensor] = []
        hook = text_decoder(self._target).register_forward_hook(
            lambda _module, _args, output: last.append(output.last_hidden_state.detach())
        )
        try:
            with HiddenStateCapture(unwrap(self._target), self._layer_ids) as capture:
                output = capture.run(generate, lambda states: hidden.append(states.to("cpu", self._dtype)))
        finally:
            hook.remove()
        self.states = TargetFeatures(torch.cat(hidden, 1), torch.cat(last, 1))
        return output


class _OneTokenFurther(StoppingCriteria):
    """Ends a row one token after its end, when its last token has been through the target."""

    def __init__(self, ends: torch.Tensor, prompt: int) -> None:
        self._ends = ends
        self._prompt = prompt

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ARG002
        return torch.isin(input_ids[:, self._prompt : -1], self._ends.to(input_ids.device)).any(-1)  # type: ignore[return-value]


@torch.no_grad()
def continue_prompts(
    target: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    temperature: float,
    max_new_tokens: int,
    seed: int,
    ends: Iterable[int] | None = None,
    tap: GenerationTap | None = None,
) -> list[list[int]]:
    """What the target writes behind each prompt, up to and with the first end-of-sequence id.

    Args:
        target: The model.
        prompts: Ids; of different lengths they are padded on the left.
        temperature: 0 is greedy.
        max_new_tokens: Longest continuation.
        seed: Of the sampling.
        ends: Ids that end a text instead of the target's own.
        tap: Keeps the hidden states; generation then goes one token further, so that every returned token is seen.
    """
    how = plain_decoding(target, temperature, ends)
    stops, longest = how["eos_token_id"] or [], max(map(len, prompts))
    ids = torch.tensor([[how["pad_token_id"]] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    if tap is not None:
        # No token has this id: rows end by the criterion alone.
        how["eos_token_id"] = vocabulary_rows(target)
        how["stopping_criteria"] = StoppingCriteriaList([_OneTokenFurther(torch.tensor(stops), longest)])
    torch.manual_seed(seed)
    generate: Any = target.generate

    def run() -> torch.Tensor:
        return generate(
            input_ids=ids.to(target.device),
            attention_mask=mask.to(target.device),
            max_new_tokens=max_new_tokens + (tap is not None),
            **how,
        )

    output = run() if tap is None else tap.run(run)
    return [_cut(row[:max_new_tokens], stops) for row in output[:, longest:].tolist()]


def _cut(text: list[int], ends: Sequence[int]) -> list[int]:
    """Up to and with the first end-of-sequence id."""
    stop = next((place for place, token in enumerate(text) if token in ends), len(text) - 1)
    return text[: stop + 1]


__all__ = ["GenerationTap", "continue_prompts"]
