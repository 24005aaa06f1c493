"""Writes GGUF files of architecture `dflash`, which llama.cpp serves: DSpark with a sequential head, DFlash without.

Keys, names and dtypes are those of llama.cpp's own converter, with two differences. `sample_from_anchor`,
`has_confidence_head` and `attention.causal` are always written, as readers do not agree on what their absence means. A
stored LM head is written whenever there is one: the engine takes the embedding of a file without it for its LM head.
"""

from __future__ import annotations

import errno
import math
import os
import shlex
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from dspark.files import write_atomically

from .gguf_dflash import NAME, SIZES
from .gguf_file import gguf_package
from .gguf_target import GgufTarget, read_target
from .gguf_tensors import DTYPES, Part, as_bytes, parts
from .gguf_terms import causal_in_block, in_terms, refuses_attention, refuses_rope, window
from .layout import check_finite
from .limits import Tables
from .record import Record
from .resolving import changed
from .stream import FileSum, Progress, sum_of
from .writing import HowToWrite, Writer

_AS_STORED = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f32"}


def refuses(record: Record) -> str | None:
    """Why llama.cpp cannot run a drafter, with the field; None: it can."""
    reasons = chain(_layers(record), _heads_and_tables(record))
    found = next(reasons, None) or refuses_attention(record) or refuses_rope(record)
    return None if found is None else f"{NAME}: {found}"


def _layers(record: Record) -> Iterator[str]:
    width, wide = record["hidden_size"], record["target_hidden_size"] or record["hidden_size"]
    if record["family"] == "gemma4":
        yield (
            "`family` is 'gemma4', and the file holds Qwen3's layers: `--to deepspec`, which llama.cpp's own "
            "converter takes on"
        )
    if record["hidden_act"] != "silu":
        yield f"`hidden_act` is {record['hidden_act']!r}, its MLP has 'silu'"
    for name, part in (("attention_bias", "attention"), ("fc_bias", "context projection")):
        if record[name]:
            yield f"`{name}` is True, its {part} has no bias"
    if wide != width:
        yield f"`target_hidden_size` {wide} differs from `hidden_size` {width}, it wants them equal"


def _heads_and_tables(record: Record) -> Iterator[str]:
    head = record["markov_head_type"]
    if head not in ("vanilla", "none"):
        yield f"`markov_head_type` is {head!r}, it runs 'vanilla'; sglang runs all three"
    if record["enable_confidence_head"] and not record["markov_rank"]:
        yield (
            "`enable_confidence_head` is True and `markov_rank` 0, it reads one beside a sequential head only: "
            "`--fill-zeros` adds one of zeros, which changes no draft"
        )
    for name, none in (("logit_scale", 1), ("final_logit_softcapping", None)):
        if record[name] != none and record["markov_rank"]:
            yield f"`{name}` is {record[name]:g}, and it adds the sequential head's bias to plain logits"
    if record["has_embed"] and not record["has_lm_head"]:
        yield (
            "`has_lm_head` is False and `has_embed` True, it takes the embedding for the LM head then: name the "
            "target with `--target` (`target=`), whose LM head is then stored"
        )


def notes(record: Record) -> list[str]:
    """What is held in another form or computed in another way, in words for the user."""
    found = []
    if record["confidence_temperatures"] is not None:
        found.append("llama.cpp's --spec-draft-p-min compares confidences without their temperatures.")
    if record["family"] == "llama":
        found.append("Layers without norms of queries and keys are written as Qwen3's with norms that change nothing.")
    if record["enable_confidence_head"] and not record["confidence_head_with_markov"]:
        found.append("The confidence head is written with zeros for the Markov embedding, which llama.cpp gives it.")
    if len(found) > bool(record["confidence_temperatures"]):
        found.append("Numbers are then the same up to rounding: compare with a tolerance of 1e-4.")
    return found


