"""Drafters on disk: loading from a folder or Hub id, in our own format or one `dspark.conversion` reads, and saving.

Everything is checked before a weight is used: missing, unexpected or wrongly shaped tensors are errors that name them,
and only safetensors are read. A save that fails changes no file.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors import SafetensorError
from transformers import PreTrainedConfig

from .adapter_files import drafter_of_adapter, find_adapter, read_adapter_config
from .configuration_dspark import DSparkConfig
from .peft_layers import carries_adapters

_CONFIG_KEYS = (
    "cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token",
)  # fmt: skip
_OF_ADAPTER = ("revision", "subfolder")  # these say where an adapter is, not its drafter
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


def read_config(source: str | os.PathLike[str], **hub_kwargs: Any) -> DSparkConfig:
    """`DSparkConfig` of a folder or Hub id in any format that can be read.

    Args:
        source: Local folder or Hub id.
        **hub_kwargs: `revision`, `token`, `cache_dir`, `subfolder`, ... as in transformers.

    Raises:
        ValueError: Not a drafter, or a drafter that cannot be represented; says what was found.
        OSError: There is no config to read.
    """
    from dspark.conversion import FORMATS  # here: conversion imports the config class from this package

    try:
        raw, _ = PreTrainedConfig.get_config_dict(source, **hub_kwargs)
    except TypeError:  # what transformers makes of null
        raw = None
    if not isinstance(raw, dict):
        raise OSError(f"The config.json of {source} is not a JSON object, so no drafter can be read from it.")
    if not raw:
        hint = ""
        if os.path.isfile(os.path.join(source, "adapter_config.json")):
            hint = " It holds an adapter: `DSparkDrafter.from_pretrained` loads it with its drafter."
        raise OSError(f"{source} has no config.json (or an empty one), so there is no drafter to load from it.{hint}")
    if raw.get("model_type") == DSparkConfig.model_type:
        try:
            return DSparkConfig.from_dict(raw)
        except (TypeError, ValueError) as error:
            raise ValueError(f"The config.json of {source} is not valid. {error}") from error
    for module in FORMATS.values():
        if module.recognises(raw):
            return module.read_config(raw, source=str(source))
    raise ValueError(
        f"{source} is not a DSpark drafter that can be read: its config.json has model_type="
        f"{raw.get('model_type')!r} and architectures={raw.get('architectures')!r}. Expected model_type 'dspark' or "
        f"one of the formats {', '.join(sorted(FORMATS))}. A target model goes to `AutoModelForCausalLM`, the drafter "
        "to `DSparkDrafter`."
    )


class LoadsAnyFormat:
    """Mixin in front of `PreTrainedModel`: `from_pretrained` for every format, strict about tensors."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a drafter from a local folder or a Hub id.

        Args:
            pretrained_model_name_or_path: Folder or Hub id, in our format or any that `dspark.conversion` reads; or of
                a PEFT adapter, which is then active in the drafter it was trained on.
            *args, **kwargs: As `PreTrainedModel.from_pretrained` (`dtype`, `device_map`, `revision`, `token`,
                `adapter_name`, ...).

        Raises:
            ImportError: It is an adapter, and PEFT is not installed.
            ValueError: Not a drafter, or tensors are missing, unexpected or wrongly shaped (all are named).
            OSError: No safetensors weights to read, or damaged ones.
        """
        # AutoModel follows an adapter to its drafter by itself, and leaves the adapter's place here.
        of_adapter = dict(kwargs.get("adapter_kwargs") or {})
        if (adapter := of_adapter.pop("_adapter_model_path", None)) is not None:
            del kwargs["adapter_kwargs"]
            return cls._with_adapter(pretrained_model_name_or_path, args, kwargs, adapter, of_adapter)
        config = kwargs.pop("config", None)
        if not isinstance(config, DSparkConfig):
            if config is not None and not isinstance(config, str | os.PathLike):
                raise ValueError(
                    f"`config` must be a DSparkConfig, or the folder or Hub id to read one from, got a "
                    f"{type(config).__name__}."
                )
            hub_kwargs = {key: kwargs[key] for key in _CONFIG_KEYS if key in kwargs}
            try:
                config = read_config(pretrained_model_name_or_path if config is None else config, **hub_kwargs)
            except OSError:
                adapter = pretrained_model_name_or_path
                if config is not None or (folder := find_adapter(adapter, **hub_kwargs)) is None:
                    raise
                settings = read_adapter_config(folder, adapter)
                base = drafter_of_adapter(settings, folder, adapter)
                own = {"revision": settings.revision} if settings.revision else {}
                kwargs = {key: value for key, value in kwargs.items() if key not in _OF_ADAPTER}
                return cls._with_adapter(base, args, {**kwargs, **own}, adapter, hub_kwargs)
            overrides = {key: kwargs.pop(key) for key in list(kwargs) if key in config.to_dict() and key != "dtype"}
            if overrides:
                config = DSparkConfig.from_dict({**config.to_dict(), **overrides})
        if kwargs.get("use_safetensors") is False:
            raise ValueError(
                "Drafters load from safetensors only, got use_safetensors=False. A pickle can run code when it is "
                "opened: convert the checkpoint to safetensors first."
            )
        wants_info = kwargs.pop("output_loading_info", False)
        kwargs.update(config=config, use_safetensors=True, output_loading_info=True)
        ignores_shapes = kwargs.get("ignore_mismatched_sizes", False)
        kwargs["ignore_mismatched_sizes"] = True  # so that all shapes can be named in one message
        load = super().from_pretrained  # type: ignore[misc]
        try:
            model, info = load(pretrained_model_name_or_path, *args, **kwargs)
        except SafetensorError as error:
            raise OSError(
                f"The weights of {pretrained_model_name_or_path} cannot be read ({error}): a safetensors file is "
                "damaged or was cut short. Download or save it again."
            ) from error
        _check_tensors(pretrained_model_name_or_path, info, ignores_shapes=ignores_shapes)
        _check_draft_ids(pretrained_model_name_or_path, model.draft_token_ids, config.vocab_size)
        return (model, info) if wants_info else model

    @classmethod
    def _with_adapter(
        cls, base: Any, args: Any, kwargs: dict[str, Any], adapter: Any, hub_kwargs: dict[str, Any]
    ) -> Any:
        """The drafter `base`, loaded with `args` and `kwargs`, with an adapter in it, loaded with `hub_kwargs`."""
        name = kwargs.pop("adapter_name", "default")
        try:
            loaded = cls.from_pretrained(base, *args, **kwargs)
        except OSError as error:
            raise OSError(
                f"The drafter of the adapter {adapter} is {base!r} by its adapter_config.json, which cannot be "
                f"loaded: {error} Put it there, write its right place into base_model_name_or_path, or load it by "
                "itself and then call `drafter.load_adapter(folder)`."
            ) from error
        drafter = loaded[0] if isinstance(loaded, tuple) else loaded
        if carries_adapters(drafter):
            raise ValueError(
                f"The adapter {adapter} was trained on {base}, which is an adapter itself. Merge that one into a "
                "drafter first: `from_pretrained(...).merge_and_unload().save_pretrained(...)`."
            )
        drafter.load_adapter(adapter, name, **hub_kwargs)
        return loaded

    def save_pretrained(self, save_directory: str | os.PathLike[str], **kwargs: Any) -> None:
        """Write config and weights to a folder that `from_pretrained` loads; borrowed modules are not part of it.

        Of a drafter with adapters only the active adapter is written (`merge_and_unload` first for a whole drafter).
        All files are written aside first, so a save that fails changes no file, and one that succeeds leaves no
        weights of an earlier save behind. With `push_to_hub`, or when many processes save together, transformers
        writes in place.

        Args:
            save_directory: The folder; made if needed.
            **kwargs: As `PreTrainedModel.save_pretrained` (`max_shard_size`, `variant`, ...).
        """
        if carries_adapters(self):  # type: ignore[arg-type]
            self.note_adapters()  # type: ignore[attr-defined]
        save = super().save_pretrained  # type: ignore[misc]
        in_place = kwargs.get("push_to_hub") or kwargs.get("distributed_checkpoint")
        if in_place or not kwargs.get("is_main_process", True):
            save(save_directory, **kwargs)
            return
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        # Inside the folder, hence on its file system: moving a file in is then one step.
        with TemporaryDirectory(prefix=".saving-", dir=folder) as aside:
            save(aside, **kwargs)
            written = sorted(path.name for path in Path(aside).iterdir())
            for name in written:
                os.replace(Path(aside) / name, folder / name)
        if any(map(_WEIGHTS.fullmatch, written)):
            # Weights of an earlier save would win over newer shards: loading prefers the unsharded file.
            for path in list(folder.iterdir()):
                if _WEIGHTS.fullmatch(path.name) and path.name not in written:
                    path.unlink()


def _check_draft_ids(source: Any, ids: Any, vocab_size: int) -> None:
    if ids is None or (int(ids[0]) >= 0 and int(ids[-1]) < vocab_size and bool((ids[1:] > ids[:-1]).all())):
        return
    raise ValueError(
        f"`draft_token_ids` of {source} must be strictly increasing and lie in 0..{vocab_size - 1}, got "
        f"{ids[:4].tolist()} ... {int(ids[-1])}. The checkpoint is damaged or badly converted: convert or download "
        "it again."
    )


def _check_tensors(source: Any, info: dict[str, Any], *, ignores_shapes: bool) -> None:
    problems = []
    if missing := sorted(info["missing_keys"]):
        problems.append(f"missing tensors: {', '.join(missing)}")
    if unexpected := sorted(info["unexpected_keys"]):
        problems.append(f"unexpected tensors: {', '.join(unexpected)}")
    mismatched = sorted(info["mismatched_keys"], key=str)
    if mismatched and not ignores_shapes:
        shapes = "; ".join(
            f"{name} is {tuple(found)}, the config wants {tuple(want)}" for name, found, want in mismatched
        )
        problems.append(f"wrong shapes: {shapes}")
    if problems:
        raise ValueError(
            f"The checkpoint {source} does not fit its config: {'; '.join(problems)}. Either the weights or "
            "config.json belong to another drafter; nothing was loaded."
        )


def register() -> None:
    """Make `AutoConfig` and `AutoModel` know `model_type="dspark"`; safe to call again."""
    from transformers import AutoConfig, AutoModel

    from .modeling_dspark import DSparkDrafter

    AutoConfig.register(DSparkConfig.model_type, DSparkConfig, exist_ok=True)
    AutoModel.register(DSparkConfig, DSparkDrafter, exist_ok=True)


__all__ = ["LoadsAnyFormat", "read_config", "register"]
