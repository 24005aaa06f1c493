"""Drafters on disk: loading from a folder or Hub id, in our own format or one `dspark.conversion` reads, and saving.

Everything is checked before a weight is used: missing, unexpected or wrongly shaped tensors are errors that name them,
and only safetensors are read. A save that fails changes no file.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors import SafetensorError

from .adapter_files import drafter_of_adapter, find_adapter, read_adapter_config
from .any_format import CONFIG_KEYS, check_weights, own_config, read_any, read_config, read_record
from .configuration_dspark import DSparkConfig
from .files import check_place, some
from .peft_layers import carries_adapters

_OF_ADAPTER = ("revision", "subfolder")  # these say where an adapter is, not its drafter
# What says where files are: nothing to transformers once the tensors are at hand.
_ABOUT_FILES = (*CONFIG_KEYS, "variant", "trust_remote_code", "use_safetensors", "weights_only")
_FIELDS = {*inspect.signature(DSparkConfig.__init__).parameters, "bos_token_id", "eos_token_id", "pad_token_id"}
_FIELDS -= {"self", "kwargs"}
_PUSH = ("repo_id", "private", "token", "revision", "create_pr", "commit_message", "commit_description")
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


class LoadsAnyFormat:
    """Mixin in front of `PreTrainedModel`: `from_pretrained` for every format, strict about tensors."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a drafter from a local folder or a Hub id.

        Args:
            pretrained_model_name_or_path: Folder, GGUF file or Hub id, in our format or any that `dspark.conversion`
                reads; or of a PEFT adapter, which is then active in the drafter it was trained on.
            *args, **kwargs: As `PreTrainedModel.from_pretrained` (`dtype`, `device_map`, `revision`, `token`,
                `adapter_name`, ...); fields of `DSparkConfig` to change, or to decide where a foreign file does not
                say; `gguf_file`, the name of a GGUF file in the folder; `allow_pickle=True` to read a foreign
                checkpoint without safetensors, as plain tensors.

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
        source, config = pretrained_model_name_or_path, kwargs.pop("config", None)
        _refuse_arguments(config, kwargs)
        hub_kwargs = {key: kwargs[key] for key in CONFIG_KEYS if key in kwargs}
        how: dict[str, Any] = {key: kwargs.pop(key) for key in ("gguf_file", "allow_pickle") if key in kwargs}
        how |= {**hub_kwargs, "variant": kwargs.get("variant")}
        overrides = {}
        if not isinstance(config, DSparkConfig):
            overrides = {key: kwargs.pop(key) for key in list(kwargs) if key in _FIELDS}
        check_place(source)
        try:
            raw, record = ({}, None) if _is_bare(source, config) else read_any(source, how, overrides)
        except OSError:
            is_file = os.path.isfile(source)  # no folder, so no adapter's
            if is_file or config is not None or (folder := find_adapter(source, **hub_kwargs)) is None:
                raise
            settings = read_adapter_config(folder, source)
            base = drafter_of_adapter(settings, folder, source)
            own = {"revision": settings.revision} if settings.revision else {}
            kwargs = {key: value for key, value in kwargs.items() if key not in _OF_ADAPTER}
            return cls._with_adapter(base, args, {**kwargs, **overrides, **own}, source, hub_kwargs)
        if config is None and record is not None:
            config = record.to_config(**overrides)
        elif not isinstance(config, DSparkConfig):
            config = own_config(source, raw) if config is None else read_config(config, **hub_kwargs)
            config = DSparkConfig.from_dict({**config.to_dict(), **overrides}) if overrides else config
        return cls._load(source, record, config, args, kwargs)

    @classmethod
    def _load(cls, source: Any, record: Any, config: DSparkConfig, args: Any, kwargs: dict[str, Any]) -> Any:
        """Load weights under `config`: by transformers from our own format, tensor by tensor from a record."""
        from dspark.conversion import check_finite, check_tensors  # here: conversion imports from this package

        wants_info = kwargs.pop("output_loading_info", False)
        ignores_shapes = kwargs.get("ignore_mismatched_sizes", False)
        kwargs.update(config=config, use_safetensors=True, output_loading_info=True)
        kwargs["ignore_mismatched_sizes"] = True  # so that all shapes can be named in one message
        load = super().from_pretrained  # type: ignore[misc]
        if record is None:
            check_weights(source, kwargs)
        else:
            check_tensors(record, config, ignores_shapes=ignores_shapes)
            kwargs = {key: value for key, value in kwargs.items() if key not in _ABOUT_FILES}
        try:
            if record is None:
                model, info = load(source, *args, **kwargs)
            else:
                model, info = load(None, *args, state_dict=record.tensors, **kwargs)
        except SafetensorError as error:
            raise OSError(
                f"The weights of {source} cannot be read ({error}): a safetensors file is damaged or was cut short. "
                "Download or save it again."
            ) from error
        if record is None:
            _check_finite(source, model)
        else:
            check_finite(record)
            model.name_or_path = model.config.name_or_path = str(source)
        _check_tensors(source, info, ignores_shapes=ignores_shapes)
        _check_draft_ids(source, model.draft_token_ids, config.vocab_size)
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
        weights of an earlier save behind. When many processes save together, transformers writes in place.

        Args:
            save_directory: The folder; made if needed.
            **kwargs: As `PreTrainedModel.save_pretrained` (`max_shard_size`, `variant`, ...). With `push_to_hub` the
                folder is then pushed whole, with a card made of the drafter if it has none; `repo_id`, `private`,
                `token`, `revision`, `create_pr` and `commit_message` are as in [`push_to_hub`].
        """
        if kwargs.pop("push_to_hub", False):
            from .publishing import push_saved  # here: publishing imports from this package

            how = {name: kwargs.pop(name) for name in _PUSH if name in kwargs}
            self.save_pretrained(save_directory, **kwargs)
            if kwargs.get("is_main_process", True):
                push_saved(save_directory, **how)
            return
        if carries_adapters(self):  # type: ignore[arg-type]
            self.note_adapters()  # type: ignore[attr-defined]
        save = super().save_pretrained  # type: ignore[misc]
        if kwargs.get("distributed_checkpoint") or not kwargs.get("is_main_process", True):
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

    def push_to_hub(
        self,
        repo_id: str,
        *,
        card: str | os.PathLike[str] | None = None,
        reports: Sequence[str | os.PathLike[str]] = (),
        about: Mapping[str, Any] | None = None,
        max_shard_size: int | str = "50GB",
        tags: Sequence[str] | str | None = None,
        **how: Any,
    ) -> Any:
        """Push to the Hub: weights, config, card, reports, and `custom_generate/`, in one commit.

        Args:
            repo_id: `owner/name`; made if missing.
            card: A README.md that is written already; None: one is made of the drafter and `reports`.
            reports: Reports of `dspark eval` and `dspark demo`; they go along.
            about: What else the card is made of: `license`, `base_model`, `notes` as in [`cards.build_card`].
            max_shard_size: As in `save_pretrained`.
            tags: More tags for the card.
            **how: `private`, `token`, `revision`, `create_pr`, `commit_message`, `commit_description`, `curve`, as in
                [`publishing.push_folder`].

        Returns:
            huggingface_hub's `CommitInfo`.

        Raises:
            ValueError: Something must not be pushed (all of it is named), or a report is not about this drafter.
        """
        from .publishing import push_drafter  # here: publishing imports from this package

        tags = [tags] if isinstance(tags, str) else list(tags or ())
        about = {**(about or {}), "tags": tags}
        return push_drafter(
            self, repo_id, card=card, reports=reports, max_shard_size=max_shard_size, about=about, how=how
        )


def _refuse_arguments(config: Any, kwargs: dict[str, Any]) -> None:
    if config is not None and not isinstance(config, DSparkConfig | str | os.PathLike):
        raise ValueError(
            f"`config` must be a DSparkConfig, or the folder or Hub id to read one from, got a "
            f"{type(config).__name__}."
        )
    if kwargs.get("use_safetensors") is False:
        raise ValueError(
            "Drafters load from safetensors only, got use_safetensors=False. A pickle can run code when it is "
            "opened: convert the checkpoint to safetensors first."
        )


def _is_bare(source: Any, config: Any) -> bool:
    """Whether a config was given for a local folder that has none of its own, nor a GGUF file."""
    if config is None or not os.path.isdir(source):
        return False
    return not any(name == "config.json" or name.endswith(".gguf") for name in os.listdir(source))


def _check_draft_ids(source: Any, ids: Any, vocab_size: int | None) -> None:
    if (
        ids is None
        or vocab_size is None
        or (int(ids[0]) >= 0 and int(ids[-1]) < vocab_size and bool((ids[1:] > ids[:-1]).all()))
    ):
        return
    raise ValueError(
        f"`draft_token_ids` of {source} must be strictly increasing and lie in 0..{vocab_size - 1}, got "
        f"{ids[:4].tolist()} ... {int(ids[-1])}. The checkpoint is damaged or badly converted: convert or download "
        "it again."
    )


def _check_finite(source: Any, model: Any) -> None:
    """The same for weights that transformers read: numbers of a plain floating-point kind."""
    from dspark.conversion.stored import is_finite  # here: conversion imports from this package

    plain = ((name, part) for name, part in model.named_parameters() if not part.is_meta and part.is_floating_point())
    if bad := sorted(name for name, part in plain if not is_finite(part.detach())):
        raise ValueError(
            f"{source} has NaN or infinite numbers in {some(bad)}: a training that diverged, or a damaged file. Save "
            "or download it again; nothing was loaded."
        )


def _check_tensors(source: Any, info: dict[str, Any], *, ignores_shapes: bool) -> None:
    problems = []
    if missing := sorted(info["missing_keys"]):
        problems.append(f"missing tensors: {some(missing)}")
    if unexpected := sorted(info["unexpected_keys"]):
        problems.append(f"unexpected tensors: {some(unexpected)}")
    mismatched = sorted(info["mismatched_keys"], key=str)
    if mismatched and not ignores_shapes:
        shapes = [f"{name} is {tuple(found)}, the config wants {tuple(want)}" for name, found, want in mismatched]
        problems.append(f"wrong shapes: {some(shapes, '; ')}")
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


__all__ = ["LoadsAnyFormat", "read_config", "read_record", "register"]
