"""Exact verification: the tensor code against the scalar reference, edge by edge.

Catches: another slot's law in the residual, a bonus drawn from the residual, `<=`, a floor under p_d, padding that
leaks, a draw that emits forbidden tokens, an index past the vocabulary, a host sync.
"""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dspark.decoding.rejection import Verdict, draw, greedy_verify, rejection_sample
from tests.reference import rejection
from tests.reference.measure import BELOW_ONE

FORMS = ("dense", "greedy", "reduced")


@dataclasses.dataclass
class Rows:
    ids: torch.Tensor
    draft: torch.Tensor | None
    target: torch.Tensor
    lengths: torch.Tensor
    uniforms: torch.Tensor
    draft_token_ids: torch.Tensor | None = None

    def verdict(self, **kwargs) -> Verdict:
        kwargs = {"uniforms": self.uniforms, "draft_token_ids": self.draft_token_ids, **kwargs}
        return rejection_sample(self.ids, self.draft, self.target, self.lengths, **kwargs)

    def dense_draft(self) -> torch.Tensor | None:
        if self.draft_token_ids is None:
            return self.draft
        dense = self.draft.new_zeros(*self.draft.shape[:2], self.target.shape[-1])
        return dense.index_copy(-1, self.draft_token_ids, self.draft)


