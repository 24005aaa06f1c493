"""What every implementation of the Markov op is held to. Subclasses say which implementation runs where.

Weights and logits are multiples of 1/8 with few bits, so sums are exact in every dtype and order, and ties are common.
"""

from __future__ import annotations

import pytest
import torch

from dspark.ops.markov_step import (
    GatedFeatures,
    MarkovTables,
    RecurrentFeatures,
    Sampling,
    markov_block,
    markov_step,
)
from tests.reference import markov as reference

# (columns, rank, rows, slots): no powers of two, one tile and many, few rows and many.
SHAPES = [(63, 5, 1, 2), (500, 24, 5, 2), (129, 80, 2, 1)]
SHAPE_IDS = [f"V{v}-r{r}-B{b}-g{g}" for v, r, b, g in SHAPES]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EDGES = ["equal", "one left", "one nan", "two nans", "all nan", "none left", "tie across tiles", "one inf", "two infs"]


def eighths(*shape: int, limit: int = 8) -> torch.Tensor:
    return torch.randint(-limit, limit + 1, shape) / 8


def tables(columns: int, rank: int, dtype=torch.float32, *, reduced=False, forbidden=False) -> MarkovTables:
    vocab = 2 * columns if reduced else columns
    ids = torch.randperm(vocab)[:columns].sort().values if reduced else None
    denied = torch.rand(columns) < 0.4 if forbidden else None
    return MarkovTables(eighths(vocab, rank).to(dtype), eighths(columns, rank).to(dtype), ids, denied)


def featured(kind: str, columns: int, rank: int, rows: int, slots: int, dtype=torch.float32) -> MarkovTables:
    """Tables of a gated or recurrent head, whose parts are not multiples of anything."""
    parts, inputs = (1, 1) if kind == "gated" else (3, 2)
    weight = (torch.randn(parts * rank, inputs * rank + 3) / rank**0.5).to(dtype)[:, : inputs * rank]  # a slice, too
    hidden = torch.randn(rows, slots, parts * rank).to(dtype)
    features = GatedFeatures(weight, hidden)
    if kind == "recurrent":
        features = RecurrentFeatures(weight, hidden, torch.randn(rows, rank))
    w1, w2 = torch.randn(columns, rank).to(dtype), torch.randn(columns, rank).to(dtype)
    return MarkovTables(w1, w2, features=features)


def edge_rows(columns: int = 300) -> torch.Tensor:
    """One row per entry of `EDGES`."""
    rows = torch.randn(len(EDGES), columns).clamp(max=3)
    rows[0] = 1.5
    rows[1] = -torch.inf
    rows[1, 200] = -4.0
    rows[2, 131] = torch.nan
    rows[3, [140, 290]] = torch.nan
    rows[4] = torch.nan
    rows[5] = -torch.inf
    rows[6, [127, 128, 260]] = 9.0
    rows[7, 130] = torch.inf
    rows[8, [255, 256]] = torch.inf
    return rows


