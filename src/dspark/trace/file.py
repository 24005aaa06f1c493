"""The file of traces: JSON, gzipped where its name ends in `.gz`; whoever reads it needs neither model nor tokenizer.

```
{"format": "dspark-trace", "version": 1, "traces": [{
   "target": name, "drafter": name, "settings": {name: value, ...}, "made_by": {package: version, ...},
   "prompt": [id, ...], "texts": {id: text, ...}, "text": the answer, "prefill_seconds": s,
   "first": [id, probability],                       the token of the prompt's own pass
   "rounds": [{"anchor": place among the new tokens,
               "drafts": [id, ...], "base": [p, ...], "head": [p, ...], "drawn": [p, ...] or null,
               "confidence": [p, ...] or null, "survival": [p, ...] or null, "verified": n, "accepted": n,
               "emitted": [id, ...], "probs": [p, ...],
               "rejection": null or {"prob": p, "target": [[id, p], ...], "base": [...], "head": [...]},
               "steps": [s, ...], "models": [s, s]}]}]}    in the order of STEPS, and target, drafter
```

The fields mean what [`RoundTrace`] says of them. A file is checked in full before anything is made of it.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files import write_atomically
from ..round_trace import Candidate, Kind, Rejection, RoundTrace, RowTrace
from ..stats import STEPS
from .fields import Fields

FORMAT, VERSION = "dspark-trace", 1
_MOST_BYTES = 1 << 28  # unpacked; a trace of 100,000 tokens has a tenth of it
_MODELS = ("target", "drafter")

Setting = str | int | float | bool | None


@dataclass(frozen=True)
class Trace:
    """One row's text and how it came about, with all that is needed to show it.

    Attributes:
        target: Public name of the target.
        drafter: Public name of the drafter.
        settings: What the call was made with.
        prompt_ids: The prompt.
        texts: Text of every id that occurs, see `token_texts`.
        text: The new tokens as text.
        prefill_seconds: Seconds of the prompt's pass.
        row: The records.
        made_by: Package to version.
    """

    target: str
    drafter: str
    settings: dict[str, Setting]
    prompt_ids: list[int]
    texts: dict[int, str]
    text: str
    prefill_seconds: float
    row: RowTrace
    made_by: dict[str, str]

    def tokens(self) -> list[tuple[int, Kind]]:
        """Id and kind of each new token."""
        return list(zip(self.row.token_ids(), self.row.kinds(), strict=True))

    def to_json(self) -> dict[str, Any]:
        """JSON-able form, an entry of `traces`."""
        return {
            "target": self.target,
            "drafter": self.drafter,
            "settings": self.settings,
            "made_by": self.made_by,
            "prompt": self.prompt_ids,
            "texts": {str(token): text for token, text in self.texts.items()},
            "text": self.text,
            "prefill_seconds": self.prefill_seconds,
            "first": [self.row.first_id, self.row.first_prob],
            "rounds": [_round_to_json(entry) for entry in self.row.rounds],
        }

    @classmethod
    def from_json(cls, data: Any, place: str = "trace") -> Trace:
        """Checked values.

        Raises:
            ValueError: Names the entry that is wrong.
        """
        fields = Fields(data, place)
        texts = {fields.id_of(name): text for name, text in fields.texts("texts").items()}
        first_id, first_prob = fields.candidate("first")
        row = RowTrace(first_id, first_prob)
        for number, entry in enumerate(fields.items("rounds")):
            row.rounds.append(_round(Fields(entry, f"{place}.rounds[{number}]"), row))
        trace = cls(
            target=fields.text("target"),
            drafter=fields.text("drafter"),
            settings=fields.settings("settings"),
            prompt_ids=fields.ids("prompt"),
            texts=texts,
            text=fields.text("text"),
            prefill_seconds=fields.seconds("prefill_seconds"),
            row=row,
            made_by=fields.texts("made_by"),
        )
        for token in (*trace.prompt_ids, *ids_of(row)):
            fields.require(token in texts, "texts", f"must have a text for token {token}")
        return trace


def ids_of(row: RowTrace) -> list[int]:
    """Every id that the records of a row speak of, in order, with repetitions."""
    ids = [row.first_id]
    for entry in row.rounds:
        ids += [*entry.draft_ids, *entry.emitted_ids]
        if entry.rejection is not None:
            laws = (entry.rejection.target, entry.rejection.base, entry.rejection.head)
            ids += [candidate.token_id for law in laws for candidate in law]
    return ids


def save(path: str | Path, traces: Sequence[Trace]) -> None:
    """Write a file of traces; gzipped where its name ends in `.gz`."""
    path = Path(path)
    document = {"format": FORMAT, "version": VERSION, "traces": [trace.to_json() for trace in traces]}
    data = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    if path.suffix == ".gz":
        data = gzip.compress(data, mtime=0)
    write_atomically(path, lambda temporary: temporary.write_bytes(data))


def load(path: str | Path) -> list[Trace]:
    """Read a file of traces.

    Raises:
        ValueError: It is no such file, or a newer one, or broken; says what is wrong with it.
        OSError: It cannot be read.
    """
    path = Path(path)
    try:
        document = json.loads(_unpacked(path).decode())
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise ValueError(f"it is no trace (`format` is not {FORMAT!r}). `dspark trace --save` writes one")
        if document.get("version") != VERSION:
            raise ValueError(
                f"`version` is {document.get('version')!r}, this release reads {VERSION}. Use the dspark that wrote it"
            )
        entries = Fields(document, "the file").items("traces")
        return [Trace.from_json(entry, f"traces[{number}]") for number, entry in enumerate(entries)]
    except (ValueError, RecursionError) as error:  # JSON and text decoding errors are ValueErrors too
        raise ValueError(f"{path} cannot be read as a trace: {error}.") from error


def _unpacked(path: Path) -> bytes:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"it is not whole gzip data ({error})") from error
    if len(data) > _MOST_BYTES:
        raise ValueError(f"it holds more than {_MOST_BYTES >> 20} MiB")
    return data


def _round_to_json(entry: RoundTrace) -> dict[str, Any]:
    rejection = entry.rejection
    return {
        "anchor": entry.anchor,
        "drafts": entry.draft_ids,
        "base": entry.base_probs,
        "head": entry.head_probs,
        "drawn": entry.draft_probs,
        "confidence": entry.confidence,
        "survival": entry.survival,
        "verified": entry.num_verified,
        "accepted": entry.num_accepted,
        "emitted": entry.emitted_ids,
        "probs": entry.emitted_probs,
        "rejection": None if rejection is None else {
            "prob": rejection.draft_prob, "target": rejection.target, "base": rejection.base, "head": rejection.head,
        },
        "steps": [entry.step_seconds[name] for name in STEPS],
        "models": [entry.model_seconds[name] for name in _MODELS],
    }  # fmt: skip


def _round(fields: Fields, row: RowTrace) -> RoundTrace:
    """The next round of `row`; what its fields say of each other must hold."""
    drafts, emitted = fields.ids("drafts"), fields.ids("emitted")
    width = len(drafts)
    verified, accepted = fields.count("verified", most=width), fields.count("accepted", most=width)
    rejection = None if fields.is_null("rejection") else _rejection(fields.inside("rejection"))
    last = row.rounds[-1] if row.rounds else None
    anchor = fields.count("anchor")
    fields.require(accepted <= verified, "accepted", "must not exceed `verified`")
    fields.require((rejection is not None) == (accepted < verified), "rejection", "must be there iff one was refused")
    fields.require(emitted[:accepted] == drafts[:accepted], "emitted", "must begin with the accepted drafts")
    own = len(emitted) - accepted
    fields.require(own == 1 or (own == 0 < accepted == verified), "emitted", "must end with the target's own token")
    fields.require(
        anchor == (0 if last is None else last.anchor + len(last.emitted_ids)), "anchor", "must be the last token's"
    )
    return RoundTrace(
        anchor=anchor,
        draft_ids=drafts,
        base_probs=fields.probs("base", width),
        head_probs=fields.probs("head", width),
        draft_probs=None if fields.is_null("drawn") else fields.probs("drawn", width),
        confidence=None if fields.is_null("confidence") else fields.probs("confidence", width),
        survival=None if fields.is_null("survival") else fields.probs("survival", width),
        num_verified=verified,
        num_accepted=accepted,
        emitted_ids=emitted,
        emitted_probs=fields.probs("probs", len(emitted)),
        rejection=rejection,
        step_seconds=dict(zip(STEPS, fields.times("steps", len(STEPS)), strict=True)),
        model_seconds=dict(zip(_MODELS, fields.times("models", len(_MODELS)), strict=True)),
    )


def _rejection(fields: Fields) -> Rejection:
    laws = (
        [Candidate(*fields.pair(entry, name)) for entry in fields.items(name)] for name in ("target", "base", "head")
    )
    return Rejection(fields.prob("prob"), *laws)


__all__ = ["FORMAT", "VERSION", "Setting", "Trace", "ids_of", "load", "save"]