def random_rows(vocab: int, dtype: torch.dtype, form: str, rows: int = 40, slots: int = 3) -> Rows:
    """Ragged rows with -inf logits, equal, flat and one-hot laws, extreme uniforms; poison past each row's length."""
    g = torch.Generator().manual_seed(vocab)
    target = torch.randn(rows, slots + 1, vocab, generator=g, dtype=dtype) * 2
    draft = target[:, :-1] + torch.randn(rows, slots, vocab, generator=g, dtype=dtype)
    draft[:10] = target[:10, :-1]
    target[10:15], draft[5:15] = 0, 0
    target[15:25] = (target[15:25] == target[15:25].amax(-1, keepdim=True)).log().to(dtype)
    for logits in (target[20:], draft[20:]):
        cut = torch.rand(logits.shape, generator=g) < 0.3
        logits[cut & (logits < logits.amax(-1, keepdim=True))] = -torch.inf
    token_ids = torch.randperm(vocab, generator=g)[: vocab // 2 + 1].sort().values if form == "reduced" else None
    target, draft = target.softmax(-1), (draft if token_ids is None else draft[..., token_ids]).softmax(-1)
    draft = draft.nan_to_num(1 / draft.shape[-1])  # a reduced vocabulary may be left with -inf alone
    ids = torch.multinomial(draft.flatten(0, 1), 1, generator=g).view(rows, slots)
    ids = ids if token_ids is None else token_ids[ids]
    lengths = torch.arange(rows) % (slots + 1)
    padding = torch.arange(slots) >= lengths[:, None]
    ids[padding] = torch.where(torch.arange(int(padding.sum())) % 2 == 0, -1, vocab + 7)
    draft[padding] = torch.nan
    target[:, 1:][padding] = torch.nan
    uniforms = torch.rand(rows, slots + 1, generator=g, dtype=dtype)
    uniforms[::7], uniforms[1::7] = 0, BELOW_ONE
    return Rows(ids, None if form == "greedy" else draft, target, lengths, uniforms, token_ids)


def exact(tensor: torch.Tensor) -> list:
    return [exact(row) for row in tensor] if tensor.dim() > 1 else [Fraction(v) for v in tensor.tolist()]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab", [2, 5, 63, 1000])
def test_equals_the_scalar_reference_on_the_same_uniforms(vocab, dtype, form):
    rows = random_rows(vocab, dtype, form)
    got, dense = rows.verdict(), rows.dense_draft()
    assert got.num_accepted.dtype == got.next_ids.dtype == torch.int64
    counts = set()
    for b, length in enumerate(rows.lengths.tolist()):
        laws = None if dense is None else exact(dense[b, :length])
        uniforms = exact(rows.uniforms[b])
        want = rejection.rejection_sample(
            rows.ids[b, :length].tolist(),
            laws,
            exact(rows.target[b, : length + 1]),
            [*uniforms[:length], uniforms[-1]],
        )
        assert (int(got.num_accepted[b]), int(got.next_ids[b])) == want, b
        counts.add(want[0] - length)
    assert 0 in counts
    assert len(counts) > 1  # both endings occurred


@pytest.mark.parametrize("vocab", [5, 1000])
def test_greedy_form_equals_one_hot_laws(vocab):
    rows = random_rows(vocab, torch.float32, "greedy")
    one_hot = torch.nn.functional.one_hot(rows.ids.clamp(0, vocab - 1), vocab).float()
    for ours, dense in zip(rows.verdict(), dataclasses.replace(rows, draft=one_hot).verdict(), strict=True):
        assert torch.equal(ours, dense)


@pytest.mark.parametrize("form", FORMS)
def test_rows_do_not_touch_each_other(form):
    rows = random_rows(63, torch.float32, form)
    whole = rows.verdict()
    for b in range(0, 40, 7):
        part = slice(b, b + 1)
        alone = Rows(rows.ids[part], None if rows.draft is None else rows.draft[part], rows.target[part],
                     rows.lengths[part], rows.uniforms[part], rows.draft_token_ids).verdict()  # fmt: skip
        assert (alone.num_accepted, alone.next_ids) == (whole.num_accepted[part], whole.next_ids[part])


def one_slot(p, q, token, u, v=0.0, dtype=torch.float64) -> tuple[int, int]:
    """Verdict on one draft in one row."""
    target = torch.tensor([[p, p]], dtype=dtype)
    draft = None if q is None else torch.tensor([[q]], dtype=dtype)
    uniforms = torch.tensor([[u, v]], dtype=torch.float64)
    verdict = rejection_sample(torch.tensor([[token]]), draft, target, torch.tensor([1]), uniforms=uniforms)
    return int(verdict.num_accepted), int(verdict.next_ids)


def test_comparison_is_strict():
    assert one_slot([0.0, 1.0], [1.0, 0.0], token=0, u=0.0) == (0, 1)
    assert one_slot([0.0, 1.0], None, token=0, u=0.0) == (0, 1)
    assert one_slot([0.25, 0.75], [0.5, 0.5], token=0, u=0.5) == (0, 1)
    assert one_slot([0.25, 0.75], [0.5, 0.5], token=0, u=0.5 - 2**-53)[0] == 1


def test_draft_denied_by_its_own_law_is_judged_by_the_limit():
    assert one_slot([0.1, 0.9], [0.0, 1.0], token=0, u=BELOW_ONE)[0] == 1
    assert one_slot([0.0, 1.0], [0.0, 1.0], token=0, u=0.0) == (0, 1)
    target, outside = torch.tensor([[[0.1, 0.2, 0.7]] * 2] * 3), torch.tensor([[0], [1], [2]])
    kwargs = {"draft_token_ids": torch.tensor([1]), "uniforms": torch.full((3, 2), 0.999)}
    verdict = rejection_sample(outside, torch.ones(3, 1, 1), target, torch.ones(3, dtype=torch.int64), **kwargs)
    assert verdict.num_accepted.tolist() == [1, 0, 1]


def test_rare_drafts_are_not_floored():
    """A floor of 1e-8 under p_d, as in the reference, would keep half of the first and a hundredth of the second."""
    for p, q in ((5e-9, 1e-10), (1e-10, 1e-12)):
        assert one_slot([p, 1 - p], [q, 1 - q], token=0, u=0.999, dtype=torch.float32)[0] == 1


def test_residual_without_mass_falls_back_to_the_target():
    p, q = [0.5, 0.5 - 2**-25, 0.0], [0.5, 0.5, 0.0]  # float32 rows whose sums differ in the last place
    for v, token in ((0.0, 0), (0.4, 0), (0.6, 1), (BELOW_ONE, 1)):
        assert one_slot(p, q, token=1, u=1 - 2**-53, v=v, dtype=torch.float32) == (0, token)
    assert one_slot([1 - 2**-24, 0.0], None, token=0, u=1 - 2**-53, dtype=torch.float32) == (0, 0)


@pytest.mark.parametrize("draft_probs", [None, torch.ones(3, 0, 4)])
def test_block_of_no_slots_is_a_plain_draw(draft_probs):
    target = torch.eye(4)[torch.tensor([2, 0, 3])][:, None]
    ids, lengths = torch.empty(3, 0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    assert rejection_sample(ids, draft_probs, target, lengths).next_ids.tolist() == [2, 0, 3]
    assert greedy_verify(ids, torch.tensor([[5], [6], [7]]), lengths).next_ids.tolist() == [5, 6, 7]


@pytest.mark.parametrize("value", [float("nan"), 0.0])
@pytest.mark.parametrize("vocab", [63, 1000])
def test_rows_without_a_law_stay_inside_the_vocabulary(vocab, value):
    rows = random_rows(vocab, torch.float32, "dense")
    rows.target[::2] = value
    rows.draft[::4] = value
    ids = rows.verdict().next_ids
    assert ((ids >= 0) & (ids < vocab)).all()
    assert torch.equal(ids[1::2], random_rows(vocab, torch.float32, "dense").verdict().next_ids[1::2])


@pytest.mark.parametrize("vocab", [1, 2, 1000, 151_936, 262_144])
def test_draw_follows_the_cumulative_weights(vocab):
    """Each uniform lands where float64 says, up to 1e-7 of the mass; forbidden tokens never come out."""
    g = torch.Generator().manual_seed(0)
    weights = (torch.randn(vocab, generator=g) * 3).exp() * (torch.rand(vocab, generator=g) < 0.5) * 1e-20
    weights[vocab // 2] = 1e-20
    uniforms = torch.cat([torch.rand(200, generator=g).double(), torch.tensor([0, BELOW_ONE, 1 - 2**-53]).double()])
    ids = draw(weights.expand(203, -1), uniforms)
    cdf = weights.double().cumsum(0) / weights.double().sum()
    assert (weights[ids] > 0).all()
    assert (cdf[ids] > uniforms - 1e-7).all()
    assert (cdf[ids] - weights[ids] / weights.double().sum() < uniforms + 1e-7).all()


def test_tied_weights_are_drawn_equally_often():
    uniforms = (torch.arange(4000) + 0.5) / 4000
    weights = torch.zeros(1000).index_fill(0, torch.tensor([3, 127, 128, 999]), 0.25)
    assert draw(weights.expand(4000, -1), uniforms).bincount(minlength=1000)[[3, 127, 128, 999]].tolist() == [1000] * 4


def test_greedy_verify_equals_the_scalar_reference():
    g = torch.Generator().manual_seed(0)
    ids, target = torch.randint(2, (200, 5), generator=g), torch.randint(2, (200, 6), generator=g)
    lengths = torch.arange(200) % 6
    got = greedy_verify(ids, target, lengths)
    for b, length in enumerate(lengths.tolist()):
        want = rejection.greedy_verify(ids[b, :length].tolist(), target[b].tolist())
        assert (int(got.num_accepted[b]), int(got.next_ids[b])) == want


def test_randomness_comes_from_the_arguments():
    rows = random_rows(63, torch.float32, "dense")
    acceptance, seeded = rows.uniforms[:, :-1], lambda s: torch.Generator().manual_seed(s)
    full = rows.verdict(generator=seeded(1))
    assert torch.equal(full.next_ids, rows.verdict(generator=seeded(2)).next_ids)
    half = [rows.verdict(uniforms=acceptance, generator=seeded(s)) for s in (1, 1, 2)]
    assert all(torch.equal(h.num_accepted, full.num_accepted) for h in half)
    assert torch.equal(half[0].next_ids, half[1].next_ids)
    assert not torch.equal(half[0].next_ids, half[2].next_ids)
    free = [rows.verdict(uniforms=None, generator=seeded(s)) for s in (1, 1, 2)]
    assert torch.equal(free[0].next_ids, free[1].next_ids)
    assert not torch.equal(free[0].num_accepted, free[2].num_accepted)
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        runs.append(rows.verdict(uniforms=None).next_ids)
    assert torch.equal(*runs)


@pytest.mark.parametrize("form", FORMS)
def test_never_reads_a_value_on_the_host(form):
    """Under fake tensors any `.item()`, boolean mask or `nonzero` raises."""
    rows = random_rows(63, torch.float32, form)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = Rows(*(None if v is None else mode.from_tensor(v) for v in vars(rows).values()))
        assert fake.verdict().next_ids.shape == fake.verdict(uniforms=None).next_ids.shape == (40,)
        assert greedy_verify(fake.ids, fake.ids.new_ones(40, 4), fake.lengths).num_accepted.shape == (40,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": torch.zeros(2, 3)}, "`draft_ids` must be int64"),
        ({"lengths": torch.zeros(3, dtype=torch.int64)}, r"`lengths` must be int64 of shape \(2,\)"),
        ({"lengths": torch.zeros(2)}, "`lengths` must be int64"),
        ({"target": torch.rand(2, 3, 5)}, r"`target_probs` must be of shape \[2, 4, V\]"),
        ({"target": torch.rand(2, 4, 5).bfloat16()}, "float32 or float64, got torch.bfloat16"),
        ({"draft": torch.rand(2, 3, 4)}, "pass its sorted target ids as `draft_token_ids`"),
        ({"draft_token_ids": torch.arange(4)}, r"`draft_probs` must be of shape \(2, 3, 4\)"),
        ({"draft": torch.rand(2, 3, 5).double()}, "must have the dtype of `target_probs`"),
        ({"uniforms": torch.rand(2, 5)}, r"`uniforms` must be of shape \(2, 3\)"),
    ],
)
def test_misfits_are_named(change, message):
    fitting = Rows(torch.zeros(2, 3, dtype=torch.int64), torch.rand(2, 3, 5), torch.rand(2, 4, 5),
                   torch.zeros(2, dtype=torch.int64), torch.rand(2, 3))  # fmt: skip
    fitting.verdict()
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(fitting, **change).verdict()


def test_greedy_misfits_are_named():
    ids, lengths = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"`target_ids` must be int64 of shape \(2, 4\)"):
        greedy_verify(ids, ids, lengths)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("form", FORMS)
def test_gpu_gives_the_same_verdict_without_a_sync(form):
    rows = random_rows(1000, torch.float32, form)
    moved = Rows(*(None if v is None else v.cuda() for v in vars(rows).values()))
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = moved.verdict()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for ours, cpu in zip(got, rows.verdict(), strict=True):
        assert torch.equal(ours.cpu(), cpu)