class MarkovContract:
    implementation = "torch"
    device = "cpu"

    def move(self, value):
        if isinstance(value, torch.Tensor):
            return value.to(self.device)
        if isinstance(value, tuple):
            return type(value)(*(self.move(v) for v in value))
        return value

    def block(self, *args, **kwargs):
        args, kwargs = [self.move(a) for a in args], {name: self.move(v) for name, v in kwargs.items()}
        drawn = markov_block(*args, implementation=self.implementation, **kwargs)
        return type(drawn)(*(None if t is None else t.cpu() for t in drawn))

    @pytest.mark.parametrize(("reduced", "forbidden"), [(False, False), (True, True)])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("shape", SHAPES, ids=SHAPE_IDS)
    def test_greedy_walks_as_the_scalar_reference(self, shape, dtype, reduced, forbidden):
        columns, rank, rows, slots = shape
        weights = tables(columns, rank, dtype, reduced=reduced, forbidden=forbidden)
        base, anchors = eighths(rows, slots, columns, limit=64).to(dtype), torch.randint(columns, (rows,))
        drawn = self.block(base, anchors, weights, with_law=True)
        check_walk(drawn, base, anchors, weights)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("shape", SHAPES, ids=SHAPE_IDS)
    def test_sampling_walks_as_the_scalar_reference_on_the_same_noise(self, shape, dtype):
        columns, rank, rows, slots = shape
        weights = tables(columns, rank, dtype, reduced=True, forbidden=True)
        base, anchors = eighths(rows, slots, columns, limit=64).to(dtype), torch.randint(columns, (rows,))
        noise, temperatures = eighths(rows, slots, columns, limit=80), torch.tensor([0.5, 1, 2, 4, 8]).repeat(4)[:rows]
        sampling = Sampling(temperatures, noise=noise)
        drawn = self.block(base, anchors, weights, sampling=sampling, with_law=True)
        check_walk(drawn, base, anchors, weights, noise, temperatures)

    @pytest.mark.parametrize("samples", [False, True])
    @pytest.mark.parametrize("top_k", [1, 7, 60])
    def test_candidates_alone_see_the_bias(self, top_k, samples):
        columns, rank, rows, slots = 150, 5, 3, 3
        weights = tables(columns, rank, reduced=True, forbidden=True)
        base = torch.stack([torch.randperm(columns) / 8 for _ in range(rows * slots)]).view(rows, slots, columns)
        anchors, noise = torch.randint(columns, (rows,)), eighths(rows, slots, columns, limit=80)
        sampling = Sampling(2.0, noise=noise) if samples else None
        drawn = self.block(base, anchors, weights, sampling=sampling, candidate_top_k=top_k, with_law=True)
        temperatures = torch.full((rows,), 2.0) if samples else None
        check_walk(drawn, base, anchors, weights, noise if samples else None, temperatures, top_k=top_k)
        assert (drawn.law_logits > -torch.inf).sum(-1).max() == top_k

    @pytest.mark.parametrize("top_k", [None, 300])
    def test_edge_rows_choose_as_argmax(self, top_k):
        rows = edge_rows()
        weights = MarkovTables(torch.zeros(300, 3), torch.ones(300, 3))
        drawn = self.block(rows[:, None], torch.zeros(len(rows), dtype=torch.long), weights, candidate_top_k=top_k)
        assert dict(zip(EDGES, drawn.token_ids[:, 0].tolist(), strict=True)) == dict(
            zip(EDGES, rows.argmax(-1).tolist(), strict=True)
        )

    @pytest.mark.parametrize("top_k", [None, 300])
    def test_edge_rows_are_drawn_from_what_is_allowed(self, top_k):
        rows, forbidden = edge_rows(), torch.rand(300) < 0.5
        forbidden[200] = False
        weights = MarkovTables(torch.zeros(300, 3), torch.ones(300, 3), None, forbidden)
        noise = torch.rand(len(rows), 1, 300)
        drawn = self.block(rows[:, None], torch.zeros(len(rows), dtype=torch.long), weights,
                           sampling=Sampling(noise=noise), candidate_top_k=top_k, with_law=True)  # fmt: skip
        masked, law = rows.masked_fill(forbidden, -torch.inf), drawn.law_logits[:, 0].softmax(-1)
        torch.testing.assert_close(law.sum(-1), torch.ones(len(rows)))
        assert (law[:, forbidden] == 0).all()
        assert not forbidden[drawn.token_ids[:, 0]].any()
        picked = law.gather(1, drawn.token_ids).log()
        torch.testing.assert_close(drawn.log_probs, picked, rtol=0, atol=2e-5)  # a float32 logsumexp of 300
        assert drawn.token_ids[EDGES.index("one left"), 0] == 200
        uniform = noise[:, 0].masked_fill(forbidden, -torch.inf).argmax(-1)
        for b, edge in enumerate(EDGES):
            if not masked[b].logsumexp(-1).isfinite():
                assert drawn.token_ids[b, 0] == uniform[b], edge
                assert drawn.law_logits[b, 0][~forbidden].unique().tolist() == [0.0]

    def test_tied_columns_are_drawn_equally_often(self):
        rows, ties = 512, [3, 127, 128, 290]
        base = torch.zeros(300).index_fill(0, torch.tensor(ties), 200.0).expand(rows, 1, -1)
        weights = MarkovTables(torch.zeros(300, 3), torch.ones(300, 3))
        sampling = Sampling(seeds=torch.arange(rows))
        drawn = self.block(base, torch.zeros(rows, dtype=torch.long), weights, sampling=sampling)
        counts = drawn.token_ids[:, 0].bincount(minlength=300)
        assert counts[ties].sum() == rows
        assert ((counts[ties] - 128) ** 2 / 128).sum() < 16.3  # chi-square, 3 degrees of freedom, p = 0.001
        torch.testing.assert_close(drawn.log_probs, torch.full((rows, 1), 0.25).log())

    def test_draws_follow_the_law(self):
        rows, temperature = 512, 0.5
        weights, base = tables(5, 3), eighths(1, 1, 5).expand(rows, -1, -1)
        sampling = Sampling(temperature, seeds=torch.arange(rows) - 500, offsets=torch.full((rows,), 2**40))
        drawn = self.block(base, torch.full((rows,), 3), weights, sampling=sampling, with_law=True)
        logits = reference.corrected_logits(base[0, 0].tolist(), 3, weights.w1.tolist(), weights.w2.tolist())
        expected = rows * torch.tensor(reference.law([x / temperature for x in logits]))
        counts = drawn.token_ids[:, 0].bincount(minlength=5)
        assert ((counts - expected) ** 2 / expected).sum() < 18.5  # chi-square, 4 degrees of freedom, p = 0.001

    def test_noise_is_not_lost_beside_large_logits(self):
        weights, base = tables(300, 3), eighths(6, 2, 300)
        anchors, sampling = torch.zeros(6, dtype=torch.long), Sampling(4.0, seeds=torch.arange(6))
        near, far = (self.block(base + shift, anchors, weights, sampling=sampling) for shift in (0, 2.0**16))
        assert torch.equal(near.token_ids, far.token_ids)
        assert len(near.token_ids.unique()) > 4
        torch.testing.assert_close(near.log_probs, far.log_probs, rtol=0, atol=2e-5)  # the order of float32 sums

    @pytest.mark.parametrize("top_k", [None, 20])
    def test_rows_and_steps_do_not_depend_on_each_other(self, top_k):
        weights, base, anchors = tables(150, 7), eighths(5, 3, 150), torch.randint(150, (5,))
        seeds, offsets = torch.randint(2**62, (5,)), torch.randint(2**40, (5,))
        whole = self.block(base, anchors, weights, sampling=Sampling(2.0, seeds, offsets), candidate_top_k=top_k)
        for b in (0, 4):
            part, previous = slice(b, b + 1), anchors[b : b + 1]
            for k in range(3):
                sampling = Sampling(torch.tensor([2.0]), seeds[part], offsets[part] + k)
                arguments = [self.move(v) for v in (base[part, k], previous, weights)]
                step = markov_step(*arguments, sampling=self.move(sampling), candidate_top_k=top_k,
                                   implementation=self.implementation)  # fmt: skip
                previous = step.token_ids.cpu()
                assert torch.equal(previous, whole.token_ids[part, k])
                torch.testing.assert_close(step.log_probs.cpu(), whole.log_probs[part, k], rtol=0, atol=2e-5)

    def test_strides_do_not_matter(self):
        weights, wide = tables(100, 12), eighths(4, 6, 200, limit=64)
        ids, sampling = torch.randint(100, (4, 3)), Sampling(noise=eighths(4, 4, 100)[:, ::2])
        loose = weights._replace(w1=weights.w1.repeat(1, 2)[:, :12], w2=weights.w2.T.contiguous().T)
        for base in (wide[:, ::3, :100], wide[:, ::3, ::2]):
            for kwargs in ({}, {"candidate_top_k": 9}, {"sampling": sampling}):
                got = self.block(base, ids[:, 1], loose, **kwargs)
                want = self.block(base.contiguous(), ids[:, 1].contiguous(), weights, **kwargs)
                assert torch.equal(got.token_ids, want.token_ids)

    @pytest.mark.parametrize("kind", ["gated", "recurrent"])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize(("rows", "top_k"), [(1, None), (5, None), (2, 30)])
    def test_features_of_other_heads(self, rows, top_k, dtype, kind):
        columns, rank, slots = 70, 21, 3
        weights, base = featured(kind, columns, rank, rows, slots, dtype), torch.randn(rows, slots, columns)
        anchors, sampling = torch.randint(columns, (rows,)), Sampling(2.0, torch.arange(rows))
        for kwargs in ({}, {"sampling": sampling}):
            drawn = self.block(base, anchors, weights, candidate_top_k=top_k, with_law=True, **kwargs)
            laws = drawn.law_logits * (2.0 if kwargs else 1.0)
            # Features are rounded to the dtype of the weights, and a rounding may fall either way.
            tolerance = {torch.float32: 2e-5, torch.float16: 0.03, torch.bfloat16: 0.2}[dtype]
            check_features(drawn, laws, base, anchors, weights, top_k, tolerance)
            if not kwargs:
                assert torch.equal(drawn.token_ids, drawn.law_logits.argmax(-1))

    @pytest.mark.parametrize("kind", ["gated", "recurrent"])
    @pytest.mark.parametrize("top_k", [None, 30])
    def test_steps_are_the_block(self, kind, top_k):
        weights, base, anchors = featured(kind, 70, 21, 5, 3), torch.randn(5, 3, 70), torch.randint(70, (5,))
        whole, previous, features = (
            self.block(base, anchors, weights, candidate_top_k=top_k),
            anchors,
            weights.features,
        )
        for k in range(3):
            now = weights._replace(features=features._replace(hidden=features.hidden[:, k]))
            step = markov_step(*map(self.move, (base[:, k], previous, now)), candidate_top_k=top_k,
                               implementation=self.implementation)  # fmt: skip
            previous = step.token_ids.cpu()
            assert torch.equal(previous, whole.token_ids[:, k])
            if step.state is not None:
                features = features._replace(state=step.state.cpu())
        assert (step.state is None) == (kind == "gated")
        if step.state is not None:
            torch.testing.assert_close(step.state.cpu(), whole.state, rtol=0, atol=2e-6)


