"""The page: one HTML file that shows traces side by side and asks nothing of anybody.

Everything is inside it, and its content security policy lets nothing else in: style and script count only if their
hashes match. Token texts are data that anyone may have written: the template escapes them, the data block escapes what
could end it, and the script sets text, never markup.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from ..files import write_atomically
from ..round_trace import Kind, RoundTrace
from ..stats import STEPS
from .charts import bars, points, strip
from .figures import figures
from .file import Trace
from .tokens import laid_out, shown

_ENDS_DATA = re.compile("[<>&\u2028\u2029]")  # ends a script element, begins a comment, or ends a line of a script
OUTCOMES = {
    "accepted": "accepted", "rejected": "refused", "discarded": "discarded",
    "ended": "text ended", "unverified": "not verified",
}  # fmt: skip


def render_page(traces: Sequence[Trace]) -> str:
    """HTML of a page with these traces side by side.

    Raises:
        ValueError: There is none.
    """
    if not traces:
        raise ValueError("A page needs at least one trace.")
    style, script = (_part(name) for name in ("page.css", "page.js"))
    template = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return template.from_string(_part("page.html.j2")).render(
        policy=_policy(style, script),
        style=Markup(style),  # a file of this package
        script=Markup(script),
        data=json_block({"traces": [_data(trace) for trace in traces]}),
        traces=[_view(trace) for trace in traces],
    )


def write_page(path: str | Path, traces: Sequence[Trace]) -> None:
    """Write a page, see `render_page`."""
    page = render_page(traces).encode()
    write_atomically(Path(path), lambda temporary: temporary.write_bytes(page))


def json_block(value: Any) -> Markup:
    """JSON that may stand inside a script element whatever texts it holds."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Markup(_ENDS_DATA.sub(lambda match: f"\\u{ord(match[0]):04x}", text))


def _part(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _policy(style: str, script: str) -> str:
    hashes = [base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in (style, script)]
    return (
        f"default-src 'none'; style-src 'sha256-{hashes[0]}'; script-src 'sha256-{hashes[1]}'; "
        "base-uri 'none'; form-action 'none'"
    )


def _data(trace: Trace) -> dict[str, Any]:
    """What the script needs to tell about a token or a round."""
    document = trace.to_json()
    return {
        "prompt": len(trace.prompt_ids),
        "shown": {token: shown(text, int(token)) for token, text in document["texts"].items()},
        "steps": STEPS,
        "first": document["first"],
        "rounds": document["rounds"],
        "outcomes": [
            [OUTCOMES[entry.outcome(slot)] for slot in range(len(entry.draft_ids))] for entry in trace.row.rounds
        ],
    }


def _view(trace: Trace) -> dict[str, Any]:
    """What the template shows of a trace."""
    known = figures(trace)
    return {
        "title": title(trace),
        "target": trace.target,
        "drafter": trace.drafter,
        "settings": {name: "none" if value is None else str(value) for name, value in trace.settings.items()},
        "made_by": ", ".join(f"{name} {version}" for name, version in trace.made_by.items()),
        "prompt": [laid_out(trace.texts[token], token) for token in trace.prompt_ids],
        "text": trace.text,
        "prefill_seconds": trace.prefill_seconds,
        "figures": known,
        "rounds": _rounds(trace),
        "strip": strip(trace.row.rounds, known.block),
        "survival": points(known.survival),
        "confidence": points(known.confidence),
        "verified": bars(known.verified_lengths),
        "accepted": bars(known.accepted_lengths),
        "steps": bars([step.milliseconds for step in known.steps]),
    }


def title(trace: Trace) -> str:
    """The drafter and, where they are known, policy and threshold."""
    policy, threshold = (trace.settings.get(name) for name in ("policy", "confidence threshold"))
    parts = [trace.drafter, f"policy {policy}" if policy else "", f"threshold {threshold}" if threshold else ""]
    return ", ".join(filter(None, parts))


def _rounds(trace: Trace) -> list[dict[str, Any]]:
    """The text in rounds; entry 0 is the prompt's pass."""
    first = {"label": "The prompt's pass", "refused": None, "tokens": [_token(trace, trace.row.first_id, "first")]}
    entries = [first]
    for number, entry in enumerate(trace.row.rounds, 1):
        refused = None if entry.rejection is None else entry.draft_ids[entry.num_accepted]
        entries.append(
            {
                "label": round_label(number, entry),
                "refused": None if refused is None else shown(trace.texts[refused], refused),
                "tokens": [_token(trace, *pair) for pair in zip(entry.emitted_ids, entry.kinds(), strict=True)],
            }
        )
    return entries


def round_label(number: int, entry: RoundTrace) -> str:
    """One line about a round."""
    if not entry.draft_ids:
        return f"Round {number}: no drafts"
    return f"Round {number}: {entry.num_accepted} of {entry.num_verified} verified drafts accepted"


def _token(trace: Trace, token: int, kind: Kind) -> dict[str, str]:
    return {"kind": kind, "text": laid_out(trace.texts[token], token)}


__all__ = ["OUTCOMES", "json_block", "render_page", "round_label", "title", "write_page"]
