"""`dspark inspect`: what a checkpoint is, without loading its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from safetensors import safe_open

from ..hub import read_config
from .common import bad_input_exits, check_source, out, print_json

_FIELDS = (
    "family", "block_size", "sample_from_anchor", "mask_token_id", "target_layer_ids", "num_target_layers",
    "hidden_size", "num_hidden_layers", "vocab_size", "draft_vocab_size", "markov_head_type", "markov_rank",
    "enable_confidence_head", "confidence_head_with_markov", "confidence_temperatures", "share_embedding",
    "share_lm_head", "target",
)  # fmt: skip


def inspect(
    source: Annotated[str, typer.Argument(help="Drafter: local folder or Hub id, in any format that can be read.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Say what a drafter is: its settings as they will be used, its tensors, what it borrows from the target.

    Exit codes: 0 a drafter that can be loaded, 2 anything else, with the reason.
    """
    with bad_input_exits():
        check_source(source)
        config = read_config(source)
        tensors = _tensors(Path(source))
    facts: dict[str, Any] = {field: getattr(config, field) for field in _FIELDS}
    borrowed = [name for name, is_shared in (("embedding", config.share_embedding), ("LM head", config.share_lm_head)) if is_shared]  # fmt: skip  # noqa: E501
    facts["borrows_from_target"] = borrowed
    if tensors is not None:
        facts["tensors"] = len(tensors)
        facts["parameters"] = sum(size for _, size in tensors.values())
        facts["dtypes"] = sorted({dtype for dtype, _ in tensors.values()})
    if as_json:
        print_json(facts)
        return
    table = Table(title=str(source), show_header=False)
    for name, value in facts.items():
        table.add_row(name, str(value))
    out.print(table)


def _tensors(folder: Path) -> dict[str, tuple[str, int]] | None:
    """Name to dtype and number of elements, from the headers of a local folder; None for a Hub id."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return None
    found = {}
    for file in files:
        with safe_open(file, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118 - a safetensors handle is not a mapping
                part = handle.get_slice(name)
                size = 1
                for extent in part.get_shape():
                    size *= extent
                found[name] = (part.get_dtype(), size)
    return found


__all__ = ["inspect"]
