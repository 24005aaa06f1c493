"""What a conversion needs of the target: its sizes, what it does to its embeddings, and its two tables, unread.

The target is never loaded: its class is built without weights to learn which tensors the tables are.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dspark.borrowing import own_factor
from dspark.target import embedding_module, head_module, text_config

from .checkpoint import find_gguf, open_some
from .gguf_file import open_gguf
from .stored import FLOATS, StoredTensor

_GGUF_NAMES = ("token_embd.weight", "output.weight")


@dataclass(frozen=True)
class TargetTables:
    """A target.

    Attributes:
        source: Folder, file or Hub id.
        num_hidden_layers, hidden_size, vocab_size: Its sizes; rows of its embedding.
        embedding_factor: What its embedding module multiplies rows by.
        architecture: Its class.
        find: Opens both tables, embedding first; see [`TargetTables.tables`].
    """

    source: str
    num_hidden_layers: int
    hidden_size: int
    vocab_size: int
    embedding_factor: float
    architecture: str
    find: Callable[[], tuple[StoredTensor, StoredTensor]]

    def tables(self) -> tuple[StoredTensor, StoredTensor]:
        """Embedding and LM head, `[V, D_t]` each; of a tied target they are one tensor.

        Raises:
            ValueError: They cannot be told from other tensors, are quantised, or the head has a bias.
            OSError: There are no weights to read.
        """
        found = self.find()
        for tensor, part in zip(found, ("embedding", "LM head"), strict=True):
            if tensor.shape != (self.vocab_size, self.hidden_size):
                raise ValueError(
                    f"{tensor.key} of the target {self.source} is {list(tensor.shape)}, its {part} must be "
                    f"{[self.vocab_size, self.hidden_size]}."
                )
            if tensor.dtype not in FLOATS and not tensor.transform:
                raise ValueError(
                    f"{tensor.key} of the target {self.source} is stored as {tensor.dtype}, codes of a quantised "
                    "table. Name the unquantised target."
                )
        return found


def open_target(source: str | os.PathLike[str], *, gguf_file: str | None = None, **hub_kwargs: Any) -> TargetTables:
    """Open a target: its config is read, its weights are not.

    Args:
        source: Folder, GGUF file or Hub id.
        gguf_file: GGUF file inside the folder.
        **hub_kwargs: `revision`, `token`, `cache_dir`, ...

    Raises:
        OSError: There is no config, or no such file.
        ValueError: Not a causal LM with an embedding and an LM head.
    """
    folder, name = _split(source, gguf_file)
    gguf = {} if name is None else {"gguf_file": name}
    model = _empty_model(source, folder, {**gguf, **hub_kwargs})
    embedding, head = embedding_module(model), head_module(model)
    if embedding is None or head is None:
        raise ValueError(f"{source} is a {type(model).__name__}, which has no embedding and LM head to share.")
    text = text_config(model)

    def find() -> tuple[StoredTensor, StoredTensor]:
        if getattr(head, "bias", None) is not None:
            raise ValueError(f"The LM head of the target {source} has a bias, which a drafter's table cannot hold.")
        is_tied = bool(getattr(model.config, "tie_word_embeddings", False))
        if name is not None:
            return _gguf_tables(folder, name, hub_kwargs)
        paths = [_path(model, module) for module in (embedding, head)]
        return _tables(str(source), paths, hub_kwargs, is_tied=is_tied)

    return TargetTables(
        str(source), text.num_hidden_layers, text.hidden_size, int(embedding.weight.shape[0]), own_factor(embedding),
        type(model).__name__, find,
    )  # fmt: skip


def _empty_model(source: Any, folder: str, how: dict[str, Any]) -> Any:
    """The target without weights.

    Raises:
        OSError: There is no config, or no such file.
        ValueError: Not a causal LM that transformers can build.
    """
    try:
        config = AutoConfig.from_pretrained(folder, **how)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except (OSError, ImportError):
        raise
    except Exception as error:  # a config.json of anything ends in an error of any class
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{source} cannot be used as the target: no causal LM can be built from its config "
            f"({type(error).__name__}: {reason:.200}). Name the model the drafter was trained for."
        ) from error


def _split(source: Any, gguf_file: str | None) -> tuple[str, str | None]:
    """Folder or Hub id, and the name of a GGUF file in it."""
    path = Path(source).expanduser()
    if path.is_file():
        return str(path.parent), path.name
    return (str(path) if path.exists() else str(source)), gguf_file


def _path(model: Any, module: Any) -> str:
    return next(name for name, one in model.named_modules() if one is module)


def _tables(
    source: str, paths: list[str], hub_kwargs: dict[str, Any], *, is_tied: bool
) -> tuple[StoredTensor, StoredTensor]:
    chosen: list[str] = []

    def choose(names: list[str]) -> list[str]:
        embedding = _one(source, names, paths[0])
        if embedding is None:
            raise ValueError(f"{source} stores no tensor for its embedding, {paths[0]}.weight.")
        head = _one(source, names, paths[1])
        if head is None and not is_tied:
            raise ValueError(f"{source} stores no tensor for its LM head, {paths[1]}.weight, and does not tie it.")
        chosen.extend((embedding, embedding if head is None else head))
        return list(dict.fromkeys(chosen))

    held = open_some(source, choose, **hub_kwargs)
    return held[chosen[0]], held[chosen[1]]


def _one(source: str, names: list[str], path: str) -> str | None:
    """The stored name of a module's weight: checkpoints may put another prefix before it than the class does."""
    last = path.rsplit(".", 1)[-1]
    if f"{path}.weight" in names:
        return f"{path}.weight"
    found = [name for name in names if name == f"{last}.weight" or name.endswith(f".{last}.weight")]
    if len(found) > 1:
        raise ValueError(f"{source} stores {', '.join(found)}: which one is {path}.weight cannot be told.")
    return found[0] if found else None


def _gguf_tables(folder: str, name: str, hub_kwargs: dict[str, Any]) -> tuple[StoredTensor, StoredTensor]:
    path = find_gguf(folder, name, has_config=True, **hub_kwargs)
    assert path is not None
    tensors = open_gguf(path)[1]
    if _GGUF_NAMES[0] not in tensors:
        raise ValueError(f"{path} has no tensor {_GGUF_NAMES[0]}: it holds no language model.")
    embedding = tensors[_GGUF_NAMES[0]]
    return embedding, tensors.get(_GGUF_NAMES[1], embedding)


__all__ = ["TargetTables", "open_target"]