def write(
    record: Record,
    destination: str | os.PathLike[str],
    *,
    target: str | os.PathLike[str] | None = None,
    dtype: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write a drafter as one GGUF file, whole or not at all; about one tensor is in memory at a time.

    Args:
        record: What to write.
        destination: The file.
        target: The target's GGUF file, a folder with one, or folder or Hub id of one with a tokenizer: the file holds
            its vocabulary.
        dtype: One of `DTYPES` for matrices (norms and vectors are f32); None: as stored. With block types, tables
            over the vocabulary keep eight bits, and rows that a block does not divide become f16.
        progress: Called with the bytes of tensors done so far and in all.

    Returns:
        The file.

    Raises:
        ValueError: llama.cpp cannot run the drafter, or dtype or target do not fit it.
        ImportError: The package `gguf` is not installed.
        OSError: There are no weights, or the target cannot be read.
    """
    if (reason := refuses(record)) is not None:
        raise ValueError(f"{record.source} cannot be written for llama.cpp. {reason}.")
    if record.tensors is None:
        raise OSError(f"{record.source} has no weights to write.")
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"`dtype` must be one of {', '.join(DTYPES)} for a GGUF file, got {dtype!r}.")
    if target is None:
        raise ValueError(
            "llama.cpp reads the target's vocabulary from the drafter's file. Name the target with `--target` "
            "(`target=`): its GGUF file, or a folder with its tokenizer."
        )
    known = read_target(target)
    if not record["has_embed"] and not record["raw_target_embedding"]:
        factor = known.embedding_factor
        record = changed(record, f"the target {target}", raw_target_embedding=True, embed_scale=factor)
    kind = dtype or _AS_STORED.get(record["dtype"], "f16")
    path = Path(destination)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda temporary: _write(in_terms(record), temporary, known, kind, progress))
    return path


def serve_command(record: Record, target: str | None, path: str | os.PathLike[str]) -> str:
    """The command that serves `target` (its GGUF file) with the drafter's file at `path`."""
    # Without a sequential head the engine takes a file for DFlash, whose anchor drafts nothing, unless told.
    kind = "dspark" if record["markov_rank"] or record["sample_from_anchor"] else "dflash"
    served = shlex.quote(target) if target and target.endswith(".gguf") else "TARGET.gguf"
    return (
        f"llama-server -m {served} -md {shlex.quote(str(path))} --spec-type draft-{kind} "
        f"--spec-draft-n-max {record.num_draft_tokens}"
    )


def _write(record: Record, path: Path, target: GgufTarget, dtype: str, progress: Progress | None) -> None:
    gguf = gguf_package(path)
    writer = gguf.GGUFWriter(path, "dflash")
    whole = list(parts(record, dtype))
    _add_general(gguf, writer, record, whole, dtype)
    _add_drafter(writer, record)
    _add_target(gguf, writer, record, target)
    sizes = []
    for part in whole:
        kind = gguf.GGMLQuantizationType[part.kind]
        shape = gguf.quant_shape_to_byte_shape(part.shape, kind)
        sizes.append(math.prod(shape))
        writer.add_tensor_info(part.name, shape, np.dtype(np.uint8), sizes[-1], kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for done, part in enumerate(whole, 1):
            _write_data(writer, as_bytes(gguf, part))
            if progress is not None:
                progress(sum(sizes[:done]), sum(sizes))
    finally:
        writer.close()
    check_finite(record)


def _write_data(writer: Any, numbers: Any) -> None:
    try:
        writer.write_tensor_data(numbers)
    except OSError as error:
        if error.errno is None:  # numpy only counts what it could write
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        raise


def _add_general(gguf: Any, writer: Any, record: Record, whole: list[Part], dtype: str) -> None:
    """Keys of any GGUF file."""
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(Path(record.source).name.removesuffix(".gguf"))
    writer.add_size_label(gguf.size_label(sum(math.prod(part.shape) for part in whole), 0, 0, 0))
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if dtype == "f32" else f"MOSTLY_{dtype.upper()}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _add_drafter(writer: Any, record: Record) -> None:
    """Keys of the drafter itself."""
    adders = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32, bool: writer.add_bool}
    keys: dict[str, Any] = {key: record[field] for field, key in SIZES.items()}
    keys |= {
        "attention.value_length": record["head_dim"],
        "attention.causal": causal_in_block(record),
        "block_size": record["block_size"],
        "sample_from_anchor": record["sample_from_anchor"],
        "has_confidence_head": record["enable_confidence_head"],
        **_rope(record),
    }
    if (cut := window(record)) is not None:
        keys["attention.sliding_window"] = cut
        writer.add_sliding_window_pattern([layer.window is not None for layer in record["layers_attention"]])
    for name, key, none in (
        ("embed_scale", "embedding_scale", 1), ("logit_scale", "logit_scale", 1),
        ("final_logit_softcapping", "final_logit_softcapping", None),
    ):  # fmt: skip
        if record[name] != none:
            keys[key] = record[name]
    for key, value in keys.items():
        adders[type(value)](f"dflash.{key}", value)
    writer.add_array("dflash.target_layers", [layer + 1 for layer in record["target_layer_ids"]])


def _rope(record: Record) -> dict[str, Any]:
    rope = record["rope_parameters"]
    keys = {"rope.freq_base": float(rope["rope_theta"])}
    if rope["rope_type"] in ("linear", "yarn"):
        keys |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope["rope_type"] == "yarn":
        keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    return keys


def _add_target(gguf: Any, writer: Any, record: Record, target: GgufTarget) -> None:
    """The vocabulary, and a key for positions with sections."""
    for key, (value, kind, element) in target.padded(record["vocab_size"]).items():
        if key != gguf.Keys.Tokenizer.MASK_ID:
            writer.add_key_value(key, value, kind, element)
    writer.add_mask_token_id(record["mask_token_id"])
    if target.has_sections:
        writer.add_rope_dimension_sections([record["head_dim"] // 2, 0, 0, 0])


def _tables(record: Record) -> Tables:
    return "stored" if record["has_embed"] and not record["has_lm_head"] else "optional"


def _write_as_told(record: Record, destination: Path, how: HowToWrite) -> list[FileSum]:
    path = write(record, destination, target=how.target, dtype=how.dtype, progress=how.progress)
    return [sum_of(path)._replace(name=Path(how.folder or path).name)]


WRITER = Writer(
    NAME, "llama.cpp", (NAME,), refuses, _write_as_told, serve_command, tables=_tables, notes=notes, terms=in_terms,
    suffix=".gguf", is_exact=False,
)  # fmt: skip

__all__ = ["NAME", "WRITER", "notes", "refuses", "serve_command", "write"]
