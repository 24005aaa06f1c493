"""Traces of decoding: what was drafted, verified and emitted round by round, as a file, a page, or in a terminal.

Recording is the loop's business (`SpeculationConfig(record_trace=True)`, then `SpeculationStats.traces`); here its
records get the tokens' texts and become something to look at. Nothing here runs a model.
"""

from .build import build_trace
from .file import Trace, load, save
from .page import render_page, write_page
from .terminal import terminal_view

__all__ = ["Trace", "build_trace", "load", "render_page", "save", "terminal_view", "write_page"]
