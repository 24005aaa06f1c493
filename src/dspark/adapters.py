"""PEFT adapters in a drafter: `load_adapter`, `set_adapter`, `disable_adapters`, `merge_and_unload` and the rest.

transformers gives every model methods of these names. Its own ask for a PEFT that some releases do not have yet, leave
heads that are trained whole switched off after `enable_adapters`, and check neither tensors nor the base, so the
drafter's stand on PEFT's public functions. `peft.get_peft_model(drafter, ...)` works beside them. What a drafter
borrows from its target is no part of it, so no adapter can reach it.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from .adapter_files import (
    base_note,
    check_base,
    check_tensors,
    find_adapter,
    read_adapter_config,
    read_tensors,
    require_peft,
    warn_of_other_weights,
)
from .peft_layers import adapter_modules, base_module, carries_adapters
from .target import describe

_BORROWED = {"embed_tokens": "share_embedding", "lm_head": "share_lm_head"}

if TYPE_CHECKING:
    from transformers import PreTrainedModel as _Model
else:
    _Model = object


class CarriesAdapters(_Model):
    """Mixin in front of `PreTrainedModel`: a drafter's adapters, whether PEFT wraps it or they were loaded into it."""

    peft_config: dict[str, Any]

    @property
    def _hf_peft_config_loaded(self) -> bool:  # transformers asks it, for one before it saves
        return hasattr(self, "peft_config") and carries_adapters(self)

    # --- in -------------------------------------------------------------------------------------------------------

    def load_adapter(
        self, source: Any, adapter_name: str = "default", *, is_trainable: bool = False, **hub_kwargs: Any
    ) -> None:
        """Load an adapter from its folder or Hub id into this drafter; it is active afterwards.

        Args:
            source: What `PeftModel.save_pretrained`, `save_pretrained` of a drafter with adapters, or
                `dspark train --peft` wrote. Only safetensors are read.
            adapter_name: What it is to be called here.
            is_trainable: Whether it may be trained further; else it is frozen and the drafter set to evaluation.
            **hub_kwargs: `revision`, `token`, `cache_dir`, `subfolder`, ... as in transformers.

        Raises:
            ImportError: PEFT is not installed.
            OSError: There is no adapter, or only a pickle, or a damaged file.
            ValueError: The name is taken, or the adapter belongs to another drafter or another kind of model; what
                does not fit is named, and the drafter is unchanged.
        """
        peft = require_peft()
        if "load_config" in hub_kwargs:  # transformers' own, from the middle of loading a drafter
            raise ValueError(
                f"{source} is an adapter, or a drafter and an adapter in one folder, and was to be loaded with a "
                "config of its own. Keep the two apart, and load the adapter without `config`."
            )
        self._check_free(adapter_name)
        folder = find_adapter(source, **hub_kwargs)
        if folder is None:
            raise OSError(f"{source} has no adapter_config.json, so there is no adapter to load from it.")
        config = read_adapter_config(folder, source)
        config.inference_mode = not is_trainable
        check_base(self, config, source)
        tensors = read_tensors(source, **hub_kwargs)
        wanted, base = self._adapter_tensors(config, source)
        check_tensors(tensors, wanted, base, source=source, drafter=self)
        peft.inject_adapter_in_model(config, self, adapter_name)
        peft.set_peft_model_state_dict(self, tensors, adapter_name)
        self.set_adapter(adapter_name)
        if not is_trainable:
            self.eval()

    def add_adapter(self, adapter_config: Any, adapter_name: str = "default") -> None:
        """Put a fresh adapter into this drafter, active and ready for training.

        Raises:
            ValueError: The name is taken, or PEFT finds no module to adapt.
        """
        self._check_free(adapter_name)
        adapter_config.base_model_name_or_path = self.name_or_path
        require_peft().inject_adapter_in_model(adapter_config, self, adapter_name)
        self.set_adapter(adapter_name)

    def _check_free(self, adapter_name: str) -> None:
        if adapter_name in getattr(self, "peft_config", {}):
            raise ValueError(f"This drafter has an adapter {adapter_name!r} already. Choose another `adapter_name`.")

    def _adapter_tensors(self, config: Any, source: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Tensors of an adapter with this config on this drafter, and of the drafter under it, without data."""
        peft = require_peft()
        with torch.device("meta"):
            drafter = type(self)(self.config)
        try:
            peft.inject_adapter_in_model(copy.deepcopy(config), drafter, low_cpu_mem_usage=True)
        except ValueError as error:
            raise ValueError(
                f"The adapter {source} does not fit {describe(self)}: {error} Nothing was loaded."
            ) from error
        return peft.get_peft_model_state_dict(drafter, save_embedding_layers=False), drafter.state_dict()

    # --- which ----------------------------------------------------------------------------------------------------

    def active_adapters(self) -> list[str]:
        """Names of the adapters in use when adapters are on."""
        for _, module in adapter_modules(self):
            if not _is_whole(module):
                return list(module.active_adapters)
        return []

    def set_adapter(self, adapter_name: str | list[str]) -> None:
        """Use this adapter (or these) from the next call on; heads it did not train are the drafter's own.

        Raises:
            ValueError: There is no adapter of that name.
        """
        names = [adapter_name] if isinstance(adapter_name, str) else list(adapter_name)
        known = getattr(self, "peft_config", {})
        if unknown := [name for name in names if name not in known]:
            raise ValueError(f"This drafter has no adapter {unknown[0]!r}; it has {', '.join(known) or 'none'}.")
        from peft.functional import set_adapter

        frozen = all(known[name].inference_mode for name in names)
        set_adapter(self, names, inference_mode=frozen)

    def disable_adapters(self) -> None:
        """Draft as without adapters, until `enable_adapters`."""
        for _, module in adapter_modules(self):
            module.enable_adapters(False)

    def enable_adapters(self) -> None:
        """Use the active adapters again."""
        for _, module in adapter_modules(self):
            module.enable_adapters(True)
        self.set_adapter(self.active_adapters())

    # --- out ------------------------------------------------------------------------------------------------------

    def get_adapter_state_dict(
        self, adapter_name: str | None = None, state_dict: dict[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        """Tensors of one adapter, the active one by default, its whole heads among them."""
        name = adapter_name or self.active_adapters()[0]
        return require_peft().get_peft_model_state_dict(
            self, state_dict=state_dict, adapter_name=name, save_embedding_layers=False
        )

    def note_adapters(self) -> None:
        """Write what the adapters rest on into their configs, for whoever saves them."""
        for config in self.peft_config.values():
            config.auto_mapping = base_note(self)

    def delete_adapter(self, adapter_names: str | list[str]) -> None:
        """Forget adapters; without the last one the drafter is as it was before the first."""
        from peft.functional import delete_adapter

        for name in [adapter_names] if isinstance(adapter_names, str) else adapter_names:
            if name not in getattr(self, "peft_config", {}):
                raise ValueError(f"This drafter has no adapter {name!r}.")
            if len(self.peft_config) == 1:
                self._unwrap(merge=False)
            else:
                prefix = f"{self.peft_config.pop(name).peft_type.value.lower()}_"
                delete_adapter(self, adapter_name=name, prefix=prefix)

    def merge_and_unload(self) -> Any:
        """Add the active adapters to the weights, for good, and drop all; returns this drafter, now a plain one.

        PEFT's own on a `PeftModel` is the same, but fails where heads are trained whole beside anything but LoRA.
        """
        self._unwrap(merge=True)
        return self

    def _unwrap(self, *, merge: bool) -> None:
        found = list(adapter_modules(self))
        layers = [module for _, module in found if not _is_whole(module)]
        for layer in layers if merge else ():
            layer.merge()
        for name, module in reversed(found):  # inner ones first
            plain = base_module(module)
            if merge and _is_whole(module) and module.active_adapters:
                plain = module.modules_to_save[module.active_adapters[0]]
            parent, _, attribute = name.rpartition(".")
            setattr(self.get_submodule(parent), attribute, plain)
        if hasattr(self, "peft_config"):
            del self.peft_config

    # --- what must not be ------------------------------------------------------------------------------------------

    def check_adapters(self) -> None:
        """Refuse adapters that were to train what the drafter borrows, before anything is trained.

        Raises:
            ValueError: Names the adapter and the module.
        """
        for name, config in getattr(self, "peft_config", {}).items():
            targets, whole = (getattr(config, field, None) or () for field in ("target_modules", "modules_to_save"))
            asked = {*whole, *(() if isinstance(targets, str) else targets)}
            borrowed = sorted(part for part, is_shared in _BORROWED.items() if getattr(self.config, is_shared))
            if borrowed := [part for part in borrowed if part in asked]:
                raise ValueError(
                    f"The adapter {name!r} is to train {' and '.join(borrowed)}, which this drafter borrows from its "
                    "target: it has none of its own to train or to save. Leave it out of `modules_to_save` and "
                    "`target_modules`."
                )

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        # This is how PEFT fills the adapters it has put in: its only call on a drafter that can still refuse.
        for name, config in getattr(self, "peft_config", {}).items():
            check_base(self, config, repr(name))
            warn_of_other_weights(self, config, repr(name))
        super()._load_from_state_dict(*args, **kwargs)


def _is_whole(module: Any) -> bool:
    """Whether PEFT's module holds copies of one that is trained whole, as heads are."""
    return "original_module" in module._modules


__all__ = ["CarriesAdapters"]
