"""What a folder, file or Hub id holds: our own format, or a record of another by `dspark.conversion`."""

from __future__ import annotations

import os
from typing import Any

from huggingface_hub.errors import HFValidationError
from transformers import PreTrainedConfig
from transformers.utils import cached_file

from .configuration_dspark import DSparkConfig
from .files import check_place, read_json

CONFIG_KEYS = (
    "cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token",
)  # fmt: skip


def read_config(source: str | os.PathLike[str], **how: Any) -> DSparkConfig:
    """`DSparkConfig` of a folder, file or Hub id in any format that can be read.

    Args:
        source: Local folder, GGUF file or Hub id.
        **how: `revision`, `token`, `cache_dir`, `subfolder`, ... as in transformers; `gguf_file`, `variant`,
            `allow_pickle` as in [`DSparkDrafter.from_pretrained`].

    Raises:
        ValueError: Not a drafter, or a drafter that cannot be represented; says what was found.
        OSError: There is no config to read.
    """
    raw, record = read_any(source, how, {})
    return own_config(source, raw) if record is None else record.to_config()


def read_record(source: str | os.PathLike[str], **how: Any) -> Any:
    """`dspark.conversion.Record` of a drafter in any format, our own too; arguments and errors as [`read_config`]."""
    from dspark.conversion import open_checkpoint, read_record  # here: conversion imports from this package

    raw, record = read_any(source, how, {})
    return read_record(open_checkpoint(source, raw, **how)) if record is None else record


def own_config(source: Any, raw: dict[str, Any]) -> DSparkConfig:
    """Config of our own format.

    Raises:
        ValueError: It is not valid; names the source.
    """
    try:
        return DSparkConfig.from_dict(raw)
    except (TypeError, ValueError) as error:
        raise ValueError(f"The config.json of {source} is not valid. {error}") from error


def read_any(source: Any, how: dict[str, Any], choices: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """What config.json holds, and the `dspark.conversion.Record` of a foreign format; None: it is our own.

    Args:
        source: Folder, GGUF file or Hub id.
        how: Where files are, as [`read_config`].
        choices: Fields the caller has decided.

    Raises:
        ValueError: Not a drafter that can be read.
        OSError: There is no config to read.
    """
    from dspark.conversion import find_gguf, open_checkpoint, read_record  # here: conversion imports from this package

    check_place(source)
    if how.get("gguf_file") is not None or os.path.isfile(source):
        raw = {}
    else:
        raw = _raw_config(source, {key: how[key] for key in CONFIG_KEYS if key in how})
        if not raw and find_gguf(source, None, has_config=False, subfolder=how.get("subfolder")) is None:
            hint = ""
            if os.path.isfile(os.path.join(source, "adapter_config.json")):
                hint = " It holds an adapter: `DSparkDrafter.from_pretrained` loads it with its drafter."
            raise OSError(
                f"{source} has no config.json (or an empty one), so there is no drafter to load from it.{hint}"
            )
    if raw.get("model_type") == DSparkConfig.model_type:
        return raw, None
    return raw, read_record(open_checkpoint(source, raw, **how), **choices)


def _raw_config(source: Any, hub_kwargs: dict[str, Any]) -> dict[str, Any]:
    try:
        raw, _ = PreTrainedConfig.get_config_dict(source, **hub_kwargs)
    except TypeError:  # what transformers makes of null
        raw = None
    except HFValidationError:  # no name of a repository
        raise
    except OSError as error:
        if os.path.exists(source) or str(source) in str(error):
            raise
        raise OSError(f"There is no folder {source}, and on the Hub it could not be read. {error}") from error
    except (ValueError, RecursionError) as error:
        raise OSError(
            f"The config.json of {source} cannot be read ({error!s:.200}). Correct it, or download or save it again."
        ) from error
    if not isinstance(raw, dict):
        raise OSError(f"The config.json of {source} is not a JSON object, so no drafter can be read from it.")
    path = None
    if raw:
        path = cached_file(source, "config.json", _raise_exceptions_for_missing_entries=False, **hub_kwargs)
    if path is not None:
        read_json(path)  # where a key is there twice, transformers has taken the last
    return raw


def check_weights(source: Any, kwargs: dict[str, Any]) -> None:
    """Refuse weights in our own format that cannot be loaded as they are, by their headers; see `dspark.conversion`.

    Raises:
        ValueError: An index leads out of the folder, or numbers are of another kind.
        OSError: A file is missing or damaged.
    """
    from dspark.conversion import check_weights as check  # here: conversion imports from this package

    folder = os.path.join(source, *filter(None, [kwargs.get("subfolder")]))
    is_quantised = getattr(kwargs["config"], "quantization_config", None) is not None
    if os.path.isdir(folder) and not is_quantised:
        check(folder, kwargs.get("variant"))


__all__ = ["CONFIG_KEYS", "check_weights", "own_config", "read_any", "read_config", "read_record"]
