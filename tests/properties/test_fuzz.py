"""Random settings, many of them: no crash, ids in range, statistics that add up, greedy text equal to plain decoding.

Catches: combinations that no other test thought of. A failure names its case, which `run_case(random.Random(case))`
repeats.
"""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch

from tests.scripted import Hostile

from .tiny import drafter, target

pytestmark = pytest.mark.filterwarnings("ignore:Unfeasible length constraints")  # chance asks for these too

CASES = 300
CHUNK = 50


def random_drafter(rng: random.Random, vocab: int) -> Any:
    block = rng.choice([1, 2, 3, 7])
    fields: dict[str, Any] = {"block_size": block, "num_hidden_layers": rng.choice([1, 2])}
    if block > 1 and rng.random() < 0.3:
        fields["sample_from_anchor"] = False
    if rng.random() < 0.25:
        return Hostile(target(vocab), seed=rng.randrange(9), **fields).eval()
    fields["markov_head_type"] = rng.choice(["none", "vanilla", "gated", "rnn"])
    fields["markov_rank"] = 0 if fields["markov_head_type"] == "none" else 4
    if rng.random() < 0.3:
        fields["draft_vocab_size"] = rng.randint(2, vocab)
    if rng.random() < 0.2:
        fields["enable_confidence_head"] = False
    return drafter(target(vocab), seed=rng.randrange(99), **fields)


def random_call(rng: random.Random, vocab: int) -> dict[str, Any]:
    call: dict[str, Any] = {"max_new_tokens": rng.choice([1, 2, 3, 5, 9, 24])}
    optional: dict[str, Any] = {
        "num_assistant_tokens": rng.randint(1, 8),
        "assistant_confidence_threshold": rng.random(),
        "survival_threshold": rng.random() ** 2,
        "eos_token_id": [rng.randrange(vocab), rng.randrange(vocab)],
        "min_new_tokens": rng.randint(1, 6),
        "repetition_penalty": rng.uniform(0.7, 2.0),
        "no_repeat_ngram_size": rng.randint(2, 3),
        "bad_words_ids": [[rng.randrange(1, vocab)], [rng.randrange(vocab), rng.randrange(vocab)]],
        "suppress_tokens": [rng.randrange(1, vocab)],
        "encoder_repetition_penalty": rng.uniform(0.7, 2.0),
        "renormalize_logits": True,
    }
    call |= {name: value for name, value in optional.items() if rng.random() < 0.2}
    if rng.random() < 0.6:
        warpers = {
            "temperature": rng.choice([0.3, 0.7, 1.5, 5.0]), "top_k": rng.randint(1, vocab),
            "top_p": rng.uniform(0.1, 1.0), "min_p": rng.random() / 2, "typical_p": rng.uniform(0.2, 0.9),
        }  # fmt: skip
        call |= {"do_sample": True, "num_return_sequences": rng.choice([1, 1, 2, 3])}
        call |= {name: value for name, value in warpers.items() if rng.random() < 0.4}
    return call


def run_case(rng: random.Random) -> None:
    vocab = rng.choice([5, 12, 33])
    model, assistant = target(vocab), random_drafter(rng, vocab)
    rows, width = rng.randint(1, 4), rng.randint(1, 9)
    lengths = [rng.randint(1, width) for _ in range(rows - 1)] + [width]
    ids = torch.tensor([[0] * (width - n) + [rng.randrange(1, vocab) for _ in range(n)] for n in lengths])
    mask = torch.tensor([[0] * (width - n) + [1] * n for n in lengths])
    call = random_call(rng, vocab)
    torch.manual_seed(rng.randrange(1000))
    try:
        out = model.generate(ids, attention_mask=mask, assistant_model=assistant, **call)
    except RuntimeError as error:
        # Where every token is forbidden, sampling fails with and without a drafter.
        if "no_repeat_ngram_size" in call and re.search("has no law|probability tensor contains", str(error)):
            return
        raise
    check_text(out, ids, call, vocab)
    check_statistics(assistant.last_stats, out, width, call)
    if not call.get("do_sample"):
        call.pop("survival_threshold", None)
        assert torch.equal(out, model.generate(ids, attention_mask=mask, **call))


def new_tokens(out: torch.Tensor, width: int, call: dict[str, Any]) -> list[list[int]]:
    """Per row, what is behind the prompt up to its end, padding left off."""
    rows = []
    for row in out[:, width:].tolist():
        ends = [i for i, token in enumerate(row) if token in call.get("eos_token_id", ())]
        rows.append(row[: ends[0] + 1] if ends else row)
    return rows


def check_text(out: torch.Tensor, ids: torch.Tensor, call: dict[str, Any], vocab: int) -> None:
    repeats, width = call.get("num_return_sequences", 1), ids.shape[1]
    assert torch.equal(out[:, :width], ids.repeat_interleave(repeats, dim=0))
    assert ((out >= 0) & (out < vocab)).all()
    texts = new_tokens(out, width, call)
    assert max(map(len, texts)) == out.shape[1] - width <= call["max_new_tokens"]
    for text, row in zip(texts, out[:, width:].tolist(), strict=True):
        assert len(text) == call["max_new_tokens"] or text[-1] in call["eos_token_id"]
        assert set(row[len(text) :]) <= {0}  # the pad token
        assert not set(text) & set(call.get("suppress_tokens", ()))


def check_statistics(stats: Any, out: torch.Tensor, width: int, call: dict[str, Any]) -> None:
    assert stats.num_rows == len(out)
    assert stats.num_new_tokens == sum(map(len, new_tokens(out, width, call)))
    for drafted, verified, accepted in zip(stats.drafted, stats.verified, stats.accepted, strict=True):
        assert 0 <= accepted <= verified <= drafted
        assert verified <= call.get("num_assistant_tokens", drafted)
    cut = sum(stats.accepted) + stats.num_rounds + stats.num_rows - stats.num_new_tokens
    # A row can only lose what follows its end-of-sequence token in its last round: drafts end there, so one token.
    assert 0 <= cut <= (stats.num_rows if "eos_token_id" in call else 0)
    assert stats.num_target_passes <= 1 + stats.num_rounds
    if len(out) == 1:
        assert stats.num_target_passes == 1 + stats.num_rounds


def run_cases(cases: range) -> None:
    for case in cases:
        try:
            run_case(random.Random(case))
        except Exception as error:
            error.add_note(f"in case {case}")
            raise


@pytest.mark.parametrize("start", range(0, CASES, CHUNK))
def test_random_settings(start):
    run_cases(range(start, start + CHUNK))


@pytest.mark.slow
@pytest.mark.parametrize("start", range(CASES, 10 * CASES, CASES))
def test_many_more_random_settings(start):
    run_cases(range(start, start + CASES))
