"""Loading a drafter from a folder or Hub id, in our own format or in one `dspark.conversion` reads.

Everything is checked before a weight is used: missing, unexpected or wrongly shaped tensors are errors that name them,
and only safetensors are read.
"""

from __future__ import annotations

import os
from typing import Any

from transformers import PreTrainedConfig

from .configuration_dspark import DSparkConfig

_CONFIG_KEYS = (
    "cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token",
)  # fmt: skip


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

    raw, _ = PreTrainedConfig.get_config_dict(source, **hub_kwargs)
    if raw.get("model_type") == DSparkConfig.model_type:
        return DSparkConfig.from_dict(raw)
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
            pretrained_model_name_or_path: Folder or Hub id, in our format or any that `dspark.conversion` reads.
            *args, **kwargs: As `PreTrainedModel.from_pretrained` (`dtype`, `device_map`, `revision`, `token`, ...).

        Raises:
            ValueError: Not a drafter, or tensors are missing, unexpected or wrongly shaped (all are named).
            OSError: No safetensors weights to read.
        """
        config = kwargs.pop("config", None)
        if config is None:
            hub_kwargs = {key: kwargs[key] for key in _CONFIG_KEYS if key in kwargs}
            config = read_config(pretrained_model_name_or_path, **hub_kwargs)
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
        model, info = load(pretrained_model_name_or_path, *args, **kwargs)
        _check_tensors(pretrained_model_name_or_path, info, ignores_shapes=ignores_shapes)
        return (model, info) if wants_info else model


def _check_tensors(source: Any, info: dict[str, Any], *, ignores_shapes: bool) -> None:
    problems = []
    if missing := sorted(info["missing_keys"]):
        problems.append(f"missing tensors: {', '.join(missing)}")
    if unexpected := sorted(info["unexpected_keys"]):
        problems.append(f"unexpected tensors: {', '.join(unexpected)}")
    mismatched = sorted(info["mismatched_keys"], key=str)
    if mismatched and not ignores_shapes:
        shapes = "; ".join(f"{name} is {tuple(found)}, the config wants {tuple(want)}" for name, found, want in mismatched)
        problems.append(f"wrong shapes: {shapes}")
    if problems:
        raise ValueError(
            f"The checkpoint {source} does not fit its config: {'; '.join(problems)}. Either the weights or config.json "
            "belong to another drafter; nothing was loaded."
        )


def register() -> None:
    """Make `AutoConfig` and `AutoModel` know `model_type="dspark"`; safe to call again."""
    from transformers import AutoConfig, AutoModel

    from .modeling_dspark import DSparkDrafter

    AutoConfig.register(DSparkConfig.model_type, DSparkConfig, exist_ok=True)
    AutoModel.register(DSparkConfig, DSparkDrafter, exist_ok=True)


__all__ = ["LoadsAnyFormat", "read_config", "register"]