def check_features(drawn, laws, base, anchors, weights, top_k, tolerance):
    """Logits of every slot, and the last state, against the scalar heads along the drawn tokens."""
    w1, w2, how = weights.w1.float().tolist(), weights.w2.float().tolist(), weights.features
    weight = how.weight.float().tolist()
    for b in range(base.shape[0]):
        state = how.state[b].tolist() if isinstance(how, RecurrentFeatures) else None
        for k, previous in enumerate([int(anchors[b]), *drawn.token_ids[b, :-1].tolist()]):
            hidden = how.hidden[b, k].float().tolist()
            if state is None:
                features = reference.gated(w1[previous], weight, hidden)
            else:
                features, state = reference.recurrent(w1[previous], weight, hidden, state)
            want = reference.with_features(base[b, k].tolist(), features, w2)
            if top_k is not None:
                want = reference.restricted(want, reference.largest(base[b, k].tolist(), top_k))
            torch.testing.assert_close(laws[b, k], torch.tensor(want), rtol=0, atol=tolerance)
        if state is not None:
            torch.testing.assert_close(drawn.state[b], torch.tensor(state), rtol=0, atol=2e-5)


def check_walk(drawn, base, anchors, weights, noise=None, temperatures=None, top_k=None):
    """Every token, law and log-probability of a block against the scalar walk."""
    w1, w2 = weights.w1.float().tolist(), weights.w2.float().tolist()
    allowed = set(range(len(w2)))
    if weights.forbidden is not None:
        allowed -= set(weights.forbidden.nonzero()[:, 0].tolist())
    for b in range(base.shape[0]):
        previous = int(anchors[b])
        for k in range(base.shape[1]):
            row = reference.restricted(base[b, k].float().tolist(), allowed)
            logits = reference.corrected_logits(row, previous, w1, w2)
            if top_k is not None:
                logits = reference.restricted(logits, reference.largest(row, top_k))
            temperature = 1.0 if temperatures is None else float(temperatures[b])
            logits = [x / temperature for x in logits]
            scores = logits if noise is None else [x + n for x, n in zip(logits, noise[b, k].tolist(), strict=True)]
            column = reference.arg_max(scores)
            previous = column if weights.draft_token_ids is None else int(weights.draft_token_ids[column])
            assert int(drawn.token_ids[b, k]) == previous, (b, k)
            assert drawn.law_logits[b, k].tolist() == logits
            want = torch.tensor(reference.law(logits)[column]).log()
            torch.testing.assert_close(drawn.log_probs[b, k], want, rtol=0, atol=2e-5)  # a float32 logsumexp
