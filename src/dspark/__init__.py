"""DSpark drafters for transformers: lossless speculative decoding with any causal LM."""

from __future__ import annotations

from .configuration_dspark import DSparkConfig
from .hub import register
from .modeling_dspark import DraftOutput, DSparkDrafter
from .speculation import SpeculationConfig
from .version import __version__

register()

__all__ = ["DSparkConfig", "DSparkDrafter", "DraftOutput", "SpeculationConfig", "__version__"]

