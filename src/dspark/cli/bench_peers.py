"""`dspark bench peers`: our policies beside other ways to decode faster, on the same weights and prompts."""

from __future__ import annotations

import importlib
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModel

from ..conversion import convert
from ..evaluation.peers import PLAIN, Way, generate_way, measure_peers, require_native_dflash
from ..evaluation.peers_report import peers_notes, peers_report, peers_tables, write_peers
from ..evaluation.prompt_sets import chat_ids, gather_prompts
from ..evaluation.provenance import machine_note, public_name, versions
from ..speculation import SpeculationConfig
from .bench_shared import (
    AsJson,
    Curve,
    Device,
    Drafter,
    Dtype,
    Gguf,
    PromptFiles,
    Target,
    Threads,
    chosen_pair,
    load_curve,
    pack,
    policy_ways,
    show,
)  # fmt: skip
from .common import bad_input_exits, err, out, print_json
from .loading import load_drafter

_POLICIES = ["fixed", "threshold", "auto"]
LOOKUP, NATIVE, SAME_DRAFTER = "prompt lookup", "transformers DFlash", "fixed, DFlash's drafter"

Peers = Annotated[
    list[str],
    typer.Option(
        help="Another way, as module:function; called with target, tokenizer, input_ids, max_new_tokens it returns "
        "the ids of the whole text. Repeatable."
    ),
]


def peers(
    target: Target,
    drafter: Drafter,
    gguf_file: Gguf = None,
    prompts: PromptFiles = [],  # noqa: B006 - typer reads it, nothing changes it
    limit: Annotated[int, typer.Option(min=1, help="Prompts from the start of each set.")] = 2,
    policy: Annotated[list[str], typer.Option(help="Policies of ours. Repeatable.")] = _POLICIES,
    survival_threshold: Annotated[float, typer.Option(min=0, max=1, help="Of the policy `threshold`.")] = 0.3,
    curve: Curve = None,
    prompt_lookup: Annotated[int, typer.Option(min=0, help="`prompt_lookup_num_tokens`; 0 leaves it out.")] = 10,
    dflash: Annotated[
        str | None,
        typer.Option(help="Drafter without heads, which transformers' own DFlash runs too: folder or Hub id."),
    ] = None,
    peer: Peers = [],  # noqa: B006
    max_new_tokens: Annotated[int, typer.Option(min=1, help="New tokens per prompt.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of every prompt, of each way.")] = 3,
    dtype: Dtype = "auto",
    device: Device = None,
    threads: Threads = None,
    out_folder: Annotated[
        Path | None, typer.Option("--out", help="Folder for peers.json, peers.md, the plot.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Speed over plain generate: prompt lookup, our policies, transformers' own DFlash and ways of yours.

    All take turns on the same weights and prompts, one row, greedily. A way whose ids differ from plain generate says
    so and has no speed.

    Exit codes: 0 done, 1 a way of ours differs in fp32, 2 bad input.
    """
    with bad_input_exits():
        foreign = [(name, _function(name)) for name in dict.fromkeys(peer)]
        if dflash is not None:
            require_native_dflash()
        known = None if curve is None else load_curve(curve)
        settings = policy_ways(policy, survival_threshold, known)
        sets = gather_prompts([], prompts, limit=limit)
        model, tokenizer, draft = chosen_pair(target, drafter, gguf_file, dtype, device, threads)
        with ExitStack() as stack:
            pack(stack, model, draft)
            ways = [generate_way(model, PLAIN, max_new_tokens, is_ours=True)]
            if prompt_lookup:
                ways.append(generate_way(model, LOOKUP, max_new_tokens, prompt_lookup_num_tokens=prompt_lookup))
            ways += [
                generate_way(model, name, max_new_tokens, is_ours=True, assistant_model=draft, speculation=how)
                for name, how in settings.items()
            ]
            if dflash is not None:
                ways += _dflash_ways(stack, dflash, target, gguf_file, model, max_new_tokens)
            ways += [_foreign_way(name, function, model, tokenizer, max_new_tokens) for name, function in foreign]
            status = stack.enter_context(err.status("bench"))
            ids = {name: [chat_ids(tokenizer, text) for text in texts] for name, texts in sets.items()}
            cells = measure_peers(model, ids, ways, repeats=repeats, progress=status.update)
            report = peers_report(cells, {
                "target": public_name(target), "drafter": public_name(drafter),
                "dflash": None if dflash is None else public_name(dflash), "max_new_tokens": max_new_tokens,
                "repeats": repeats, "machine": machine_note(model, packed=model.device.type == "cpu"),
                "versions": versions(),
            })  # fmt: skip
        problem = write_peers(report, out_folder) if out_folder is not None else None
    if problem is not None:
        err.print(problem, style="yellow", markup=False, highlight=False, soft_wrap=True)
    if as_json:
        print_json(report)
    else:
        for each in peers_tables(report):
            show(each.title, each.header, each.rows)
        for line in peers_notes(report):
            out.print(line, markup=False, highlight=False, soft_wrap=True)
    ours = {way.name for way in ways if way.is_ours}
    if model.dtype == torch.float32 and not all(cell.is_equal for cell in cells if cell.way in ours):
        raise typer.Exit(1)


def _function(name: str) -> Callable[..., Any]:
    """The function of `--peer`; modules in the working directory count too.

    Raises:
        ValueError: Not `module:function`, or there is none of that name.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ValueError(f"--peer is written module:function, got {name!r}.")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except ImportError as error:
        raise ValueError(f"--peer {name}: {module} cannot be imported ({error}). Is it installed?") from error
    if not callable(found):
        raise ValueError(f"--peer {name}: {module} has no function {attribute!r}.")
    return found  # type: ignore[no-any-return]


def _foreign_way(name: str, function: Callable[..., Any], model: Any, tokenizer: Any, max_new_tokens: int) -> Way:
    return Way(name, lambda ids: function(model, tokenizer, ids, max_new_tokens))


def _dflash_ways(
    stack: ExitStack, source: str, target: str, gguf_file: str | None, model: Any, max_new_tokens: int
) -> list[Way]:
    """transformers' own DFlash on the drafter written in its format, and our loop on the same weights.

    Raises:
        ValueError: The format cannot hold that drafter; the field is named.
    """
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "drafter"
    convert(source, folder, to="muse", target=target, target_gguf_file=gguf_file)
    native = AutoModel.from_pretrained(folder, dtype=model.dtype).eval().to(model.device)
    ours = load_drafter(source, model.dtype).to(model.device)
    pack(stack, native, ours)
    same = SpeculationConfig("fixed")
    return [
        generate_way(model, NATIVE, max_new_tokens, assistant_model=native, speculation_type="dflash"),
        generate_way(model, SAME_DRAFTER, max_new_tokens, is_ours=True, assistant_model=ours, speculation=same),
    ]


__all__ = ["peers"]
