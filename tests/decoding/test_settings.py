"""Settings change what is verified, never the text, and are read in one order.

Catches: a block cut after verification instead of before, a cap that shortens the block itself, a threshold that is
not strict, an option read from the wrong place or dropped without a word.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from dspark import DSparkDrafter, SpeculationConfig, optimize_for_cpu
from dspark.decoding import confidence, curve
from dspark.decoding.arguments import call_settings
from dspark.decoding.confidence import Confidence
from dspark.decoding.schedule import schedule
from dspark.decoding.state import Proposal
from dspark.scheduling import ThroughputCurve
from tests.decoding.pair import BLOCK, distinct, hostile, oracle, plain, prompt, target
from tests.scripted import CYCLE, Oracle, drafter_config

PROMPT = 6
COUNT = 30


def sure_of(confidence: float, *, wrong: Any = (None,), **overrides: Any) -> Oracle:
    """An oracle whose confidence head says the same in every slot."""
    drafter = Oracle(target(), [distinct()[1]], wrong=wrong, **overrides).eval()
    with torch.no_grad():
        drafter.confidence_head.proj.weight.zero_()
        drafter.confidence_head.proj.bias.fill_(torch.tensor(confidence, dtype=torch.float64).logit().item())
    return drafter


def run(drafter: Any, **kwargs: Any) -> list[int]:
    return plain(target(), distinct()[0], max_new_tokens=COUNT, assistant_model=drafter, **kwargs)[0].tolist()


def recorded_blocks(drafter: Any) -> list[list[int]]:
    """From now on, every block the drafter proposes."""
    blocks: list[list[int]] = []
    walk = drafter.walk_block

    def recording(*args: Any) -> Any:
        result = walk(*args)
        blocks.append(result.token_ids[0].tolist())
        return result

    drafter.walk_block = recording
    return blocks


# --- the cap ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cap", range(1, BLOCK + 3))
def test_no_more_drafts_than_asked_for_are_verified(cap: int) -> None:
    text = distinct()[1]
    for script in ((None,), (2,), CYCLE):
        drafter = oracle(script)
        assert run(drafter, num_assistant_tokens=cap) == text[: PROMPT + COUNT]
        assert max(drafter.last_stats.verified) == min(cap, BLOCK)
        assert set(drafter.last_stats.drafted) <= {0, BLOCK}


@pytest.mark.parametrize("cap", range(1, BLOCK + 1))
def test_a_capped_proposal_is_a_prefix_of_the_full_block(cap: int) -> None:
    # The block's attention is bidirectional: a shorter block would propose other tokens.
    ids, _ = distinct()
    torch.manual_seed(7)
    drafter = DSparkDrafter(drafter_config(target())).eval()
    blocks = recorded_blocks(drafter)
    first = []
    for most in (None, cap):
        blocks.clear()
        plain(target(), ids, max_new_tokens=COUNT, num_assistant_tokens=most, assistant_model=drafter)
        first.append(blocks[0])
        assert {len(block) for block in blocks} == {BLOCK}
    assert first[0] == first[1]
    drafts = schedule(fake_run(SpeculationConfig()), proposal_of(first[0]), None, [cap])
    assert drafts == [first[0][:cap]]


# --- the thresholds --------------------------------------------------------------------------------------------------


def fake_run(settings: SpeculationConfig, eos: Any = (), rows: int = 1) -> Any:
    first_eos = lambda tokens: next((i for i, token in enumerate(tokens) if token in eos), None)  # noqa: E731
    stop_rules = SimpleNamespace(first_eos=first_eos)
    requests = dict.fromkeys(range(rows), SimpleNamespace(stop_rules=stop_rules))
    return SimpleNamespace(settings=settings, policy=settings.new_policy(), rows=list(range(rows)), requests=requests)


def proposal_of(*rows: list[int]) -> Proposal:
    ids = torch.tensor(rows)
    return Proposal(ids, ids, None)


def confidence_of(*rows: list[float]) -> Confidence:
    own = torch.tensor(rows)
    return Confidence(own.logit(), own, own.cumprod(-1))


@pytest.mark.parametrize(("settings", "kept"), [
    ({"survival_threshold": 0.5}, 3),  # .9 .81 .729 .146
    ({"survival_threshold": 0.8}, 2),
    ({"survival_threshold": 0.1}, 5),
    ({"assistant_confidence_threshold": 0.5}, 3),  # the fifth slot is sure again, but behind a cut
    ({"assistant_confidence_threshold": 0.9}, 3),  # not below: kept
    ({"assistant_confidence_threshold": 0.95}, 0),
    ({"assistant_confidence_threshold": 0.2}, 5),
    ({"assistant_confidence_threshold": 0.5, "survival_threshold": 0.8}, 2),
    ({}, 5),
])  # fmt: skip
def test_a_block_ends_before_the_first_slot_below_a_threshold(settings: dict[str, float], kept: int) -> None:
    tokens = [11, 12, 13, 14, 15]
    scores = confidence_of([0.9, 0.9, 0.9, 0.2, 0.99])
    drafts = schedule(fake_run(SpeculationConfig(**settings)), proposal_of(tokens), scores, [5])
    assert drafts == [tokens[:kept]]


def test_rows_are_cut_on_their_own_and_behind_an_eos() -> None:
    tokens = [11, 12, 13, 14, 15]
    scores = confidence_of([0.9, 0.4, 0.9, 0.9, 0.9], [0.9, 0.9, 0.9, 0.9, 0.4], [0.9] * 5)
    scheduled = schedule(
        fake_run(SpeculationConfig(assistant_confidence_threshold=0.5), eos={13}, rows=3),
        proposal_of(tokens, tokens[::-1], tokens), scores, [5, 5, 2],
    )  # fmt: skip
    assert scheduled == [[11], [15, 14, 13], [11, 12]]


@pytest.mark.parametrize("name", ["assistant_confidence_threshold", "survival_threshold"])
def test_the_comparison_is_strict(name: str) -> None:
    # A head of zeros says exactly one half in the first slot.
    drafter = sure_of(0.5)
    above = torch.nextafter(torch.tensor(0.5), torch.tensor(1.0)).item()
    text = distinct()[1]
    assert run(drafter, **{name: 0.5}) == text[: PROMPT + COUNT]
    assert max(drafter.last_stats.verified) == (BLOCK if name.startswith("assistant") else 1)
    assert run(drafter, **{name: above}) == text[: PROMPT + COUNT]
    assert set(drafter.last_stats.verified) == {0}
    assert drafter.last_stats.num_rounds == COUNT - 1


@pytest.mark.parametrize("name", ["assistant_confidence_threshold", "survival_threshold"])
def test_thresholds_of_one_and_of_nothing(name: str) -> None:
    text = distinct()[1]
    unsure, certain = sure_of(0.999), sure_of(0.5)
    with torch.no_grad():
        certain.confidence_head.proj.bias.fill_(200.0)  # a sigmoid that rounds to one
    for drafter, threshold, most in ((unsure, 1.0, 0), (certain, 1.0, BLOCK), (unsure, 1, 0), (unsure, 0, BLOCK)):
        assert run(drafter, **{name: threshold}) == text[: PROMPT + COUNT]
        assert max(drafter.last_stats.verified) == most
        assert drafter.last_stats.fallback_reason is None


def test_survival_is_the_product_of_calibrated_confidences() -> None:
    # .8 .64 .512 .41 at temperature one; a half sharpens .8 to 16/17: .94 .886 .834 .785 .738 .695 .654
    drafter = sure_of(0.8)
    run(drafter, survival_threshold=0.5)
    assert max(drafter.last_stats.verified) == 3
    calibrated = sure_of(0.8, confidence_temperatures=[0.5] * BLOCK)
    run(calibrated, survival_threshold=0.7)
    assert max(calibrated.last_stats.verified) == 5
    # The reference's own-confidence rule looks at raw scores.
    run(calibrated, assistant_confidence_threshold=0.9)
    assert max(calibrated.last_stats.verified) == 0


def target_rows(drafter: Any, **kwargs: Any) -> list[int]:
    """Tokens in each forward pass of the target behind the prompt's."""
    rows: list[int] = []
    hook = target().model.register_forward_pre_hook(
        lambda module, args, call: rows.append(call["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        run(drafter, **kwargs)
    finally:
        hook.remove()
    return rows[1:]


def test_a_threshold_shrinks_the_targets_passes() -> None:
    full = target_rows(sure_of(0.8, wrong=(3,)))
    assert max(full) == BLOCK + 1
    cut = sure_of(0.8, wrong=(3,))
    rows = target_rows(cut, survival_threshold=0.5)
    assert max(rows) == 4
    assert rows == [verified + 1 for verified in cut.last_stats.verified]
    # Everything right among the verified is committed: three drafts and the target's own token in each round.
    assert cut.last_stats.accepted == cut.last_stats.verified
    assert len(rows) == len(full)
    assert set(target_rows(sure_of(0.4), assistant_confidence_threshold=0.5)) == {1}


def test_the_fixed_policy_verifies_every_draft() -> None:
    drafter = sure_of(0.3)
    assert run(drafter, policy="fixed", assistant_confidence_threshold=0.9) == distinct()[1][: PROMPT + COUNT]
    assert drafter.last_stats.verified[0] == BLOCK


@pytest.mark.parametrize("settings", [
    {}, {"survival_threshold": 0.3}, {"assistant_confidence_threshold": 0.5, "num_assistant_tokens": 4},
    {"survival_threshold": 0.3, "num_assistant_tokens": 2}, {"policy": "fixed"},
], ids=str)  # fmt: skip
def test_settings_do_not_change_the_text(settings: dict[str, Any]) -> None:
    ids = prompt(9, seed=4)
    expected = plain(target(), ids, max_new_tokens=COUNT)
    torch.manual_seed(5)
    untrained = DSparkDrafter(drafter_config(target(), markov_head_type="gated")).eval()
    for drafter in (oracle(text=expected[0].tolist()), hostile(), untrained):
        with torch.no_grad():
            drafter.confidence_head.proj.weight.mul_(30)  # scores all over (0, 1)
        got = plain(target(), ids, max_new_tokens=COUNT, assistant_model=drafter, **settings)
        assert torch.equal(got, expected)


def test_settings_of_a_batch() -> None:
    batch = torch.cat([prompt(seed=1), prompt(seed=2), prompt(seed=3)])
    expected = plain(target(), batch, max_new_tokens=COUNT)
    drafter = DSparkDrafter(drafter_config(target())).eval()
    with torch.no_grad():
        drafter.confidence_head.proj.weight.mul_(30)
    for settings in ({"survival_threshold": 0.4}, {"num_assistant_tokens": 2}):
        got = plain(target(), batch, max_new_tokens=COUNT, assistant_model=drafter, **settings)
        assert torch.equal(got, expected)


# --- a drafter without confidence head -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["assistant_confidence_threshold", "survival_threshold"])
def test_a_threshold_without_a_confidence_head_is_said_aloud(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[str] = []
    monkeypatch.setattr(confidence.logger, "warning_once", warned.append)
    drafter = Oracle(target(), [distinct()[1]], enable_confidence_head=False).eval()
    run(drafter)
    assert drafter.last_stats.fallback_reason is None
    assert not warned
    assert run(drafter, **{name: 0.9}) == distinct()[1][: PROMPT + COUNT]
    assert drafter.last_stats.verified[0] == BLOCK
    assert drafter.last_stats.fallback_reason.count("no confidence head") == 1
    assert "no confidence head" in warned[0]


# --- where settings come from ----------------------------------------------------------------------------------------


def settings_of(drafter: Any, config: GenerationConfig | None = None, **kwargs: Any) -> SpeculationConfig:
    return call_settings(drafter, config, kwargs)


def test_the_call_goes_before_the_config_before_the_drafter() -> None:
    drafter = oracle()
    drafter.speculation = SpeculationConfig(num_assistant_tokens=2, survival_threshold=0.1)
    config = GenerationConfig(num_assistant_tokens=3, assistant_confidence_threshold=0.3)
    assert settings_of(drafter) == drafter.speculation
    assert settings_of(drafter, GenerationConfig()) == drafter.speculation
    assert settings_of(drafter, config) == SpeculationConfig("threshold", 3, 0.3, 0.1)
    assert settings_of(drafter, config, num_assistant_tokens=4) == SpeculationConfig("threshold", 4, 0.3, 0.1)
    assert settings_of(drafter, num_assistant_tokens=None) == drafter.speculation
    assert settings_of(drafter, config, survival_threshold=0.0).survival_threshold == 0.0
    other = SpeculationConfig(policy="fixed")
    assert settings_of(drafter, speculation=other) == other
    assert settings_of(drafter, config, speculation=other) == SpeculationConfig("fixed", 3, 0.3, 0.0)
    ours = GenerationConfig()
    ours.survival_threshold = 0.7
    assert settings_of(drafter, ours).survival_threshold == 0.7


def test_precedence_holds_in_a_call() -> None:
    ids, text = distinct()
    drafter = oracle((None,))
    drafter.speculation = SpeculationConfig(num_assistant_tokens=5)
    config = GenerationConfig(num_assistant_tokens=4, max_new_tokens=COUNT)
    for kwargs, most in (({"max_new_tokens": COUNT}, 5), ({"generation_config": config}, 4)):
        assert target().generate(ids, assistant_model=drafter, **kwargs)[0].tolist() == text[: PROMPT + COUNT]
        assert max(drafter.last_stats.verified) == most
    run(drafter, num_assistant_tokens=3)
    assert max(drafter.last_stats.verified) == 3
    run(drafter, speculation=SpeculationConfig())
    assert max(drafter.last_stats.verified) == BLOCK


def test_transformers_global_defaults_are_not_looked_at() -> None:
    # generate() fills in 20 tokens and a threshold of 0.4, made for other assistants.
    drafter = sure_of(0.1)
    assert run(drafter) == distinct()[1][: PROMPT + COUNT]
    assert drafter.last_stats.verified[0] == BLOCK


@pytest.mark.parametrize(("name", "value"), [
    ("num_assistant_tokens", 0), ("num_assistant_tokens", -1), ("num_assistant_tokens", 2.5),
    ("num_assistant_tokens", True), ("num_assistant_tokens", "3"),
    ("assistant_confidence_threshold", -0.1), ("assistant_confidence_threshold", 1.5),
    ("assistant_confidence_threshold", float("nan")), ("assistant_confidence_threshold", "high"),
    ("survival_threshold", 2), ("survival_threshold", True), ("policy", "sometimes"),
    ("candidate_top_k", 0), ("candidate_top_k", 1025), ("candidate_top_k", True), ("candidate_top_k", 2.0),
    ("context_window", 0), ("context_window", -5), ("context_window", False), ("context_window", 64.0),
    ("context_window", "all"), ("speculation", {"policy": "fixed"}), ("speculation", False),
], ids=str)  # fmt: skip
def test_bad_values_are_refused_by_name_before_the_prompt(name: str, value: Any) -> None:
    drafter = oracle()
    ran = []
    hook = target().model.register_forward_pre_hook(lambda *_: ran.append(1))
    try:
        with pytest.raises(ValueError, match=f"`{name}` must be"):
            run(drafter, **{name: value})
    finally:
        hook.remove()
    assert not ran
    assert drafter.last_stats is None


# --- recorded confidence --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{"policy": "fixed"}, {"survival_threshold": 0.01}], ids=str)
def test_recorded_confidence_changes_nothing_else(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    drafter = oracle()
    text = run(drafter, speculation=SpeculationConfig(**settings))
    plain = drafter.last_stats
    assert plain.confidence_logits == []
    assert plain.scored_rounds() == []
    torch.manual_seed(0)
    drafter = oracle()  # the same one, whose accept lengths start over
    assert run(drafter, speculation=SpeculationConfig(**settings, record_confidence=True)) == text
    stats = drafter.last_stats
    assert (stats.verified, stats.accepted) == (plain.verified, plain.accepted)
    assert len(stats.scored_rounds()) == sum(d > 0 for d in stats.drafted)
    assert {len(logits) for logits, _, _ in stats.scored_rounds()} == {BLOCK}
    assert all(verified >= accepted for _, verified, accepted in stats.merge(stats).scored_rounds())


# --- policies that learn ---------------------------------------------------------------------------------------------


def test_what_a_policy_learnt_is_there_in_the_next_call() -> None:
    drafter = oracle()
    text = distinct()[1]
    settings = SpeculationConfig("auto")
    for _ in range(3):
        assert run(drafter, speculation=settings) == text[: PROMPT + COUNT]
    taught = drafter.take_policy(target(), settings)
    assert taught.curve.contexts
    other = drafter.take_policy(target(), settings)
    assert other is not taught, "two calls at a time do not share one"
    drafter.keep_policy(target(), settings, taught)
    assert drafter.take_policy(target(), settings) is taught
    drafter.keep_policy(target(), settings, taught)
    assert copy.deepcopy(drafter)._policies is None
    assert drafter.take_policy(target(), SpeculationConfig("fixed")) is not taught


def test_a_given_curve_is_not_written_to_and_an_empty_one_is_refused() -> None:
    known = ThroughputCurve()
    known.learn(1, 0.1)
    drafter = oracle()
    for policy in ("scheduled", "async", "auto"):
        assert run(drafter, policy=policy, throughput_curve=known) == distinct()[1][: PROMPT + COUNT]
    assert known.num_samples(1) == 1
    settings = SpeculationConfig("auto", throughput_curve=known)
    taught = drafter.take_policy(target(), settings)
    assert taught.curve.num_samples(1) > 1, "auto goes on from what it made of the curve"
    drafter.keep_policy(target(), settings, taught)
    assert drafter.take_policy(target(), SpeculationConfig("auto")) is not taught, "that belonged to another curve"
    for policy in ("scheduled", "async"):
        settings = SpeculationConfig(policy, throughput_curve=known)
        assert drafter.take_policy(target(), settings) is not drafter.take_policy(target(), settings)
    with pytest.raises(ValueError, match="empty"):
        SpeculationConfig("auto", throughput_curve=ThroughputCurve())
    with pytest.raises(ValueError, match=r"ThroughputCurve\.load"):
        SpeculationConfig("auto", throughput_curve="curve.json")


def test_without_a_confidence_head_policies_go_by_past_rounds() -> None:
    drafter = Oracle(target(), [distinct()[1]], (None,), enable_confidence_head=False).eval()
    for policy in ("scheduled", "async", "auto"):
        assert run(drafter, policy=policy) == distinct()[1][: PROMPT + COUNT]
        assert "how recent rounds went" in drafter.last_stats.fallback_reason


def test_a_curve_measured_on_something_else_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[str] = []
    monkeypatch.setattr(curve.logger, "warning_once", warned.append)
    key = curve.curve_key(target(), "it")
    for other in ({"dtype": "float16"}, {"packed": True, "threads": 64}, {"packed": None}, {}):
        known = ThroughputCurve(replace(key, **other))
        known.learn(1, 0.1)
        run(oracle(), policy="scheduled", throughput_curve=known)
    assert len(warned) == 2
    assert "(dtype: float16 in the curve, float32 now)" in warned[0]
    assert f"(threads: 64 in the curve, {torch.get_num_threads()} now; packed: yes in the curve, no now)" in warned[1]


def test_a_key_says_whether_the_target_is_packed() -> None:
    model = target()
    with optimize_for_cpu(model):
        assert curve.curve_key(model, "it").packed is True
    assert curve.curve_key(model, "it").packed is False


@pytest.mark.parametrize(
    "temperatures", [[1.5] * BLOCK, {"0": [1.5] * BLOCK, "1": [0.7] * BLOCK}], ids=["all", "greedy"]
)
def test_narrower_blocks_of_a_calibrated_drafter(temperatures: Any) -> None:
    drafter = Oracle(target(), [distinct()[1]], CYCLE, confidence_temperatures=temperatures).eval()
    for _ in range(2):
        assert run(drafter, policy="auto") == distinct()[1][: PROMPT + COUNT]
    assert len(set(drafter.last_stats.drafted)) > 1 or set(drafter.last_stats.drafted) == {0}


def test_a_confidence_that_is_not_a_number_is_not_trusted() -> None:
    drafter = oracle((None,))
    with torch.no_grad():
        drafter.confidence_head.proj.bias.fill_(float("nan"))
    for policy in ("threshold", "scheduled", "async", "auto"):
        assert run(drafter, policy=policy, survival_threshold=0.1) == distinct()[1][: PROMPT + COUNT]
