"""The door `generate(custom_generate="folder or repository")`: decode with the drafter that lies there.

transformers runs `custom_generate/generate.py` of such a place, which is one import of `generate_from_repository`.
"""

from __future__ import annotations

import sys
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from ..any_format import CONFIG_KEYS
from ..modeling_dspark import DSparkDrafter

# A drafter per target and place: one that is loaded anew for every call would cost more than it gains.
_LOADED: WeakKeyDictionary[PreTrainedModel, dict[tuple[Any, ...], DSparkDrafter]] = WeakKeyDictionary()


def generate_from_repository(model: PreTrainedModel, drafter: Any = None, **arguments: Any) -> Any:
    """`model.generate(..., custom_generate=place, trust_remote_code=True)`, as transformers calls it.

    The drafter is loaded once per target, in the target's dtype and on its device.

    Args:
        model: The target.
        drafter: A drafter, its folder or its Hub id; None: the place that `custom_generate` named.
        **arguments: As `generate` takes them. `revision`, `token`, `cache_dir`, ... say which files are meant.

    Returns:
        As `model.generate(assistant_model=drafter, ...)`.

    Raises:
        ValueError: No place is known, an `assistant_model` was named too, or the pair or an option cannot be exact.
    """
    if arguments.pop("assistant_model", None) is not None:
        raise ValueError("`custom_generate` and `assistant_model` both choose the decoding loop: pass one of them.")
    where = {key: arguments.pop(key) for key in CONFIG_KEYS if key in arguments}
    if not isinstance(drafter, DSparkDrafter):
        drafter = _drafter(model, _place() if drafter is None else drafter, where)
    return model.generate(assistant_model=drafter, **arguments)


def _drafter(model: PreTrainedModel, place: Any, where: dict[str, Any]) -> DSparkDrafter:
    loaded = _LOADED.setdefault(model, {})
    key = (str(place), model.dtype, model.device, *(where.get(name) for name in ("revision", "subfolder")))
    if key not in loaded:
        loaded[key] = DSparkDrafter.from_pretrained(place, dtype=model.dtype, **where).to(model.device).eval()
    return loaded[key]


def _place() -> str:
    """What the running `generate` was given as `custom_generate`.

    transformers hands a custom generate function every argument but this one, and runs a copy of its file, so that
    neither says where the drafter lies; the calling frame does.
    """
    frame = sys._getframe(2)
    place = None if frame is None else frame.f_locals.get("custom_generate")
    if not isinstance(place, str):
        raise ValueError(
            "This function was not called by `model.generate(..., custom_generate=place)`, so it does not know which "
            "drafter to load. Pass `drafter=` with its folder or Hub id."
        )
    return place


__all__ = ["generate_from_repository"]
