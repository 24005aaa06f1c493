"""`Request`: what the rows of one `generate` call, or one text handed to a `BatchDecoder`, ask for.

Rows of different requests share the forward passes of a round; who shapes a row's law, where it ends and who is told
are its request's business.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..modeling_dspark import DSparkDrafter
from ..stats import SpeculationStats
from .draws import Draws
from .processors import Processors
from .record import Recorder
from .stopping import StopRules


@dataclass(eq=False)
class Request:
    """Rules of some rows.

    Attributes:
        processors, stop_rules: What `generate` prepared for them.
        do_sample: Whether tokens are drawn.
        draws: Where random numbers come from.
        recorder: What is to be returned, and the streamer.
        stats: Counts of these rows.
        confidence_temperatures: Calibration at this request's temperature, float32 `[g]` beside the drafter, or None.
        first_row: Original index of its first row.
        is_isolated: Whether an exception of its processors, criteria or streamer ends its rows alone.
        error: That exception.
    """

    processors: Processors
    stop_rules: StopRules
    do_sample: bool
    draws: Draws
    recorder: Recorder
    stats: SpeculationStats
    confidence_temperatures: torch.Tensor | None = None
    first_row: int = 0
    is_isolated: bool = False
    error: Exception | None = None

    @property
    def temperature(self) -> float:
        """Decoding temperature: 0 when greedy, else what the temperature warpers divide by."""
        return self.processors.temperature if self.do_sample else 0.0

    @property
    def is_plain_greedy(self) -> bool:
        """Whether its tokens are the largest raw logits, so that rows of such requests are decided together."""
        return not self.do_sample and not self.processors.target and not self.recorder.wants_scores

    def calibrate(self, drafter: DSparkDrafter) -> None:
        """Take the drafter's calibration at this request's temperature."""
        temperatures = drafter.config.temperatures_at(self.temperature)
        if temperatures is not None:
            self.confidence_temperatures = torch.tensor(temperatures, dtype=torch.float32, device=drafter.device)

    def own(self, rows: list[int]) -> list[int]:
        """Its numbers of rows with these original indices."""
        return [row - self.first_row for row in rows]


__all__ = ["Request"]
