"""All formats that are read and written, and which one a checkpoint is: by its contents, never by name or guess."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from . import (
    deepspec,
    deepspec_writer,
    flat,
    flat_writer,
    gguf_dflash,
    gguf_prismml,
    gguf_writer,
    muse,
    muse_writer,
    own,
    own_writer,
    specforge,
    specforge_writer,
    speculators,
    speculators_writer,
    zlab,
)
from .checkpoint import Checkpoint
from .choices import decided
from .record import Record
from .refused import reason_to_refuse
from .writing import Writer


class Format(NamedTuple):
    """A format that can be read.

    Attributes:
        name: In records, messages and on the command line.
        title: Who writes it and what it holds, for tables.
        recognises: Whether a checkpoint is one.
        read: Makes the record; takes fields the caller has decided.
    """

    name: str
    title: str
    recognises: Callable[[Checkpoint], bool]
    read: Callable[[Checkpoint, Mapping[str, Any]], Record]


_TITLES = {
    own: "This package",
    deepspec: "DeepSpec and NeMo AutoModel (Qwen3 and Gemma 4; DSpark, and DFlash as rank 0)",
    flat: "vLLM, SGLang, mlx-dspark, TokenSpeed, TensorRT-LLM (flat DSpark configs)",
    speculators: "speculators (DSpark and DFlash, reduced vocabularies)",
    specforge: "SpecForge (DSpark and DFlash, exported, legacy, training state, normalised for SGLang)",
    zlab: "z-lab DFlash (0.1.0 and before)",
    muse: "transformers' Muse Glimmer assistant (DFlash)",
    gguf_dflash: "llama.cpp GGUF, architecture dflash (DSpark and DFlash)",
    gguf_prismml: "PrismML GGUF, architecture dspark",
}
FORMATS: dict[str, Format] = {
    module.NAME: Format(module.NAME, title, module.recognises, module.read) for module, title in _TITLES.items()
}

# All formats that are written, by the name `dspark convert --to` takes.
WRITERS: dict[str, Writer] = {
    writer.name: writer
    for writer in (
        own_writer.WRITER,
        deepspec_writer.WRITER,
        speculators_writer.WRITER,
        specforge_writer.WRITER,
        flat_writer.VLLM,
        flat_writer.SGLANG,
        flat_writer.TENSORRT_LLM,
        flat_writer.MLX_DSPARK,
        muse_writer.WRITER,
        gguf_writer.WRITER,
    )
}


def is_recognised(config: dict[str, Any]) -> bool:
    """Whether a config.json alone is one of these formats'."""
    return any(entry.recognises(Checkpoint("", config, None)) for entry in FORMATS.values())


def read_record(checkpoint: Checkpoint, /, **choices: Any) -> Record:
    """Record of a checkpoint in any format.

    Args:
        checkpoint: By `open_checkpoint`.
        **choices: Fields the caller has decided, where the file does not say or says two things.

    Raises:
        ValueError: It is no drafter, one that cannot be run, one of two formats, or damaged; says what was found.
    """
    if (reason := reason_to_refuse(checkpoint)) is not None:
        raise ValueError(f"{checkpoint.source} cannot be run as a DSpark drafter: {reason}.")
    found = [entry for entry in FORMATS.values() if entry.recognises(checkpoint)]
    if len(found) > 1:
        raise ValueError(
            f"{checkpoint.source} could be {' or '.join(entry.name for entry in found)}: {_seen(checkpoint)}. Remove "
            "the keys of the format it is not in."
        )
    if not found:
        raise ValueError(
            f"{checkpoint.source} is not a DSpark drafter that can be read: {_seen(checkpoint)}. Expected model_type "
            f"'dspark' or one of the formats {', '.join(sorted(FORMATS.keys() - {own.NAME}))}. A target model goes to "
            "`AutoModelForCausalLM`, the drafter to `DSparkDrafter`."
        )
    return decided(found[0].read(checkpoint, choices), choices)


def _seen(checkpoint: Checkpoint) -> str:
    config = checkpoint.config
    if checkpoint.is_gguf:
        return f"it is a GGUF file with general.architecture={config.get('general.architecture')!r}"
    kind = config.get("speculators_model_type")
    also = "" if kind is None else f" and speculators_model_type={kind!r}"
    return (
        f"its config.json has model_type={config.get('model_type')!r} and architectures="
        f"{config.get('architectures')!r}{also}"
    )


__all__ = ["FORMATS", "WRITERS", "Format", "is_recognised", "read_record"]
