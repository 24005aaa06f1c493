"""Sampled text passes a chi-square against the target's own law, with the real random numbers of torch.

Catches what an enumeration cannot see: draws that are not independent of each other, between steps or between rows,
seeds that do not reach every draw. Each check must also fail on a wrong rule.
"""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from scipy import stats

from dspark.decoding import loop
from dspark.ops.rejection import torch as rejection

from .tiny import close_pair, own_law

PROMPT = torch.tensor([[3, 7, 1, 4]])
TOKENS = 3  # the first comes from the prompt's own pass, two from rounds
ROWS = 500
PASSES, CAUGHT = 1e-3, 1e-6  # p-values: a right rule fails one run in a thousand of other seeds, never a fixed one


def sample(assistant, calls: int, *, ids=PROMPT, mask=None, rows: int = ROWS, first_seed: int = 0) -> torch.Tensor:
    """First `TOKENS` new tokens of `calls` seeded calls, int64 `[calls, B, TOKENS]`, B = prompts times `rows`."""
    model = close_pair()[0]
    texts = []
    for seed in range(first_seed, first_seed + calls):
        torch.manual_seed(seed)
        kwargs = {} if mask is None else {"attention_mask": mask}
        out = model.generate(
            ids, assistant_model=assistant, do_sample=True, temperature=0.9, top_k=0, max_new_tokens=TOKENS + 1,
            num_return_sequences=rows, **kwargs,
        )  # fmt: skip
        texts.append(out[:, ids.shape[1] : ids.shape[1] + TOKENS])
    return torch.stack(texts)


@lru_cache
def sampled() -> torch.Tensor:
    return sample(close_pair()[1], 100)


@lru_cache
def expected(prompt: tuple[int, ...] = tuple(PROMPT[0].tolist())) -> torch.Tensor:
    """Probability of every text of `TOKENS` tokens, `[V, V, V]`."""
    model = close_pair()[0]
    law = own_law(model, torch.tensor([prompt]), TOKENS, temperature=0.9, max_new_tokens=TOKENS)
    table = torch.zeros([model.config.vocab_size] * TOKENS, dtype=torch.float64)
    for text, mass in law.items():
        table[text] = mass
    return table / table.sum()


def p_value(texts: torch.Tensor, law: torch.Tensor) -> float:
    """Chi-square of texts `[N, n]` against `law` (n dimensions); cells that expect fewer than 5 are one cell."""
    observed = torch.zeros(law.shape, dtype=torch.float64)
    observed.index_put_(tuple(texts.T), torch.ones(len(texts), dtype=torch.float64), accumulate=True)
    wanted, observed = law.flatten() * len(texts), observed.flatten()
    is_rare = wanted < 5
    cells = [torch.cat([c[~is_rare], c[is_rare].sum()[None]]) for c in (observed, wanted)]
    if float(cells[1][-1]) == 0:
        cells = [c[:-1] for c in cells]
    return float(stats.chisquare(*cells).pvalue)


def test_continuations_have_the_law():
    texts = sampled().flatten(0, 1)
    assert len(texts) >= 50_000
    assert p_value(texts, expected()) > PASSES
    assert p_value(texts[:, 1:], expected().sum(0)) > PASSES
    rate = close_pair()[1].last_stats.draft_acceptance_rate
    assert 0.3 < rate < 0.8, "the check means little unless drafts are both kept and refused"


def test_another_drafter_has_the_same_law_but_other_texts():
    other = close_pair(noise=1.5, seed=1)[1]
    texts = sample(other, 20)
    assert p_value(texts.flatten(0, 1), expected()) > PASSES
    assert not torch.equal(texts[0], sampled()[0])


def test_each_row_of_a_batch_has_the_law():
    """100 calls give each of the 500 rows a sample of its own."""
    seconds = expected().sum((0, 2))
    values = [p_value(row[:, 1:2], seconds) for row in sampled().transpose(0, 1)]
    assert min(values) > PASSES / ROWS
    assert stats.kstest(values, "uniform").pvalue > PASSES


def neighbours(texts: torch.Tensor) -> float:
    """p-value of the second tokens of rows b and b + 1 being independent."""
    tokens = texts[:, : texts.shape[1] // 2 * 2, 1].reshape(-1, 2)
    one = expected().sum((0, 2))
    return p_value(tokens, one[:, None] * one)


def test_rows_of_a_batch_draw_apart(monkeypatch):
    assert neighbours(sampled()) > PASSES
    rand = torch.rand
    monkeypatch.setattr(torch, "rand", lambda rows, *args, **kwargs: rand(1, *args, **kwargs).expand(rows, -1))
    assert neighbours(sample(close_pair()[1], 10)) < CAUGHT


def test_prompts_of_a_padded_batch_have_their_own_laws():
    prompts = [[5, 9], [3, 7, 1, 4], [2, 2, 8, 6, 10, 1, 11]]
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    texts = sample(close_pair()[1], 20, ids=ids, mask=mask, rows=200).view(20, 3, 200, TOKENS)
    for index, prompt in enumerate(prompts):
        own = texts[:, index].flatten(0, 1)
        assert p_value(own, expected(tuple(prompt))) > PASSES
        assert p_value(own, expected(tuple(prompts[index - 1]))) < CAUGHT


def test_seeds_decide_the_text():
    one, again, other = (sample(close_pair()[1], 1, first_seed=seed) for seed in (7, 7, 8))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert len({tuple(text) for text in one[0].tolist()}) > ROWS // 4


def redraw_from_target(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rejection, "_residual", lambda target_row, *_: target_row)


def one_uniform(patch: pytest.MonkeyPatch) -> None:
    """The uniform that drew a draft also decides whether it stays."""
    propose, rand = loop.propose, torch.rand
    drawn: list[torch.Tensor] = []

    def proposing(*args):
        drawn.clear()
        return propose(*args)

    def multinomial(probs, num_samples):
        drawn.append(rand(len(probs), dtype=torch.float64))
        return rejection.draw(probs, drawn[-1])[:, None]

    def sharing(rows, columns, **kwargs):
        uniforms = rand(rows, columns, **kwargs)
        for k in range(columns - 1):
            uniforms[:, k] = drawn[k]
        return uniforms

    patch.setattr(loop, "propose", proposing)
    patch.setattr(torch, "multinomial", multinomial)
    patch.setattr(torch, "rand", sharing)


@pytest.mark.parametrize("wrong", [redraw_from_target, one_uniform])
def test_wrong_rules_are_caught(wrong, monkeypatch):
    wrong(monkeypatch)
    assert p_value(sample(close_pair()[1], 10).flatten(0, 1), expected()) < CAUGHT
