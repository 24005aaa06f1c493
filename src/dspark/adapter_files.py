"""PEFT adapters on disk: where one's drafter is, what its folder holds, and which drafter it may be put on.

An adapter is only right on the drafter it was trained on. A note of that one, for which PEFT has no field, goes into
`auto_mapping` of adapter_config.json, where PEFT itself notes the class of the base.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import PreTrainedConfig
from transformers.utils import cached_file, logging

from .files import write_atomically
from .peft_layers import base_module
from .target import describe
from .target_note import draft_vocab_hash, hash_matrices

logger = logging.get_logger("dspark.adapters")

CONFIG_NAME, WEIGHTS_NAME, PICKLE_NAME = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
_PREFIX = "base_model.model."  # PEFT's, in front of every tensor name of an adapter file
_MOST_NAMED = 6  # tensors listed by name in a message


def require_peft() -> Any:
    """The `peft` package.

    Raises:
        ImportError: It is not installed; says how to get it.
    """
    try:
        import peft
    except ImportError as error:
        raise ImportError("Adapters need PEFT, which is not installed: `pip install 'dspark[peft]'`.") from error
    return peft


# --- the folder ---------------------------------------------------------------------------------------------------


def find_adapter(source: Any, **hub_kwargs: Any) -> Path | None:
    """Folder of an adapter, for a Hub id the one in the cache; None where there is no adapter.

    Args:
        source: Local folder or Hub id.
        **hub_kwargs: `revision`, `token`, `cache_dir`, `subfolder`, ... as in transformers.
    """
    path = _file(source, CONFIG_NAME, hub_kwargs)
    return None if path is None else Path(path).parent


def _file(source: Any, name: str, hub_kwargs: dict[str, Any]) -> str | None:
    """Path of a file of a folder or Hub id, downloaded if need be; None if there is none or no connection."""
    kinds = ("gated_repo", "missing_entries", "connection_errors")
    quiet = {f"_raise_exceptions_for_{kind}": False for kind in kinds}
    return cached_file(os.fspath(source), name, **quiet, **hub_kwargs)


def read_adapter_config(folder: Path, source: Any) -> Any:
    """The `PeftConfig` of an adapter's folder; `source` is its name in messages.

    Raises:
        ImportError: PEFT is not installed.
        ValueError: The file is damaged, or the adapter was trained on another class of model.
    """
    peft = require_peft()
    try:
        config = peft.PeftConfig.from_pretrained(str(folder))
    except (KeyError, TypeError, ValueError) as error:  # JSON errors are ValueErrors
        raise ValueError(
            f"The {CONFIG_NAME} of {source} is not valid ({type(error).__name__}: {error}). It is damaged, or was "
            "written by another version of PEFT: save the adapter again."
        ) from error
    base = (config.auto_mapping or {}).get("base_model_class")
    if base not in (None, "DSparkDrafter"):
        raise ValueError(
            f"The adapter {source} was trained on a {base}, not on a DSpark drafter. An adapter of the target goes on "
            "the target: `PeftModel.from_pretrained(target, folder)`."
        )
    return config


def drafter_of_adapter(config: Any, folder: Path, source: Any) -> str:
    """Folder or Hub id of the drafter an adapter was trained on.

    A relative path is looked for from the working directory, from the adapter's folder, and beside that folder.

    Raises:
        ValueError: The adapter names none, or itself.
    """
    name = config.base_model_name_or_path
    if not name:
        raise ValueError(
            f"The {CONFIG_NAME} of {source} does not say which drafter it was trained on (base_model_name_or_path is "
            f"{name!r}). Write its folder or Hub id there, or load it yourself: `drafter.load_adapter(folder)`."
        )
    place = next((path for path in (Path(name), folder / name, folder.parent / name) if path.is_dir()), None)
    if place is not None and place.samefile(folder):
        raise ValueError(
            f"The {CONFIG_NAME} of {source} names its own folder as the drafter it was trained on "
            f"(base_model_name_or_path is {name!r}), and there is none in it. Write the drafter's place there."
        )
    return name if place is None else str(place)


def read_tensors(source: Any, **hub_kwargs: Any) -> dict[str, torch.Tensor]:
    """Tensors of an adapter, by the names the drafter has for them.

    Raises:
        OSError: There are none, only a pickle, or the file is damaged.
    """
    path = _file(source, WEIGHTS_NAME, hub_kwargs)
    if path is None:
        has_pickle = _file(source, PICKLE_NAME, hub_kwargs) is not None
        found = f", only {PICKLE_NAME}, a pickle, which can run code when it is opened." if has_pickle else "."
        raise OSError(
            f"{source} has no {WEIGHTS_NAME}{found} Adapters load from safetensors only: save it again with "
            "`save_pretrained`."
        )
    try:
        return {name.removeprefix(_PREFIX): tensor for name, tensor in load_file(path).items()}
    except SafetensorError as error:
        raise OSError(
            f"{WEIGHTS_NAME} of {source} cannot be read ({error}): it is damaged or was cut short. Download or save "
            "it again."
        ) from error


def check_tensors(
    found: Mapping[str, torch.Tensor],
    wanted: Mapping[str, torch.Tensor],
    base: Mapping[str, torch.Tensor],
    *,
    source: Any,
    drafter: Any,
) -> None:
    """Hold an adapter file to the tensors its config asks for on this drafter, before anything is changed.

    Args:
        found: What the file has.
        wanted: What it must have.
        base: What it may have besides (PEFT stores an embedding it was told to).
        source, drafter: For the message.

    Raises:
        ValueError: Names missing, unexpected and wrongly shaped tensors.
    """
    known = {**base, **wanted}
    shapes = (
        f"{name} is {tuple(found[name].shape)}, here {tuple(known[name].shape)}"
        for name in sorted(found.keys() & known.keys())
        if found[name].shape != known[name].shape
    )
    listed = {
        "missing tensors": _some(sorted(wanted.keys() - found.keys()), ", "),
        "unexpected tensors": _some(sorted(found.keys() - known.keys()), ", "),
        "wrong shapes": _some(shapes, "; "),
    }
    problems = [f"{what}: {which}" for what, which in listed.items() if which]
    if problems:
        raise ValueError(
            f"The adapter {source} does not fit {describe(drafter)}: {'; '.join(problems)}. It was trained on another "
            "drafter or another kind of model, or its config is not its own; nothing was loaded."
        )


def _some(names: Iterable[str], separator: str) -> str:
    names = list(names)
    more = f"{separator}and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return separator.join(names[:_MOST_NAMED]) + more


# --- the base an adapter belongs to -------------------------------------------------------------------------------


def base_note(drafter: Any) -> dict[str, Any]:
    """What an adapter's config says of its base: class, hash of the reduced vocabulary, hash of sampled weights."""
    blocks = [base_module(base_module(layer).mlp) for layer in drafter.layers]
    matrices = [drafter.fc, *(block.down_proj for block in blocks)]
    return {
        "base_model_class": "DSparkDrafter",
        "parent_library": "dspark.modeling_dspark",
        "draft_vocab_hash": draft_vocab_hash(drafter),
        "drafter_hash": hash_matrices(base_module(matrix).weight for matrix in matrices),
    }


