"""What the loop writes down of its rounds, against scripted drafters and against models asked once more.

Catches: a law read at the wrong slot, before a processor or of the wrong vocabulary, a token of the wrong kind, rows
mixed up when some finish, a text that changes because somebody looks, costs when nobody does.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from dspark import BatchDecoder, DSparkDrafter, SpeculationConfig
from dspark.decoding import loop
from dspark.round_trace import RoundTrace, RowTrace
from dspark.stats import STEPS, SpeculationStats
from tests import small
from tests.decoding.pair import BLOCK, distinct, hostile, oracle, plain, prompt, sampled, target
from tests.scripted import drafter_config

RANDOM = {"plain": {}, "reduced": {"draft_vocab_size": len(small.DRAFT_IDS)}, "gated": {"markov_head_type": "gated"}}


def traced(drafter: DSparkDrafter, ids: torch.Tensor, model: Any = None, **call: Any) -> RowTrace:
    """Trace of one row, after its own arithmetic has been checked against the statistics and the text."""
    generate = sampled if call.pop("do_sample", False) else plain
    out = generate(target() if model is None else model, ids, assistant_model=drafter, record_trace=True, **call)
    stats, sequences = drafter.last_stats, getattr(out, "sequences", out)
    (trace,) = stats.traces
    assert trace.token_ids() == sequences[0, ids.shape[1] :].tolist()
    assert [len(entry.draft_ids) for entry in trace.rounds] == stats.drafted
    assert [entry.num_verified for entry in trace.rounds] == stats.verified
    assert [entry.num_accepted for entry in trace.rounds] == stats.accepted
    for entry in trace.rounds:
        assert trace.token_ids()[: entry.anchor + 1][-1:] == [trace.token_ids()[entry.anchor]]
        assert len(entry.kinds()) == len(entry.emitted_ids) == len(entry.emitted_probs)
    for name in STEPS:
        spent = sum(entry.step_seconds[name] for entry in trace.rounds)
        assert spent == pytest.approx(stats.step_seconds[name], rel=1e-3, abs=1e-7)
    return trace


def random_pair(kind: str = "plain", **fields: Any) -> tuple[Any, DSparkDrafter]:
    return small.target(), small.drafter(**{**RANDOM[kind], **fields})


def test_kinds_follow_what_the_drafter_got_right() -> None:
    ids, text = distinct()
    trace = traced(oracle((3, None, 0)), ids, max_new_tokens=25)
    rounds = trace.rounds[:3]
    assert [entry.anchor for entry in rounds] == [0, 4, 12]
    assert [entry.num_accepted for entry in rounds] == [3, 7, 0]
    assert trace.kinds()[:14] == ["first", *["accepted"] * 3, "recovered", *["accepted"] * 7, "bonus", "recovered"]
    first = rounds[0]
    assert first.draft_ids == [*text[7:10], (text[10] + 1) % 128, *text[11:14]]
    assert [first.outcome(k) for k in range(BLOCK)] == ["accepted"] * 3 + ["rejected"] + ["discarded"] * 3
    assert first.emitted_ids == text[7:11]
    assert rounds[1].rejection is None
    # The oracle is as sure as can be, of its wrong draft too.
    assert first.rejection.base == first.rejection.head == [(first.draft_ids[3], 1.0)]
    assert first.base_probs == first.head_probs == [1.0] * BLOCK


def test_every_accept_length_adds_up() -> None:
    ids, _ = distinct()
    accepted = [entry.num_accepted for entry in traced(oracle(), ids, max_new_tokens=50).rounds]
    assert set(accepted) >= set(range(BLOCK + 1)) - {4}


def test_a_round_without_drafts_gives_a_bonus_token() -> None:
    ids, _ = distinct()
    (entry,) = traced(oracle(), ids, max_new_tokens=2).rounds
    assert entry.draft_ids == entry.base_probs == entry.head_probs == []
    assert (entry.kinds(), entry.rejection, entry.confidence) == (["bonus"], None, None)


def test_a_text_that_ends_inside_a_block() -> None:
    ids, text = distinct()
    trace = traced(oracle((None,)), ids, max_new_tokens=20, eos_token_id=text[9])
    (entry,) = trace.rounds
    assert entry.kinds() == ["accepted"] * 3
    assert entry.ends_inside
    assert [entry.outcome(k) for k in range(BLOCK)] == ["accepted"] * 3 + ["ended"] * 4


def test_slots_that_the_policy_cut() -> None:
    ids, _ = distinct()
    entry = traced(oracle((None,)), ids, max_new_tokens=20, num_assistant_tokens=2).rounds[0]
    assert [entry.outcome(k) for k in range(BLOCK)] == ["accepted"] * 2 + ["unverified"] * 5
    assert entry.kinds() == ["accepted", "accepted", "bonus"]


@pytest.mark.parametrize("call", [{}, {"do_sample": True, "temperature": 0.7, "top_k": 20}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("slot_by_slot", [False, True])
def test_the_targets_law_is_the_one_that_decided(call: dict[str, Any], slot_by_slot: bool) -> None:
    """`output_scores` are the processed scores of every emitted token, by way of another part of the loop."""
    ids, text = distinct()
    generate = sampled if call else plain
    options = {key: value for key, value in call.items() if key != "do_sample"}
    if slot_by_slot:
        options["repetition_penalty"] = 1.3
        text = plain(target(), ids, max_new_tokens=60, repetition_penalty=1.3)[0].tolist()
    out = generate(
        target(), ids, assistant_model=oracle((1, 0, None, 2), text=text), max_new_tokens=30, record_trace=True,
        return_dict_in_generate=True, output_scores=True, **options,
    )  # fmt: skip
    (trace,), laws = out.speculation.traces, torch.cat(out.scores).softmax(-1)
    probs = [trace.first_prob, *(p for entry in trace.rounds for p in entry.emitted_probs)]
    want = laws.gather(1, torch.tensor(trace.token_ids())[:, None])[:, 0]
    assert probs == pytest.approx(want.tolist(), rel=1e-4)
    refused = [entry for entry in trace.rounds if entry.rejection is not None]
    assert len(refused) > 2
    for entry in refused:
        law = laws[entry.anchor + 1 + entry.num_accepted]
        top = law.topk(5)
        assert [c.prob for c in entry.rejection.target] == pytest.approx(
            [p for p in top.values.tolist() if p > 0], rel=1e-4
        )
        assert entry.rejection.target[0].token_id == int(top.indices[0])
        assert entry.rejection.draft_prob == pytest.approx(float(law[entry.draft_ids[entry.num_accepted]]), rel=1e-4)


@pytest.mark.parametrize("kind", RANDOM)
def test_the_drafters_laws_are_its_own(kind: str) -> None:
    """Asked once more through the inspection door, at every anchor."""
    model, drafter = random_pair(kind)
    ids = torch.tensor([[5, 9, 17, 33, 2]])
    trace = traced(drafter, ids, model, max_new_tokens=12)
    text = torch.tensor([[*ids[0].tolist(), *trace.token_ids()]])
    states = torch.cat(_tapped(model, text), dim=-1)
    for entry in trace.rounds:
        if not entry.draft_ids:
            continue
        at = ids.shape[1] + entry.anchor
        out = drafter.draft(text[:, at], states[:, :at], target=model)
        assert out.token_ids[0].tolist() == entry.draft_ids
        columns = out.logits[0].argmax(-1)
        for logits, probs in ((out.base_logits[0], entry.base_probs), (out.logits[0], entry.head_probs)):
            assert probs == pytest.approx(_picked(logits, columns), rel=2e-3, abs=1e-6)
        assert entry.confidence == pytest.approx(out.confidence_logits[0].sigmoid().tolist(), rel=1e-3)
        assert entry.survival == pytest.approx(torch.tensor(entry.confidence).cumprod(0).tolist(), rel=1e-3)
        if entry.rejection is not None:
            _assert_candidates(drafter, out.base_logits[0, entry.num_accepted], entry.rejection.base)
            _assert_candidates(drafter, out.logits[0, entry.num_accepted], entry.rejection.head)


def _tapped(model: Any, text: torch.Tensor) -> list[torch.Tensor]:
    states = model(text, output_hidden_states=True).hidden_states
    return [states[layer + 1] for layer in small.TAPS]


def _picked(logits: torch.Tensor, columns: torch.Tensor) -> list[float]:
    return logits.softmax(-1).gather(1, columns[:, None])[:, 0].tolist()


def _assert_candidates(drafter: DSparkDrafter, logits: torch.Tensor, found: list[Any]) -> None:
    top = logits.softmax(-1).topk(5)
    assert [c.token_id for c in found] == drafter.to_target_ids(top.indices).tolist()
    assert [c.prob for c in found] == pytest.approx(top.values.tolist(), rel=2e-3, abs=1e-6)


def test_sampled_drafts_come_with_the_law_they_were_drawn_from() -> None:
    model, drafter = random_pair()
    ids = torch.tensor([[5, 9, 17, 33, 2]])
    for entry in traced(drafter, ids, model, do_sample=True, top_k=0, max_new_tokens=12).rounds:
        assert entry.draft_probs == pytest.approx(entry.head_probs, rel=1e-4)  # no processor between the two
    for entry in traced(drafter, ids, model, do_sample=True, top_k=1, max_new_tokens=12).rounds:
        assert entry.draft_probs == [1.0] * len(entry.draft_ids)
    assert traced(drafter, ids, model, max_new_tokens=4).rounds[0].draft_probs is None


@pytest.mark.parametrize("fields", [{}, {"draft_vocab_size": len(small.DRAFT_IDS)}], ids=["whole", "reduced"])
def test_columns_without_a_row_in_the_target_are_no_candidates(fields: dict[str, Any]) -> None:
    model = small.target(vocab_size=60)
    drafter = small.drafter(share_embedding=False, share_lm_head=False, **fields)
    ids = torch.tensor([[5, 9, 17, 33, 2]])
    trace = traced(drafter, ids, model, do_sample=True, top_k=0, max_new_tokens=40)
    laws = [
        law for e in trace.rounds if e.rejection for law in (e.rejection.target, e.rejection.base, e.rejection.head)
    ]
    assert len(laws) > 9
    assert max(c.token_id for law in laws for c in law) < 60
    for entry in trace.rounds:
        assert entry.draft_probs == pytest.approx(entry.head_probs, rel=1e-4)


@pytest.mark.parametrize("policy", ["fixed", "threshold"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_nothing_changes_because_somebody_looks(policy: Any, do_sample: bool) -> None:
    ids = torch.cat([prompt(seed=1), prompt(seed=2)])
    drafter = DSparkDrafter(drafter_config(target(), num_hidden_layers=1)).eval()
    texts, counts = [], []
    for looks in (False, True):
        torch.manual_seed(11)
        settings = SpeculationConfig(policy, record_trace=looks)
        out = target().generate(
            ids, do_sample=do_sample, temperature=1.3, assistant_model=drafter, speculation=settings,
            max_new_tokens=40, row_generators=[torch.Generator().manual_seed(s) for s in (7, 8)],
        )  # fmt: skip
        texts.append((out.tolist(), torch.rand(1).item()))  # and the global generator stands where it stood
        counts.append((drafter.last_stats.accepted, drafter.last_stats.verified, drafter.last_stats.fallback_reason))
    assert texts[0] == texts[1]
    assert counts[0] == counts[1]


def test_one_generator_for_all_draws_gives_the_same_text() -> None:
    model, drafter = random_pair()
    texts = []
    for looks in (False, True):
        torch.manual_seed(3)
        texts.append(sampled(model, torch.tensor([[5, 9, 2]]), assistant_model=drafter, max_new_tokens=40,
                             record_trace=looks).tolist())  # fmt: skip
    assert texts[0] == texts[1]


def test_rows_of_a_batch_are_told_apart_when_some_leave() -> None:
    ids = torch.cat([prompt(seed=seed) for seed in range(4)])
    ends = plain(target(), ids, max_new_tokens=30)[:, 6:]
    eos = int(ends[1, 4])
    drafter = hostile()
    out = plain(target(), ids, assistant_model=drafter, max_new_tokens=30, eos_token_id=eos, record_trace=True)
    stats = drafter.last_stats
    assert len(stats.traces) == 4
    lengths = []
    for row, trace in enumerate(stats.traces):
        tokens = trace.token_ids()
        lengths.append(len(tokens))
        assert out[row, 6 : 6 + len(tokens)].tolist() == tokens
    assert lengths[1] <= 5 < max(lengths)
    assert sum(lengths) == stats.num_new_tokens
    assert sum(len(trace.rounds) for trace in stats.traces) == stats.num_rounds


@pytest.mark.parametrize("do_sample", [False, True])
def test_texts_of_a_batch_decoder_carry_their_own(do_sample: bool) -> None:
    model, drafter = random_pair("reduced")
    with BatchDecoder(model, drafter, max_rows=3, speculation=SpeculationConfig(record_trace=True)) as decoder:
        for seed in range(5):
            generator = torch.Generator().manual_seed(seed)
            ids = torch.randint(1, 60, (1, 3 + seed), generator=generator)
            decoder.submit(
                ids, max_new_tokens=6 + 5 * seed, do_sample=do_sample and seed % 2 == 0, generator=generator
            )
        for finished in decoder.run():
            (trace,) = finished.stats.traces
            assert trace.token_ids() == finished.new_ids
            assert [entry.num_accepted for entry in trace.rounds] == finished.stats.accepted
            is_drawn = finished.submission._request.do_sample
            assert all((entry.draft_probs is not None) == is_drawn for entry in trace.rounds)
        assert decoder.stats.traces == []  # a decoder may run for ever


def test_a_drafter_without_a_confidence_head_is_not_blamed(caplog: pytest.LogCaptureFixture) -> None:
    model, drafter = random_pair(enable_confidence_head=False)
    with caplog.at_level(logging.WARNING):
        trace = traced(drafter, torch.tensor([[5, 9, 2]]), model, max_new_tokens=8)
    assert all(entry.confidence is entry.survival is None for entry in trace.rounds)
    assert drafter.last_stats.fallback_reason is None
    assert "confidence head" not in caplog.text


def test_nothing_runs_when_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("recording ran though it is off")

    proposals = []
    original = loop.propose
    monkeypatch.setattr(loop, "RoundTracer", fail)
    monkeypatch.setattr(loop, "trace_first", fail)
    monkeypatch.setattr(loop, "propose", lambda *a: proposals.append(original(*a)) or proposals[-1])
    ids, text = distinct()
    drafter = oracle()
    assert plain(target(), ids, assistant_model=drafter, max_new_tokens=20)[0].tolist() == text[:26]
    assert drafter.last_stats.traces == []
    assert proposals[0].logits is None
    with pytest.raises(AssertionError, match="recording ran"):
        plain(target(), ids, assistant_model=drafter, max_new_tokens=20, record_trace=True)


def test_only_numbers_are_kept() -> None:
    model, drafter = random_pair()
    for entry in traced(drafter, torch.tensor([[5, 9, 2]]), model, max_new_tokens=8).rounds:
        for name in RoundTrace.__dataclass_fields__:
            value = getattr(entry, name)
            flat = value if isinstance(value, list) else list(value.values()) if isinstance(value, dict) else [value]
            assert not any(isinstance(v, torch.Tensor) for v in flat), name


def test_traces_are_merged() -> None:
    a, b = RowTrace(1, 0.5), RowTrace(2, 0.5)
    merged = SpeculationStats(traces=[a]).merge(SpeculationStats(traces=[b]))
    assert merged.traces == [a, b]


def test_the_setting_is_a_truth_value() -> None:
    with pytest.raises(ValueError, match="`record_trace` must be True or False, got 1"):
        SpeculationConfig(record_trace=1)  # type: ignore[arg-type]
