"""What the doctor changes, and how it judges what it saw. The real pair is in `tests/real/test_doctor.py`."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from dspark import DSparkDrafter
from dspark.evaluation.doctor import Diagnosis, Suspect, diagnose
from dspark.evaluation.suspects import changes
from tests import small
from tests.decoding.pair import new_target
from tests.scripted import Hostile, drafter_config


class _Tokenizer:
    all_special_ids = (1, 2, small.MASK)
    chat_template = None


def names(drafter: Any, family: str = "qwen3") -> list[str]:
    return [change.name for change in changes(small.target(family), drafter, _Tokenizer())]


def test_every_suspect_that_applies_is_tried() -> None:
    found = names(small.drafter(target_layer_ids=[0, 1], num_target_layers=small.LAYERS))
    assert found[:2] == ["tapped layers -1", "tapped layers +1"]
    assert "anchor convention (slot 0 ignored)" in found
    assert [name for name in found if name.startswith("mask token")] == ["mask token 1", "mask token 2"]
    assert names(small.drafter(sample_from_anchor=False)).count("anchor convention (slot 0 drafts)") == 1
    assert "tapped layers -1" not in names(small.drafter())  # it already reads the embedding output
    assert "the target's rope" in names(small.drafter(rope_parameters={"rope_type": "default", "rope_theta": 7.0}))
    assert any(name.startswith("embedding scale") for name in names(small.drafter(share_embedding=False)))
    assert "drafter in float32" in names(small.drafter().to(torch.bfloat16))


def test_a_changed_drafter_has_the_same_weights_and_leaves_the_first_alone() -> None:
    drafter = small.drafter(target_layer_ids=[0, 1])
    before = drafter.config.to_dict()
    for change in changes(small.target(), drafter, _Tokenizer()):
        other = change.drafter()
        assert other.fc.weight.data_ptr() == drafter.fc.weight.data_ptr()
        assert other.config.to_dict() != before
    assert drafter.config.to_dict() == before


def test_a_vocabulary_of_offsets() -> None:
    ids = torch.tensor(small.DRAFT_IDS)
    drafter = small.drafter(draft_vocab_size=len(ids))
    drafter.draft_token_ids.copy_(ids - torch.arange(len(ids)))
    change = next(c for c in changes(small.target(), drafter) if c.name == "draft vocabulary read as offsets")
    assert change.drafter().draft_token_ids.tolist() == small.DRAFT_IDS
    assert drafter.draft_token_ids.tolist() != small.DRAFT_IDS


def diagnosis(length: float, *suspects: Suspect, **fields: Any) -> Diagnosis:
    return Diagnosis(**{"accepted_length": length, "replayed_length": length, "conditional_acceptance": [0.5],
                        "rounds": 100, "suspects": list(suspects), **fields})  # fmt: skip


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (diagnosis(2.0), "No fault found"),
        (diagnosis(2.0, Suspect("x", 2.5, 0.5, 0.1, "do y")), "Likely cause: x. .* 2.50, not 2.00: do y"),
        (diagnosis(2.0, Suspect("x", 2.5, 0.5, 0.3, "do y")), "No fault found"),  # within twice its noise
        (diagnosis(3.0, Suspect("x", 3.15, 0.15, 0.01, "do y")), "No fault found"),  # too little to matter
        (diagnosis(2.0, Suspect("x", 4.5, 2.5, 0.1, "do y"), rounds=5), "over 5 rounds only: too few"),
        (diagnosis(1.02), "Nearly nothing is accepted"),
        (diagnosis(2.0, expected_length=3.0), "own report says 3.00"),
        (diagnosis(2.0, expected_length=2.1), "No fault found"),
        (diagnosis(1.3, replayed_length=2.0), "look at the target's cache"),
    ],
)
def test_verdicts(found: Diagnosis, words: str) -> None:
    import re

    assert re.search(words, found.verdict)
    assert found.is_healthy == ("No fault" in words or "too few" in words)
    assert found.to_dict()["verdict"] == found.verdict


def test_a_hostile_drafter_end_to_end() -> None:
    target = new_target()
    drafter = Hostile(target).eval()
    prompts = [torch.tensor([[5, 6, 7]]), torch.tensor([[9, 8, 7, 6]])]
    seen: list[str] = []
    result = diagnose(
        target, drafter, prompts, other_forms={"reversed": [p.flip(1) for p in prompts]}, max_new_tokens=8,
        on_progress=seen.append,
    )  # fmt: skip
    assert not result.suspects[0].gain > 1
    assert result.replayed_length == result.accepted_length
    assert "reversed" in seen
    assert [s.gain for s in result.suspects] == sorted((s.gain for s in result.suspects), reverse=True)
    with pytest.raises(ValueError, match="no prompt"):
        diagnose(target, drafter, [])
    with pytest.raises(ValueError, match="cannot run"):
        diagnose(target, DSparkDrafter(drafter_config(target, vocab_size=99, mask_token_id=5)), prompts)


def test_the_report_beside_a_drafter_says_what_to_expect(tmp_path) -> None:
    from dspark.cli.common import demo_drafter
    from dspark.cli.doctor import reported_length

    assert reported_length(tmp_path) is None
    runs = [
        {"temperature": t, "threshold": c, "mean": {"accepted_length": length}}
        for t, c, length in ((1.0, 0.0, 1.5), (0.0, 0.4, 1.8), (0.0, 0.0, 2.0))
    ]
    (tmp_path / "report.json").write_text(json.dumps({"what": "dspark eval", "runs": runs}))
    assert reported_length(tmp_path) == 2.0
    (tmp_path / "report.json").write_text("{}")
    assert reported_length(tmp_path) is None
    assert 1 < reported_length(demo_drafter()) < 8
