"""`dspark generate`: text from any target and drafter."""

from __future__ import annotations

from typing import Annotated

import torch
import typer
from transformers import TextStreamer

from ..cpu import optimize_for_cpu
from ..evaluation import chat_ids
from .common import (
    Curve,
    MaxNewTokens,
    Pack,
    PolicyName,
    Seed,
    Temperature,
    Threads,
    Threshold,
    Window,
    bad_input_exits,
    chosen_curve,
    chosen_device,
    err,
    out,
    parse_dtype,
    print_json,
    speculation,
    use_threads,
)
from .loading import load_pair

_ROUNDS_THAT_TELL, _HARDLY_ANY = 20, 1.1  # rounds; accepted length


def generate(
    prompt: Annotated[
        str, typer.Argument(help="The user's turn; the target's chat template is applied where it has one.")
    ],
    target: Annotated[str, typer.Option(help="Target: folder or Hub id.")],
    drafter: Annotated[str, typer.Option(help="Drafter: folder or Hub id.")],
    gguf_file: Annotated[str | None, typer.Option(help="GGUF file inside the target's folder.")] = None,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.0,
    threshold: Threshold = 0.0,
    policy: PolicyName = "threshold",
    curve: Curve = None,
    window: Window = None,
    seed: Seed = 0,
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "fp32",
    device: Annotated[str | None, typer.Option(help="Of both models. Default: cuda where there is one.")] = None,
    threads: Threads = None,
    pack: Pack = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print text and statistics as JSON instead of streaming.")
    ] = False,
) -> None:
    """Stream an answer of TARGET, drafted by DRAFTER; the text is exactly what the target alone would give.

    Example: dspark generate "What is 17 times 23?" --target Qwen/Qwen3-4B --drafter deepseek-ai/dspark_qwen3_4b_block7

    Exit codes: 0 done, 2 bad input (a drafter that does not fit the target, an unknown dtype, ...).
    """
    with bad_input_exits():
        settings = speculation(policy, threshold, chosen_curve(curve, policy), context_window=window)
        use_threads(threads)
        device = chosen_device(device)
        model, tokenizer, draft = load_pair(target, drafter, gguf_file, parse_dtype(dtype), device)
        if pack and device == "cpu":
            optimize_for_cpu(model)
            optimize_for_cpu(draft)
        torch.manual_seed(seed)
        sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        ids = chat_ids(tokenizer, prompt).to(device)
        if not ids.numel():
            raise ValueError("The prompt has no tokens. Give some text, or a target with a chat template.")
        result = model.generate(
            ids,
            assistant_model=draft,
            max_new_tokens=max_new_tokens,
            speculation=settings,
            return_dict_in_generate=True,
            streamer=None if as_json else TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
            tokenizer=tokenizer,
            **sampling,
        )
    stats = result.speculation
    if as_json:
        text = tokenizer.decode(result.sequences[0, ids.shape[1] :], skip_special_tokens=True)
        print_json({"text": text, "speculative_decoding": stats.to_dict()})
        return
    err.print(
        f"[dim]{stats.num_new_tokens} tokens, {stats.num_target_passes} target passes, accepted length "
        f"{stats.mean_acceptance_length:.2f}, {stats.draft_acceptance_rate:.0%} of verified drafts accepted[/]"
    )
    if stats.num_rounds >= _ROUNDS_THAT_TELL and stats.mean_acceptance_length < _HARDLY_ANY:
        err.print(
            "Hardly any draft was accepted: `dspark doctor` with the same --target and --drafter says why.",
            style="yellow", markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip
    out.file.flush()


__all__ = ["generate"]
