"""A trace of the real pair: its tokens spell the text, its figures are those of the statistics."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from dspark.cli.common import demo_drafter, demo_target
from dspark.cli.loading import load_drafter, load_target
from dspark.evaluation import chat_ids
from dspark.trace import build_trace, load, save, write_page

pytestmark = pytest.mark.real


def test_a_trace_spells_the_text(tmp_path: Path) -> None:
    folder, file = demo_target()
    target, tokenizer = load_target(folder, file, torch.float32)
    drafter = load_drafter(demo_drafter(), torch.float32)
    ids = chat_ids(tokenizer, "Write the word 'naïve' and an emoji: 🙂 or 日本.")
    plain = target.generate(ids, do_sample=False, max_new_tokens=24)
    out = target.generate(ids, do_sample=False, max_new_tokens=24, assistant_model=drafter, record_trace=True)
    assert out.tolist() == plain.tolist()
    trace = build_trace(drafter.last_stats, tokenizer, ids[0].tolist(), target="a", drafter="b")
    assert trace.row.token_ids() == plain[0, ids.shape[1] :].tolist()
    pieces = [trace.texts[token] for token in trace.prompt_ids]
    # Parts of characters are written as escapes of their bytes, which together spell them.
    spelled = b"".join(re.sub(rb"\\x([0-9a-f]{2})", lambda m: bytes([int(m[1], 16)]), p.encode()) for p in pieces)
    assert spelled.decode() == tokenizer.decode(ids[0])
    assert any("\\x" in piece for piece in pieces)
    assert "".join(trace.texts[token] for token in trace.row.token_ids()) == trace.text
    for entry in trace.row.rounds:
        assert all(0 < p <= 1 for p in entry.emitted_probs)
        if entry.rejection is not None:  # greedy: the target's likeliest token took the draft's place
            assert entry.rejection.target[0].token_id == entry.emitted_ids[-1]
            assert entry.rejection.head[0].token_id == entry.draft_ids[entry.num_accepted]
    save(tmp_path / "t.json.gz", [trace])
    assert load(tmp_path / "t.json.gz") == [trace]
    write_page(tmp_path / "t.html", [trace])
