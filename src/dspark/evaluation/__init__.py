"""Measuring a drafter on a real target."""

from .compare import Comparison, Summary, compare, plain_seconds, summarise
from .evaluator import check_drafters, evaluate, part_of
from .markdown import report_markdown
from .prompt_sets import SETS, Prompting, chat_ids, gather_prompts, read_prompts, sample_prompts
from .provenance import provenance
from .report import build_report
from .report_files import write_report
from .results import Results, ResultsLog, merge_results, read_results
from .settings import SWEEP, EvaluationSettings

__all__ = [
    "SETS",
    "SWEEP",
    "Comparison",
    "EvaluationSettings",
    "Prompting",
    "Results",
    "ResultsLog",
    "Summary",
    "build_report",
    "chat_ids",
    "check_drafters",
    "compare",
    "evaluate",
    "gather_prompts",
    "merge_results",
    "part_of",
    "plain_seconds",
    "provenance",
    "read_prompts",
    "read_results",
    "report_markdown",
    "sample_prompts",
    "summarise",
    "write_report",
]
