"""DSpark drafters for transformers: lossless speculative decoding with any causal LM."""

from __future__ import annotations

from . import requirements as requirements  # first: without it an old transformers ends in a missing name
from .configuration_dspark import DSparkConfig
from .cpu import optimize_for_cpu
from .decoding.batch_decoder import BatchDecoder
from .decoding.generate import DSparkGenerationMixin, install
from .hub import register
from .modeling_dspark import DraftOutput, DSparkDrafter
from .speculation import SpeculationConfig
from .stats import SpeculationStats
from .version import __version__

register()
install()

__all__ = [
    "BatchDecoder",
    "DSparkConfig",
    "DSparkDrafter",
    "DSparkGenerationMixin",
    "DraftOutput",
    "SpeculationConfig",
    "SpeculationStats",
    "__version__",
    "optimize_for_cpu",
]