def note_base(folder: str | os.PathLike[str], drafter: Any) -> None:
    """Add the note of `drafter` to the adapter configs that PEFT wrote to `folder`."""
    places = [Path(folder), *(Path(folder, name) for name in drafter.peft_config)]
    for path in (place / CONFIG_NAME for place in places):
        if path.is_file():
            config = json.loads(path.read_text(encoding="utf-8"))
            config["auto_mapping"] = base_note(drafter)
            text = json.dumps(config, indent=2, sort_keys=True)
            write_atomically(path, partial(Path.write_text, data=text, encoding="utf-8"))


def check_base(drafter: Any, config: Any, source: Any) -> None:
    """Hold an adapter to the reduced vocabulary of the drafter it was trained on.

    Raises:
        ValueError: This drafter's is another: the heads' rows would stand for other tokens.
    """
    noted, own = _noted(config), draft_vocab_hash(drafter)
    if noted.get("draft_vocab_hash", own) != own:
        raise ValueError(
            f"The adapter {source} does not fit {describe(drafter)}: draft_vocab_hash is {own} here, and was "
            f"{noted['draft_vocab_hash']} on the drafter it was trained on (None: the whole vocabulary). With another "
            "reduced vocabulary the rows of its heads stand for other tokens. Load it on that drafter "
            f"({config.base_model_name_or_path or 'unnamed'}), or train it on this one."
        )


def warn_of_other_weights(drafter: Any, config: Any, source: Any) -> None:
    """Say once that an adapter was trained on other weights than this drafter's."""
    then = (config.auto_mapping or {}).get("drafter_hash")
    now = None if then is None else base_note(drafter)["drafter_hash"]
    if None not in (then, now) and then != now:
        logger.warning_once(
            f"The adapter {source} was trained on a drafter with other weights (drafter_hash {then}) than "
            f"{describe(drafter)} ({now}). Drafts may be accepted less often; the output stays exact."
        )


def _noted(config: Any) -> dict[str, Any]:
    """The note in an adapter's config, or, where PEFT alone saved it, what the config of its base says."""
    note = config.auto_mapping or {}
    name = config.base_model_name_or_path
    if "draft_vocab_hash" in note or not name:
        return note
    try:
        raw, _ = PreTrainedConfig.get_config_dict(name, local_files_only=True)
    except (OSError, ValueError):  # the base is not here to be asked
        return {}
    target = raw.get("target")
    known = isinstance(target, dict) and "draft_vocab_hash" in target
    return {"draft_vocab_hash": target["draft_vocab_hash"]} if known else {}


__all__ = [
    "CONFIG_NAME",
    "base_note",
    "check_base",
    "check_tensors",
    "drafter_of_adapter",
    "find_adapter",
    "note_base",
    "read_adapter_config",
    "read_tensors",
    "require_peft",
    "warn_of_other_weights",
]
